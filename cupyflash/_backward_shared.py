"""What the backward kernels of a GPU have in common: scratch, tiles of keys, bare problems."""

import dataclasses

from ._backward_delta import ADDED_ROWS, stat_heads, stat_rows
from ._problem import Problem

__all__ = ["Scratch", "key_tiles", "without_sink"]

ALIGNMENT = 256  # bytes, of the parts of the scratch


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Where the parts of a call's scratch are, in bytes."""

    lse: int
    delta: int
    dq: int
    added: int | None
    more: int  # counters that belong to no rows, behind the others
    partial: int  # sums of those who share a block of keys
    size: int

    @classmethod
    def of(
        cls, problem: Problem, columns: int, *, counted: bool, more: int = 1, partial: int = 0
    ) -> "Scratch":
        """Lay out the scratch of a problem whose sums of dQ have so many columns.

        `counted`: with counters of who has added to them, and `more`; `partial` is in bytes.
        """
        rows = stat_heads(problem) * stat_rows(problem)
        delta = _aligned(4 * rows)
        dq = 2 * delta
        added = dq + _aligned(4 * rows * columns)
        if not counted:
            return cls(0, delta, dq, None, added, added, added)
        counters = rows // ADDED_ROWS
        sums = added + _aligned(4 * (counters + more))
        return cls(0, delta, dq, added, added + 4 * counters, sums, sums + _aligned(partial))


def key_tiles(problem: Problem, block_k: int) -> int:
    """Return how many tiles of so many rows dK has, at most where sequences are packed."""
    if problem.packed:  # each sequence may begin a tile, so may the rows before and after them
        return (
            (problem.len_k // block_k + problem.batch + 2) * problem.heads_k if problem.len_k else 0
        )
    return -(-problem.len_k // block_k) * problem.batch * problem.heads_k


def without_sink(problem: Problem) -> Problem:
    """Return the problem of a main kernel: a sink is in the LSE."""
    return dataclasses.replace(
        problem,
        modifiers=tuple(name for name in problem.modifiers if name != "learnable_sink"),
        dtypes=tuple(pair for pair in problem.dtypes if pair[0] != "learnable_sink"),
    )


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
