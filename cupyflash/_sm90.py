"""What the host's sides of the Hopper kernels have in common: what TMA takes, maps, Params."""

from collections.abc import Iterable

from ._array import ITEMSIZES, Array
from ._forward import MAX_HEAD_DIM
from ._problem import Problem
from ._tensor_map import BYTES, MAX_STRIDE, TensorMap, of

__all__ = ["padded", "refuse_dims", "refuse_strides", "tensor_maps"]

UNIT = 16  # bytes: of addresses, strides and rows
ALIGNMENT = 64  # bytes, of a tensor map, and so of Params
SWIZZLE = 128  # bytes: the span, and a row of a box


def refuse_dims(problem: Problem) -> str | None:
    """Return which head dim has no rows of whole 16 bytes, as the rest of a sentence, or None."""
    step = UNIT // ITEMSIZES[problem.dtype]
    for name in ("head_dim", "head_dim_v"):
        dim = getattr(problem, name)
        if not 1 <= dim <= MAX_HEAD_DIM or dim % step:
            return f"needs {name} from {step} to {MAX_HEAD_DIM} in steps of {step}, got {dim}"
    return None


def refuse_strides(problem: Problem, names: str) -> str | None:
    """Return why no tensor maps describe the arrays of these names, or None."""
    if problem.width < UNIT:
        return (
            f"needs addresses and strides that are multiples of {UNIT} bytes, "
            f"{names} have multiples of {problem.width}"
        )
    if problem.odd_stride is not None:
        return f"needs strides from 0 to {MAX_STRIDE - UNIT} bytes, got {problem.odd_stride}"
    return None


def padded(size: int) -> int:
    """Return the bytes of Params that hold so many."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def tensor_maps(arrays: Iterable[Array], rows: Iterable[int]) -> tuple[tuple[int, TensorMap], ...]:
    """Return a map of each array and its offset in Params, one after the other.

    Parameters
    ----------
    arrays : iterable of Array
        (batch, length, heads, head_dim) each.
    rows : iterable of int
        Of a copy of each, all of one head.
    """
    return tuple(
        (n * BYTES, of(x, (3, 1, 2, 0), (SWIZZLE // ITEMSIZES[x.dtype], count, 1, 1), SWIZZLE))
        for n, (x, count) in enumerate(zip(arrays, rows, strict=True))
    )
