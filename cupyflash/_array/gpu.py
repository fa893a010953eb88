"""CuPy arrays, and which CUDA device is current."""

import functools
import math
import sys
from typing import Any

import numpy as np

from .._jit import import_cupy
from .base import HOST, Adapter, Array, contiguous_strides, dtype_name, element_strides, host_dtype


class CupyAdapter(Adapter):
    """CuPy's arrays and its current stream; also the allocator for arrays of unknown exporters."""

    framework = "cupy"

    def __init__(self) -> None:
        self._cupy: Any = sys.modules["cupy"]
        self.plain = (self._cupy.ndarray,)

    def facts(self, x: Any) -> tuple[Any, ...]:
        return (x.shape, x.strides, x.dtype, x.data.device_id)

    def pointer(self, x: Any) -> int:
        return x.data.ptr

    def device(self, x: Any) -> int:
        return x.data.device_id

    def array(self, x: Any, name: str) -> Array:
        dtype = dtype_name(x.dtype, name)
        return Array(
            pointer=x.data.ptr,
            shape=x.shape,
            strides=element_strides(x.shape, x.strides, x.itemsize, name),
            dtype=dtype,
            device=x.data.device_id,
            framework=self.framework,
            readonly=False,
            owner=x,
        )

    def empty_strided(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, device: int
    ) -> Any:
        return empty_strided(self._cupy, shape, strides, dtype)

    def full(self, value: float, device: int) -> Any:
        return self._cupy.full((), value, "float32")

    def upload(self, x: np.ndarray, device: int) -> Any:
        return self._cupy.array(x)

    def contiguous_last(self, x: Any) -> Any:
        return contiguous_last(self._cupy, x)

    def contiguous(self, x: Any) -> Any:
        return contiguous(self._cupy, x)

    def stream(self, device: int) -> int:
        return self._cupy.cuda.get_current_stream(device).ptr

    def capturing(self, device: int) -> bool:
        return capturing(self._cupy, device)


def empty_strided(cupy: Any, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Any:
    """Allocate a dense CuPy array on the current device, by CuPy's current allocator."""
    # The constructor itself: cupy.empty adds two layers of Python around it.
    kind, size, steps = _storage(shape, strides, dtype)
    return cupy.ndarray(shape, kind, cupy.cuda.alloc(size), steps)


@functools.lru_cache(maxsize=1024)
def _storage(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: str
) -> tuple[np.dtype, int, tuple[int, ...] | None]:
    """Return the dtype, the bytes, and the strides in bytes unless they are C-contiguous."""
    kind = host_dtype(dtype)
    steps = tuple(stride * kind.itemsize for stride in strides)
    contiguous = strides == contiguous_strides(shape)
    return kind, math.prod(shape) * kind.itemsize, None if contiguous else steps


def contiguous_last(cupy: Any, x: Any) -> Any:
    """Return a CuPy array, or one copy on CuPy's current stream if its last stride is not 1."""
    return x if x.shape[-1] <= 1 or x.strides[-1] == x.itemsize else _copied(cupy, x)


def contiguous(cupy: Any, x: Any) -> Any:
    """Return a CuPy array, or one copy on CuPy's current stream if it is not C-contiguous."""
    return x if x.flags.c_contiguous else _copied(cupy, x)


def _copied(cupy: Any, x: Any) -> Any:
    # As integers: CuPy has no copy kernel for float8.
    return cupy.ascontiguousarray(x.view(f"uint{8 * x.itemsize}")).view(x.dtype)


def capturing(cupy: Any, device: int) -> bool:
    """Whether CuPy's current stream records a CUDA graph (the legacy default stream cannot)."""
    stream = cupy.cuda.get_current_stream(device)
    return stream.ptr not in (0, 1) and bool(stream.is_capturing())


class device_guard:
    """Context manager: the CUDA device is current inside, and the previous one is afterwards.

    ``HOST`` needs no device and is left alone.
    """

    __slots__ = ("_device", "_previous")

    def __init__(self, device: int) -> None:
        self._device = device

    def __enter__(self) -> None:
        if self._device != HOST:
            self._previous = _runtime().getDevice()
            if self._previous != self._device:
                _runtime().setDevice(self._device)

    def __exit__(self, *error: object) -> None:
        # What ran inside may have moved it too.
        if self._device != HOST and _runtime().getDevice() != self._previous:
            _runtime().setDevice(self._previous)


@functools.cache
def _runtime() -> Any:
    return import_cupy().cuda.runtime
