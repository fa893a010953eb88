"""What compute-sanitizer watches, in a process of its own: ``python sanitized.py WHAT``.

``attend KERNEL`` and ``differentiate KERNEL`` run the kernel's cases on the GPU and hold them
against the oracle; ``fault`` writes past an array, to see whether the tool works on this machine.
Every array is an allocation of its own and ends where the allocation ends, so that the tool sees
the first byte too many.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

import mutations_bwd_sm80
import mutations_bwd_sm90
import mutations_dbias
import numpy as np
from cases import SMOKE, Case
from gradients import judge as judge_gradients
from gradients import seeds_of
from harness import GPU_KERNEL, HOPPER, METADATA, fetch, judge, placed, strided
from mutations import edited
from mutations_bwd_sm90 import BLOCK, CONSUMER, PRODUCER, SHARED
from strided import Strided

import cupyflash
from cupyflash import Gradients, _backward_sm80, _backward_sm90

FAULT = 'extern "C" __global__ void fault(char *array, int size) { array[size] = 1; }'
CASES: dict[str, dict[str, Case]] = {
    GPU_KERNEL: {case.id: case for case in SMOKE},
    HOPPER: {case.id: case for case in SMOKE[:2]},
}
GENERIC, OF_HOPPER = mutations_bwd_sm80.PROBLEMS, mutations_bwd_sm90.PROBLEMS
# Together they launch every kernel of gradients.
GRADIENTS: dict[str, dict[str, Case]] = {
    _backward_sm80.NAME: {
        name: GENERIC[name]
        for name in (
            "causal", "odd head dims", "sharers", "one maker", "in order, window", "sink",
            "dropout, 16 keys", "packed",
        )
    } | {"dbias in parts": mutations_dbias.PROBLEMS["in parts"][0]},
    _backward_sm90.NAME: {
        name: OF_HOPPER[name]
        for name in ("causal", "two panels", "wide", "packed", "in order", "in order, wide")
    } | {"sink": GENERIC["sink"]},
}  # fmt: skip

# To racecheck an arrival at an mbarrier orders what that very thread did before: not what the other
# lanes did before a warp barrier, after which lane 0 arrives for them all. It is given sources in
# which every lane arrives. That the warp barriers stand is the emulator's to check: see
# mutations_bwd_sm90.py.
EVERY_LANE_ARRIVES = (
    (CONSUMER, "if (ptx::lane() == 0) ptx::mbarrier_arrive(barrier);",
        "ptx::mbarrier_arrive(barrier);"),
    (SHARED, "ring.init(1, 4);", "ring.init(1, 128);"),
    (SHARED, "p_ring.init(4, 4);", "p_ring.init(128, 128);"),
    (SHARED, "one.init(4);", "one.init(128);"),
    (SHARED, "if (ptx::lane() == 0) ptx::mbarrier_arrive(Cursor<1>(number).empty(ring[group]));",
        "ptx::mbarrier_arrive(Cursor<1>(number).empty(ring[group]));"),
    (BLOCK, "ds_ring.init(4 * CONSUMERS, WIDE ? 4 : 4 * CONSUMERS)",
        "ds_ring.init(128 * CONSUMERS, WIDE ? 128 : 128 * CONSUMERS)"),
    # A tile is full by the thread that loads it or by the warp that clears its tail: as often.
    (BLOCK, "k_ring.init(1);", "k_ring.init(1, 32);"),
    (BLOCK, "v_ring.init(1);", "v_ring.init(1, 32);"),
    (BLOCK, "q_ring.init(4 * CONSUMERS);", "q_ring.init(128 * CONSUMERS, 32);"),
    (BLOCK, "dout_ring.init(4 * CONSUMERS);", "dout_ring.init(128 * CONSUMERS, 32);"),
    (SHARED, "ring.init(1); }", "ring.init(32, 32); }"),
    (PRODUCER, "      if (ptx::lane() == 0) {\n        ptx::mbarrier_arrive(next.full);",
        "      {\n        ptx::mbarrier_arrive(next.full);"),
    (PRODUCER, "arrive_expect_tx(full, Queries::BYTES + BLOCK_Q * sizeof(float));",
        "arrive_expect_tx(full, Queries::BYTES + BLOCK_Q * sizeof(float));\n"
        "    for (int i = 1; i < 32; ++i) ptx::mbarrier_arrive(full);"),
    (PRODUCER, "arrive_expect_tx(full, Keys::BYTES);",
        "arrive_expect_tx(full, Keys::BYTES);\n"
        "    for (int i = 1; i < 32; ++i) ptx::mbarrier_arrive(full);"),
    (PRODUCER, "ptx::mbarrier_arrive(announce(nullptr, 0, 0, 0, 0));",
        "for (u32 full = announce(nullptr, 0, 0, 0, 0), i = 0; i < 32; ++i)\n"
        "      ptx::mbarrier_arrive(full);"),
)  # fmt: skip


def exact(array: Strided | np.ndarray) -> Strided:
    """Copy an array into a storage without guard bands."""
    array = strided(array)
    offset = array.layout.offset - array.layout.guard
    return Strided.of(array.host, array.layout._replace(offset=offset, guard=0))


def exactly(options: dict[str, Any]) -> dict[str, Any]:
    """Return options whose arrays, but lengths, are without guard bands."""
    return {
        name: exact(x) if name not in METADATA and isinstance(x, Strided | np.ndarray) else x
        for name, x in options.items()
    }


def attend(kernel: str, place: str = "gpu") -> None:
    for name, case in CASES[kernel].items():
        arrays = [exact(x) for x in case.arrays()]
        if kernel == HOPPER:
            arrays[1].host[:, :8] *= 64  # met last: warps have to look at their tiles again
        operands = [x.on(place) for x in arrays]
        out, lse = cupyflash.attention(*operands, kernel=kernel, return_lse=True, **case.options)
        judge(fetch(place, out, lse), *arrays, **case.options)
        print(name)


def differentiate(kernel: str, place: str = "gpu") -> None:
    """Run the backward cases of a kernel.

    The forward pass is the host's, which the tool does not slow down; of fp32 it is the GPU's too:
    what tensor cores cut from the scores of both passes cancels.
    """
    for name, case in GRADIENTS[kernel].items():
        q, k, v = (exact(x) for x in case.arrays())
        options = exactly(case.options)
        dout, dlse = seeds_of(q.host, v.host)
        first = GPU_KERNEL if case.dtype == "float32" else "cpu"
        there = place if first == GPU_KERNEL else "cpu"
        function = cupyflash.attention_varlen if "cu_seqlens_q" in options else cupyflash.attention
        results = function(
            *(x.on(there) for x in (q, k, v)),
            kernel=first,
            return_lse=True,
            **placed(there, options),
        )
        given = [exact(x).on(place) for x in (dout, q, k, v, *fetch(there, *results))]
        grads = cupyflash.attention_backward(
            *given,
            dlse=exact(dlse).on(place),
            kernel=kernel,
            deterministic=name.startswith("in order"),
            **placed(place, options),
        )
        host = Gradients(*(None if x is None else fetch(place, x)[0] for x in grads))
        judge_gradients(host, q, k, v, dout, dlse, **options)
        print(name)


def sources_for(tool: str, kernel: str, root: Path) -> dict[str, str]:
    """Return the environment of a tool that watches gradients; sources of its own go to root."""
    if (tool, kernel) != ("racecheck", _backward_sm90.NAME):
        return {}
    return {"CUPYFLASH_CUDA_DIR": str(edited(root, EVERY_LANE_ARRIVES))}


def fault() -> None:
    array = cupy.empty(512, np.int8)
    with contextlib.suppress(Exception):  # the tool makes the launch fail, in words of its own
        cupy.RawKernel(FAULT, "fault")((1,), (1,), (array, np.int32(array.size)))
        cupy.cuda.Device().synchronize()


if __name__ == "__main__":
    import cupy

    cupy.cuda.set_allocator(None)
    what = {"attend": attend, "differentiate": differentiate, "fault": fault}
    what[sys.argv[1]](*sys.argv[2:])
