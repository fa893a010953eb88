"""Launches one after the other on the emulator: a made-up backward kernel of three."""

import struct
from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler

import cupyflash
from cupyflash import KernelFault, _kernels
from cupyflash._kernels import Kernel
from cupyflash._launch import Launch, Steps

pytestmark = needs_compiler

UNIT = """#include "ptx/atomic.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
struct Params { float *a, *b, *dq, *dk, *dv, *dbias, *dsink, *scratch; u32 *tickets; int n; };
extern "C" __global__ void %s(const __grid_constant__ Params p) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  if (i < p.n) { %s }
}
"""
FIELDS = ("a", "b", "dq", "dk", "dv", "dbias", "dsink", "scratch", "tickets")
AT = 1024  # bytes into the scratch, where the steps hand on what they made
FIRST = "p.scratch[i] = p.a[i];"
SECOND = "p.scratch[i] += p.b[i];"
THIRD = """p.dq[i] = p.scratch[i]; p.dk[i] = 2; p.dv[i] = 3;
    if (p.dbias) p.dbias[i % 36] = 4;
    if (p.dsink) p.dsink[0] = 5;
    if (p.tickets && ptx::atomic_inc(p.tickets, p.n - 1) == p.n) p.dv[i] = 0;"""
SHAPE = (1, 6, 1, 8)


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    dout, q, k, v = (rng.standard_normal(SHAPE).astype(np.float32) for _ in range(4))
    return [dout, q, k, v, *cupyflash.attention(q, k, v, return_lse=True, kernel="cpu")]


def row(*bodies: str, grid: int = 2) -> Kernel:
    """Return a row of launches with these bodies; a is dout, b is q."""

    def steps(problem: Any, operands: Any, backward: Any) -> Steps:
        named = {"a": backward.dout, "b": operands.q} | backward._asdict()
        pointers = [named[name].pointer if named.get(name) else 0 for name in FIELDS]
        launches = [
            Launch(
                unit=UNIT % (f"step_{n}", body),
                symbol=f"step_{n}",
                arch="sm_90",
                grid=(grid if n else 2, 1, 1),
                block=(32, 1, 1),
                shared_bytes=0,
                params=struct.pack("<9Qi4x", *pointers, 48),
                places=(("tickets", 64),),
                scratch=((56, AT),),
            )
            for n, body in enumerate(bodies)
        ]
        return Steps(AT + 4 * 48, tuple(launches))

    return Kernel(
        "steps", "backward", range(80, 1000), "", lambda problem: None,
        config=lambda problem: None, steps=steps,
    )  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, *, seed: int = 0, **options: Any) -> Any:
    """Return the gradients that a row computes, and the session."""
    monkeypatch.setattr(_kernels, "KERNELS", (*_kernels.KERNELS, kernel))
    with cupyflash.emulate(seed=seed) as session:
        grads = cupyflash.attention_backward(*arrays(), kernel="steps", **options)
    return grads, session


@pytest.mark.parametrize("seed", [0, 1])
def test_steps_run_in_order_and_share_the_scratch(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bias = np.zeros((1, 1, 6, 6), np.float32)
    sink = np.zeros(1, np.float32)
    grads, session = run(
        monkeypatch, row(FIRST, SECOND, THIRD), seed=seed, attn_bias=bias, learnable_sink=sink
    )
    dout, q, *_ = arrays()
    np.testing.assert_array_equal(grads.dq, dout + q)
    for gradient, value in zip(grads[1:], (2, 3, 4, 5), strict=True):
        assert (gradient == value).all()
    assert {name: stats.launches for name, stats in session.stats.items()} == {
        "step_0": 1, "step_1": 1, "step_2": 1,
    }  # fmt: skip


def test_the_scratch_holds_nan_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    grads, _ = run(monkeypatch, row(SECOND, THIRD))
    assert np.isnan(grads.dq).all()


def test_a_step_without_blocks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    grads, session = run(monkeypatch, row(THIRD, FIRST, grid=0))
    assert list(session.stats) == ["step_0"]
    assert np.isnan(grads.dq).all()
    assert (grads.dk == 2).all()


def test_inputs_of_any_strides_are_read_as_they_lie_or_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = arrays()
    spread = np.repeat(given[0], 2, axis=-1)[..., ::2]
    monkeypatch.setattr(_kernels, "KERNELS", (*_kernels.KERNELS, row(FIRST, THIRD)))
    lse = np.repeat(given[5], 2, axis=-1)[..., ::2]
    with cupyflash.emulate():
        grads = cupyflash.attention_backward(spread, *given[1:5], lse, kernel="steps")
    np.testing.assert_array_equal(grads.dq, given[0])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("const_cast<float *>(p.a)[i] = 1;", "bytes were written to the input `dout`"),
        ("p.dq[i + 1] = 1;", "step_0 .*a store of 4 bytes at dq"),
        ("p.scratch[i + 64] = 1;", "step_0 .*a store of 4 bytes at scratch"),
        ("p.tickets[0] = 3;", r"step_0 left its tickets at \[3, 0\]"),
    ],
)
def test_faults_of_a_step(body: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelFault, match=words):
        run(monkeypatch, row(body))


def test_the_host_still_computes_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with cupyflash.emulate() as session:
        cupyflash.attention_backward(*arrays(), kernel="reference")
    assert not session.stats
