"""NumPy arrays, and NumPy's view of any record in host memory."""

from typing import Any

import numpy as np

from .base import HOST, Adapter, Array, contiguous_strides, dtype_name, element_strides, host_dtype


class NumpyAdapter(Adapter):
    """Host memory, served by the CPU path."""

    framework = "numpy"

    def __init__(self) -> None:
        self.plain = (np.ndarray, np.memmap)

    def facts(self, x: np.ndarray) -> tuple[Any, ...]:
        return (x.shape, x.strides, x.dtype, x.flags.writeable)

    def pointer(self, x: np.ndarray) -> int:
        return int(x.__array_interface__["data"][0])

    def device(self, x: np.ndarray) -> int:
        return HOST

    def array(self, x: np.ndarray, name: str) -> Array:
        dtype = dtype_name(x.dtype, name)
        return Array(
            pointer=self.pointer(x),
            shape=x.shape,
            strides=element_strides(x.shape, x.strides, x.itemsize, name),
            dtype=dtype,
            device=HOST,
            framework=self.framework,
            readonly=not x.flags.writeable,
            owner=x,
        )

    def empty_strided(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, device: int
    ) -> np.ndarray:
        return empty_strided(shape, strides, dtype)

    def full(self, value: float, device: int) -> np.ndarray:
        return np.full((), value, np.float32)


def empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> np.ndarray:
    """Allocate a dense NumPy array of any order of dimensions."""
    kind = host_dtype(dtype)
    return np.ndarray(shape, kind, strides=tuple(stride * kind.itemsize for stride in strides))


class _Exporter:
    """Shows an `Array` to NumPy, and keeps its owner alive for as long as NumPy's view lives."""

    def __init__(self, array: Array, itemsize: int) -> None:
        self.array = array
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": f"|V{itemsize}",
            "shape": array.shape,
            "strides": tuple(stride * itemsize for stride in array.strides),
            "data": (array.pointer, array.readonly),
        }


def host_view(array: Array) -> np.ndarray:
    """Return NumPy's view of an array in host memory."""
    kind = host_dtype(array.dtype)
    if 0 in array.shape:
        return np.empty(array.shape, kind)
    return np.asarray(_Exporter(array, kind.itemsize)).view(kind)


def contiguous_last(array: Array) -> Array:
    """Return an array in host memory, or a C-contiguous copy if its last stride is not 1."""
    return array if array.strides[-1] == 1 else _copied(array)


def contiguous(array: Array) -> Array:
    """Return an array in host memory, or a copy if it is not C-contiguous."""
    return array if array.strides == contiguous_strides(array.shape) else _copied(array)


def _copied(array: Array) -> Array:
    copy = np.ascontiguousarray(host_view(array))
    return array._replace(
        pointer=copy.__array_interface__["data"][0],
        strides=contiguous_strides(array.shape),
        readonly=False,
        owner=copy,
    )
