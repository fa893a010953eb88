"""The host's side of cuda/kernels/attention_bwd_dsink.cu: the gradient of a sink."""

import struct
from dataclasses import dataclass

from . import _modifiers, _unit
from ._backward_delta import natural, stat_heads, stat_rows
from ._launch import Launch
from ._problem import Operands, Problem
from ._problem_backward import Backward

__all__ = ["NAME", "Sinks", "config", "launch"]

NAME = "attention_bwd_dsink"
THREADS = 512
WARPS = THREADS // 32
PARAMS = struct.Struct("<3Q4i")  # lse, delta, dsink; sizes


@dataclass(frozen=True)
class Sinks:
    """``struct Config`` of attention_bwd_dsink."""

    sink: str
    natural: bool
    params_bytes: int


def config(problem: Problem) -> Sinks:
    """Return the configuration that the unit of a problem is rendered from."""
    sink = _modifiers.policies(problem).sink
    return Sinks(sink, natural(problem), PARAMS.size + _modifiers.SIZES["Sink"])


def launch(
    problem: Problem, operands: Operands, backward: Backward, *, lse: int, delta: int
) -> Launch:
    """Return the launch of a problem.

    Parameters
    ----------
    problem, operands, backward : Problem, Operands, Backward
        The call; its sink is there, and dsink is wanted.
    lse, delta : int
        Where the statistics are in the scratch, in bytes, see `_backward_delta.launch`.
    """
    assert backward.dsink is not None
    sink, places = _modifiers.pack_sink(operands, PARAMS.size)
    params = PARAMS.pack(
        0,
        0,
        backward.dsink.pointer,
        stat_heads(problem) // max(1, problem.heads_q),
        problem.heads_q,
        stat_rows(problem),
        0,
    )
    return Launch(
        unit=_unit.render(NAME, config(problem)),
        symbol=NAME,
        arch=f"sm_{problem.arch}",
        grid=(problem.heads_q, 1, 1),
        block=(THREADS, 1, 1),
        shared_bytes=4 * WARPS,
        params=params + sink,
        places=(("dsink", 16), *places),
        scratch=((0, lse), (8, delta)),
    )
