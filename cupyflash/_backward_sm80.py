"""The host's side of cuda/kernels/attention_bwd_sm80.cu: what it takes, the steps of a call."""

import struct

from . import _backward_dbias, _backward_delta, _backward_dq, _backward_dsink, _modifiers, _unit
from ._array import ITEMSIZES
from ._backward_delta import natural, stat_heads, stat_rows
from ._backward_shared import Scratch, key_tiles, without_sink
from ._forward import MAX_HEAD_DIM, refuse_dtype, refuse_lengths
from ._launch import Launch, Steps
from ._problem import Operands, Problem
from ._problem_backward import Backward
from ._tuning import heads_per_group
from ._tuning_bwd import BackwardSm80, backward_sm80

__all__ = ["DTYPES", "NAME", "config", "refusal", "steps"]

NAME = "attention_bwd_sm80"
DTYPES: tuple[str, ...] = ("float16", "bfloat16", "float32")
MAX_BLOCKS = 2**31 - 1  # CUDA C++ Programming Guide, Compute Capabilities: x-dimension of a grid
# Params: the arrays, then the lse, delta, the sums of dq and the counters; 18 strides, 9 integers
# and the scale, in the units of the lse and as it is; then those of policies.
PARAMS = struct.Struct("<10Q18q9i2f4x")
ARRAYS = ("q", "k", "v", "dout", "dk", "dv")


def refusal(problem: Problem) -> str | None:
    """Return why the kernel does not take a problem, as the rest of a sentence, or None."""
    for name in ("head_dim", "head_dim_v"):
        if (dim := getattr(problem, name)) > MAX_HEAD_DIM:
            return f"needs {name} <= {MAX_HEAD_DIM}, got {dim}"
    reason = refuse_dtype(problem, DTYPES) or refuse_lengths(problem)
    if reason:
        return reason
    blocks = max(
        key_tiles(problem, config(problem).block_k),
        stat_heads(problem) * stat_rows(problem) // _backward_dq.BLOCK_Q,
    )
    if blocks > MAX_BLOCKS:
        return f"launches at most {MAX_BLOCKS} blocks, this needs {blocks}"
    return None


def config(problem: Problem) -> BackwardSm80:
    """Return the configuration that the unit of a problem is rendered from."""
    assert problem.arch is not None
    policies = _modifiers.policies(without_sink(problem))
    return backward_sm80(
        problem.dtype,
        problem.head_dim,
        problem.head_dim_v,
        problem.arch,
        policies=policies,
        width=problem.width,
        deterministic=problem.deterministic and not problem.empty,
        natural=natural(problem),
        params_bytes=PARAMS.size + policies.params_bytes,
    )


def steps(problem: Problem, operands: Operands, backward: Backward) -> Steps:
    """Return the launches of a problem."""
    chosen = config(problem)
    scratch = Scratch.of(problem, chosen.head_dim, counted=problem.deterministic)
    delta = _backward_delta.launch(
        problem,
        operands,
        backward,
        lse=scratch.lse,
        delta=scratch.delta,
        dq=scratch.dq,
        dq_columns=chosen.head_dim,
        added=scratch.added,
    )
    dq = _backward_dq.launch(
        problem,
        operands,
        backward,
        sums=scratch.dq,
        order=chosen.order,
        columns=chosen.head_dim,
    )
    launches = [delta, _launch(problem, operands, backward, chosen, scratch), dq]
    if "dsink" in problem.wanted:
        statistics = {"lse": scratch.lse, "delta": scratch.delta}
        launches.append(_backward_dsink.launch(problem, operands, backward, **statistics))
    size = scratch.size
    if "dbias" in problem.wanted:
        more, last = _backward_dbias.launches(
            problem, operands, backward, delta=scratch.delta, scratch_offset=size
        )
        size, launches = size + more, [*launches, *last]
    return Steps(size, tuple(launch for launch in launches if launch.grid[0]))


def _launch(
    problem: Problem,
    operands: Operands,
    backward: Backward,
    chosen: BackwardSm80,
    scratch: Scratch,
) -> Launch:
    """Return the launch of the kernel itself."""
    arrays = (operands.q, operands.k, operands.v, backward.dout, backward.dk, backward.dv)
    bare = without_sink(problem), operands._replace(learnable_sink=None)
    params = PARAMS.pack(
        *(array.pointer for array in arrays),
        *[0] * 4,
        *(stride for array in arrays for stride in array.strides[:3]),
        problem.batch,
        problem.len_q,
        problem.len_k,
        problem.heads_q,
        problem.heads_k,
        problem.head_dim,
        problem.head_dim_v,
        stat_rows(problem),
        _group(problem),
        problem.scale * (1.0 if chosen.natural else _modifiers.LOG2_E),
        problem.scale,
    )
    places = tuple((name, 8 * i) for i, name in enumerate(ARRAYS))
    parts = (scratch.lse, scratch.delta, scratch.dq, scratch.added)
    return Launch(
        unit=_unit.render(NAME, chosen),
        symbol=NAME,
        arch=f"sm_{problem.arch}",
        grid=(key_tiles(problem, chosen.block_k), 1, 1),
        block=(chosen.threads, 1, 1),
        shared_bytes=chosen.smem_bytes,
        params=params + _modifiers.pack(*bare),
        places=(*places, *_modifiers.places(*bare, PARAMS.size)),
        scratch=tuple((8 * (len(ARRAYS) + i), at) for i, at in enumerate(parts) if at is not None),
    )


def _group(problem: Problem) -> int:
    """Return how many heads of keys share the L2 cache: by Q and dO of the heads that use them."""
    return heads_per_group(
        problem.len_q * max(1, problem.heads_q // max(1, problem.heads_k)),
        problem.head_dim,
        problem.head_dim_v,
        ITEMSIZES[problem.dtype],
        problem.batch * problem.heads_k,
        8,
    )
