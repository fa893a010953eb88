"""What the forward kernels of a GPU have in common: limits that they state in words, and sizes."""

from . import _tuning
from ._array import ITEMSIZES
from ._modifiers import LOG2_E, SMALLEST_NORMAL
from ._problem import Problem

__all__ = [
    "MAX_HEAD_DIM",
    "has_positive_scale",
    "heads_per_group",
    "refuse_dtype",
    "refuse_lengths",
    "tiles",
]

MAX_HEAD_DIM = 256
MAX_LENGTH = 2**29  # sums of two positions, with a tile's padding, stay in 32 bits


def refuse_dtype(problem: Problem, dtypes: tuple[str, ...]) -> str | None:
    """Return what is wrong with the element type, as the rest of a sentence, or None."""
    if problem.dtype in dtypes:
        return None
    return f"takes {', '.join(dtypes)}, got {problem.dtype}"


def refuse_lengths(problem: Problem) -> str | None:
    """Return which length is beyond 32-bit positions, or None."""
    longest = max(problem.len_q, problem.len_k)
    if longest <= MAX_LENGTH or problem.empty:
        return None
    return f"needs lengths up to {MAX_LENGTH}, got {longest}"


def tiles(problem: Problem, block_q: int) -> int:
    """Return how many tiles of so many rows the output has, at most where sequences are packed."""
    if problem.empty:
        return 0
    if problem.packed:  # each sequence may begin a tile, so may the rows before and after them
        return (problem.len_q // block_q + problem.batch + 2) * problem.heads_q
    return -(-problem.len_q // block_q) * problem.batch * problem.heads_q


def heads_per_group(problem: Problem) -> int:
    """Return how many heads share the L2 cache.

    Thirty-two at least, however long they are: by groups of 4, 8, 16, 32 and 64 heads, causal,
    H200, attention_fwd_sm90 takes 482, 464, 434, 419 and 433 us at head dim 128, length 4096,
    900, 843, 810, 796 and 812 at 8192, and 475, 440, 420, 420 and 427 at head dim 256, length 4096.
    """
    return _tuning.heads_per_group(
        problem.len_k,
        problem.head_dim,
        problem.head_dim_v,
        ITEMSIZES[problem.dtype],
        problem.batch * problem.heads_q,
        32,
    )


def has_positive_scale(problem: Problem) -> bool:
    """Return whether the scale in base 2 is a positive normal fp32 number."""
    return problem.scale * LOG2_E >= SMALLEST_NORMAL
