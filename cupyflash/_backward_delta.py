"""The host's side of cuda/kernels/attention_bwd_delta.cu, and the rows of the backward's scratch.

Stat rows are what cuda/tile/stat_rows.cuh says: each head of each batch entry has `stat_rows` of
them, a head of packed sequences has them once for all.
"""

import math
import struct
from dataclasses import dataclass

from . import _modifiers, _unit
from ._array import ITEMSIZES
from ._launch import Launch
from ._problem import Operands, Problem
from ._problem_backward import Backward
from ._tuning import HEAD_DIMS

__all__ = [
    "ADDED_ROWS",
    "NAME",
    "STAT_ROWS",
    "Delta",
    "config",
    "launch",
    "natural",
    "stat_heads",
    "stat_rows",
]

NAME = "attention_bwd_delta"
STAT_ROWS = 128  # sequences begin at multiples of it
ADDED_ROWS = 16  # share a counter of what was added to their dQ
THREADS = 256
# Params: out, dout, lse, dlse, stat_lse, delta, dq, added; strides of out and dout (batch, row,
# head) and of dlse (batch, head, row); sizes.
PARAMS = struct.Struct("<8Q9q8i")
NAMES = ("out", "dout", "lse", "dlse")  # whose addresses come first
SCRATCH = ("stat_lse", "delta", "dq", "added")  # and those that follow


@dataclass(frozen=True)
class Delta:
    """``struct Config`` of attention_bwd_delta."""

    t: str
    sequences: str
    head_dim_v: int
    natural: bool
    width: int  # bytes of an access to global memory
    min_blocks: int  # that registers must leave room for; 0 leaves registers to ptxas
    params_bytes: int


def stat_rows(problem: Problem) -> int:
    """Return how many stat rows a head has."""
    if problem.packed:
        return _rounded(problem.len_q + STAT_ROWS * problem.batch + 1)
    return _rounded(problem.len_q)


def stat_heads(problem: Problem) -> int:
    """Return how many heads have stat rows of their own."""
    return problem.heads_q * (1 if problem.packed else problem.batch)


def natural(problem: Problem) -> bool:
    """Return whether the LSE is kept as it is and not in units of log 2.

    There it is rounded once more, which shows in fp32, and where a bias makes scores large.
    """
    return problem.dtype == "float32" or _modifiers.policies(problem).score != "Identity"


def config(problem: Problem) -> Delta:
    """Return the configuration that the unit of a problem is rendered from."""
    sequences = _modifiers.policies(problem).sequences
    itemsize = ITEMSIZES[problem.dtype]
    return Delta(
        t=_modifiers.ELEMENTS[problem.dtype],
        sequences=sequences,
        head_dim_v=min(size for size in HEAD_DIMS if size >= problem.head_dim_v),
        natural=natural(problem),
        width=math.gcd(problem.width, problem.head_dim_v * itemsize),
        min_blocks=0 if problem.arch == 90 else 2,  # elsewhere ptxas spills for a third
        params_bytes=PARAMS.size + _modifiers.SIZES[sequences],
    )


def launch(
    problem: Problem,
    operands: Operands,
    backward: Backward,
    *,
    lse: int,
    delta: int,
    dq: int | None = None,
    dq_columns: int = 0,
    added: int | None = None,
    more: int = 1,
) -> Launch:
    """Return the launch of a problem.

    Parameters
    ----------
    problem, operands : Problem, Operands
        The call; the rows of ``out`` and ``dout`` allow accesses of ``problem.width`` bytes.
    backward : Backward
        Of which it reads out, dout, lse and dlse.
    lse, delta : int
        Where in the scratch the statistics go, in bytes: fp32, (stat_heads, stat_rows) each.
    dq : int, optional
        Where the accumulator is that becomes zeros: fp32, (stat_heads, stat_rows, dq_columns).
    dq_columns : int
        A multiple of 4.
    added : int, optional
        Where the counters are that become zeros: 32 bits, (stat_heads, stat_rows / ADDED_ROWS),
        and more.
    more : int
        How many more; the first is for the number of the next block.
    """
    chosen = config(problem)
    arrays = (backward.out, backward.dout, backward.lse, backward.dlse)
    sequences, places = _modifiers.pack_sequences(problem, operands, PARAMS.size)
    params = PARAMS.pack(
        *(0 if x is None else x.pointer for x in arrays),
        *[0] * len(SCRATCH),
        *backward.out.strides[:3],
        *backward.dout.strides[:3],
        *((0, 0, 0) if backward.dlse is None else backward.dlse.strides),
        problem.batch,
        problem.len_q,
        problem.heads_q,
        problem.head_dim_v,
        stat_rows(problem),
        dq_columns,
        more,
        0,
    )
    scratch = zip(SCRATCH, (lse, delta, dq, added), strict=True)
    names = (
        (name, 8 * i)
        for i, (name, x) in enumerate(zip(NAMES, arrays, strict=True))
        if x is not None
    )
    return Launch(
        unit=_unit.render(NAME, chosen),
        symbol=NAME,
        arch=f"sm_{problem.arch}",
        grid=(stat_heads(problem) * stat_rows(problem) // STAT_ROWS, 1, 1),
        block=(THREADS, 1, 1),
        shared_bytes=0,
        params=params + sequences,
        places=(*names, *places),
        scratch=tuple(
            (8 * (len(NAMES) + i), at) for i, (_, at) in enumerate(scratch) if at is not None
        ),
    )


def _rounded(rows: int) -> int:
    return -(-rows // STAT_ROWS) * STAT_ROWS
