"""The host's side of cuda/kernels/attention_bwd_dq.cu: from the sums of dQ to dQ."""

import math
import struct
from dataclasses import dataclass

from . import _modifiers, _unit
from ._array import ITEMSIZES
from ._backward_delta import stat_rows
from ._forward import tiles
from ._launch import Launch
from ._problem import Operands, Problem
from ._problem_backward import Backward

__all__ = ["NAME", "Finish", "config", "launch"]

NAME = "attention_bwd_dq"
BLOCK_Q = 64
THREADS = 128
# Params: the sums and dq; strides of dq (batch, row, head); sizes and the scale.
PARAMS = struct.Struct("<2Q3q5if")


@dataclass(frozen=True)
class Finish:
    """``struct Config`` of attention_bwd_dq."""

    t: str
    sequences: str
    order: str  # of the sums: RowOrder, ThreadOrder or LaneOrder of cuda/tile/sums.cuh
    head_dim: int  # the columns of the sums
    width: int  # bytes of an access to dq
    params_bytes: int
    smem_bytes: int


def config(problem: Problem, order: str, columns: int) -> Finish:
    """Return the configuration for sums of so many columns in an order."""
    sequences = _modifiers.policies(problem).sequences
    itemsize = ITEMSIZES[problem.dtype]
    return Finish(
        t=_modifiers.ELEMENTS[problem.dtype],
        sequences=sequences,
        order=order,
        head_dim=columns,
        width=math.gcd(problem.width, problem.head_dim * itemsize),
        params_bytes=PARAMS.size + _modifiers.SIZES[sequences],
        smem_bytes=BLOCK_Q * (columns * itemsize + 16),
    )


def launch(
    problem: Problem, operands: Operands, backward: Backward, *, sums: int, order: str, columns: int
) -> Launch:
    """Return the launch of a problem.

    Parameters
    ----------
    problem, operands, backward : Problem, Operands, Backward
        The call.
    sums : int
        Where in the scratch the sums of dQ are, in bytes: fp32, (stat_heads, stat_rows, columns).
    order : {"RowOrder", "ThreadOrder", "LaneOrder"}
        How 16 rows of them lie, see cuda/tile/sums.cuh.
    columns : int
        A multiple of 16, head_dim at least.
    """
    chosen = config(problem, order, columns)
    dq = backward.dq
    sequences, places = _modifiers.pack_sequences(problem, operands, PARAMS.size)
    params = PARAMS.pack(
        0,
        dq.pointer,
        *dq.strides[:3],
        problem.batch,
        problem.len_q,
        problem.heads_q,
        problem.head_dim,
        stat_rows(problem),
        problem.scale,
    )
    return Launch(
        unit=_unit.render(NAME, chosen),
        symbol=NAME,
        arch=f"sm_{problem.arch}",
        grid=(tiles(problem, BLOCK_Q), 1, 1),
        block=(THREADS, 1, 1),
        shared_bytes=chosen.smem_bytes,
        params=params + sequences,
        places=(("dq", 8), *places),
        scratch=((0, sums),),
    )
