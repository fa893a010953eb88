"""Views of array records: axes in another order, broadcast axes, shared bytes."""

from typing import Any

import numpy as np

from ._array import Array, contiguous_strides, normal_strides
from ._array.host import host_view

__all__ = ["broadcast", "overlap", "overlaps_itself", "permuted", "span", "strides_like"]

MAX_WORK: Any = 10_000  # candidates that the exact overlap test may try, about a millisecond


def permuted(array: Array, axes: tuple[int, ...]) -> Array:
    """Return the view of an array with its axes in another order."""
    return array._replace(
        shape=tuple(array.shape[axis] for axis in axes),
        strides=tuple(array.strides[axis] for axis in axes),
    )


def broadcast(array: Array, shape: tuple[int, ...]) -> Array | None:
    """Return the view that NumPy's rules give, or None; axes of size 1 and missing ones repeat."""
    missing = len(shape) - len(array.shape)
    if missing < 0:
        return None
    sizes, steps = (1,) * missing + array.shape, (0,) * missing + array.strides
    if any(size not in (1, full) for size, full in zip(sizes, shape, strict=True)):
        return None
    strides = tuple(0 if size == 1 else step for size, step in zip(sizes, steps, strict=True))
    return array._replace(shape=shape, strides=strides)


def strides_like(array: Array, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides for a new array whose last size alone may differ from that of another.

    They follow the other's order of dimensions if it is dense and its last dimension the innermost;
    else, and where there is no element, they are C-contiguous.
    """
    last = len(shape) - 1
    # Outermost first: a size of 1 may stand anywhere, so it goes there.
    many = [bool(size > 1) for size in array.shape]  # sizes may be symbols of PyTorch's
    order = sorted(range(last), key=lambda axis: (many[axis], -array.strides[axis]))
    packed = contiguous_strides((*(array.shape[axis] for axis in order), array.shape[last]))
    dense = all(
        array.shape[axis] == 1 or array.strides[axis] == packed[place]
        for place, axis in enumerate((*order, last))
    )
    if not dense or 0 in shape or 0 in array.shape:
        return contiguous_strides(shape)
    packed = contiguous_strides((*(shape[axis] for axis in order), shape[last]))
    return normal_strides(shape, (*(packed[order.index(axis)] for axis in range(last)), 1))


def overlap(a: Array, b: Array) -> bool:
    """Return whether two arrays share bytes, or whether that is too hard to say."""
    if not (a.pointer and b.pointer) or a.device != b.device:
        return False
    try:  # NumPy looks at addresses only, so that they may be those of a GPU
        return bool(np.shares_memory(host_view(a), host_view(b), MAX_WORK))
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(array: Array) -> bool:
    """Return whether two elements share bytes (True also for some rare views where none do)."""
    if 0 in array.shape:
        return False
    extent = 0
    for stride, size in sorted(zip(map(abs, array.strides), array.shape, strict=True)):
        if size > 1 and stride <= extent:
            return True
        extent += stride * (size - 1)
    return False


def span(array: Array, itemsize: int) -> tuple[int, int]:
    """Return the first byte of an array and the end of its last, counted from its pointer."""
    if 0 in array.shape:
        return 0, 0
    steps = [stride * (n - 1) for stride, n in zip(array.strides, array.shape, strict=True)]
    first, last = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
    return first * itemsize, (last + 1) * itemsize
