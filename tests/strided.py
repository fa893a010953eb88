"""Arrays of any strides and offset whose whole storage a test holds, on the host and on the GPU.

The storage is filled with NaN (every byte 0xFF) except where the array lies, so that a read outside
of the array shows in a result, and a write outside of it shows in the storage.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (gives NumPy the dtype name "bfloat16")
import numpy as np

GUARD = 64  # elements before and after an array: whole 128-byte lines, so that the alignment stays
NAN_BYTE = 0xFF


class Layout(NamedTuple):
    """Where an array lies in its storage, in elements."""

    strides: tuple[int, ...]
    offset: int = GUARD
    guard: int = GUARD

    def size(self, shape: tuple[int, ...]) -> int:
        """Elements of a storage that holds the array and the guard band after it."""
        steps = zip(shape, self.strides, strict=True)
        return self.offset + sum(max(0, (n - 1) * s) for n, s in steps) + 1 + self.guard


def dense(
    shape: tuple[int, ...],
    axes: tuple[int, ...] | None = None,
    *,
    shift: int = 0,
    step: int = 1,
    gap: int = 0,
) -> Layout:
    """Lay out the axes in this order, outermost first.

    Parameters
    ----------
    shape
        The array's shape.
    axes
        Its axes from the outermost in memory to the innermost; as they are by default.
    shift
        Elements by which the array starts after an aligned address.
    step
        Stride of the innermost axis.
    gap
        Elements left free after each row (index of axis 1).
    """
    strides = [0] * len(shape)
    span = step
    for axis in reversed(axes or range(len(shape))):
        span += gap * (axis == 1)
        strides[axis] = span
        span *= max(1, shape[axis])
    return Layout(tuple(strides), GUARD + shift)


def reverse(shape: tuple[int, ...], axis: int) -> Layout:
    """Lay out a dense array that runs backwards along an axis."""
    strides, offset, _ = dense(shape)
    flipped = tuple(-s if a == axis else s for a, s in enumerate(strides))
    return Layout(flipped, offset + max(0, shape[axis] - 1) * strides[axis])


def broadcast(shape: tuple[int, ...], *axes: int) -> Layout:
    """Lay out an array whose elements repeat along the axes (stride 0)."""
    strides, offset, _ = dense(tuple(1 if a in axes else n for a, n in enumerate(shape)))
    return Layout(tuple(0 if a in axes else s for a, s in enumerate(strides)), offset)


# Layouts of a (batch, length, heads, head_dim) array; in these the last dimension is contiguous.
ROWWISE: dict[str, Callable[[tuple[int, ...]], Layout]] = {
    "packed": dense,
    "offset_1": lambda s: dense(s, shift=1),
    "offset_2": lambda s: dense(s, shift=2),
    "offset_3": lambda s: dense(s, shift=3),
    "row_gap_1": lambda s: dense(s, gap=1),
    "row_gap_8": lambda s: dense(s, gap=8),
    "fused_qkv": lambda s: dense(s, gap=2 * s[2] * s[3]),
    "heads_first": lambda s: dense(s, (0, 2, 1, 3)),
    "length_first": lambda s: dense(s, (1, 0, 2, 3)),
    "batch_inside": lambda s: dense(s, (2, 1, 0, 3)),
    "reversed_batch": lambda s: reverse(s, 0),
    "reversed_rows": lambda s: reverse(s, 1),
    "reversed_heads": lambda s: reverse(s, 2),
}
BROADCAST: dict[str, Callable[[tuple[int, ...]], Layout]] = {
    "one_batch": lambda s: broadcast(s, 0),
    "one_row": lambda s: broadcast(s, 1),
    "one_head": lambda s: broadcast(s, 2),
    "one_vector": lambda s: broadcast(s, 0, 1, 2),
}
COPIED: dict[str, Callable[[tuple[int, ...]], Layout]] = {
    "every_other_column": lambda s: dense(s, step=2),
    "reversed_columns": lambda s: reverse(s, 3),
    "one_column": lambda s: broadcast(s, 3),
    "one_element": lambda s: broadcast(s, 0, 1, 2, 3),
    "columns_outside": lambda s: dense(s, (0, 3, 1, 2)),
    "columns_before_heads": lambda s: dense(s, (0, 1, 3, 2)),
}
LAYOUTS = ROWWISE | BROADCAST | COPIED


class Strided:
    """An array, its storage and its twin on the GPU.

    Parameters
    ----------
    shape, dtype
        As for `numpy.ndarray`; `dtype` may be ``"bfloat16"``.
    layout
        A key of `LAYOUTS`, or a `Layout`.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, layout: str | Layout = "packed") -> None:
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self.layout = layout if isinstance(layout, Layout) else LAYOUTS[layout](self.shape)
        self.storage = np.full(
            self.layout.size(self.shape) * self.dtype.itemsize, NAN_BYTE, np.uint8
        )

    @classmethod
    def of(cls, values: np.ndarray, layout: str | Layout = "packed") -> "Strided":
        """Copy values into a layout; where elements share an address, one of their values stays."""
        array = cls(values.shape, values.dtype, layout)
        array.host[...] = values
        return array

    @classmethod
    def output(cls, shape: tuple[int, ...], dtype: Any, layout: str | Layout) -> "Strided":
        """Fill the array with NaN and everything around it with random bytes."""
        array = cls(shape, dtype, layout)
        around = ~array.inside
        noise = np.random.default_rng(array.storage.size)
        array.storage[around] = noise.integers(0, 256, int(around.sum()), np.uint8)
        return array

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in bytes."""
        return tuple(s * self.dtype.itemsize for s in self.layout.strides)

    @property
    def offset(self) -> int:
        """Offset of the first element in bytes."""
        return self.layout.offset * self.dtype.itemsize

    @property
    def host(self) -> np.ndarray:
        """The array on the host."""
        return np.ndarray(self.shape, self.dtype, self.storage, self.offset, self.strides)

    @property
    def inside(self) -> np.ndarray:
        """Which bytes of the storage belong to the array."""
        inside = np.zeros(self.storage.size, np.bool_)
        item = (self.dtype.itemsize,)
        view = np.ndarray(self.shape + item, np.bool_, inside, self.offset, (*self.strides, 1))
        view[...] = True
        return inside

    @cached_property
    def memory(self) -> Any:
        """The storage on the GPU, copied there when first asked for."""
        import cupy

        memory = cupy.empty(self.storage.size, np.uint8)
        memory.set(self.storage)
        return memory

    @property
    def device(self) -> Any:
        """The array on the GPU, a `cupy.ndarray`."""
        import cupy

        start = self.memory.data + self.offset
        return cupy.ndarray(self.shape, self.dtype, start, self.strides)

    def on(self, kernel: str) -> Any:
        """Return the array where a kernel wants it: on the host for ``"cpu"``."""
        return self.host if kernel == "cpu" else self.device

    def written(self, kernel: str) -> "Strided":
        """Return a copy of the array as a kernel has left it, brought to the host."""
        copy = Strided(self.shape, self.dtype, self.layout)
        copy.storage[...] = self.storage if kernel == "cpu" else self.memory.get()
        return copy
