"""What tests do to a GPU: fill its memories with NaN, keep a stream busy, read arrays back."""

from functools import cache
from typing import Any

import numpy as np

POISON_SHARED = r"""
extern "C" __global__ void poison_shared(unsigned words) {
    extern __shared__ volatile unsigned shared[];
    const long long start = clock64();
    for (unsigned i = threadIdx.x; i < words; i += blockDim.x) shared[i] = 0xFFFFFFFFu;
    while (clock64() - start < 20000) {}  // stay, so that the other blocks go to the other SMs
}
"""
SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


@cache
def _poisoner(device: int) -> tuple[Any, int, int]:
    """Return the kernel that fills shared memory, its bytes per block and the number of SMs."""
    import cupy

    attributes = cupy.cuda.Device(device).attributes
    size = attributes["MaxSharedMemoryPerBlockOptin"]
    kernel = cupy.RawKernel(POISON_SHARED, "poison_shared")
    kernel.max_dynamic_shared_size_bytes = size
    return kernel, size, attributes["MultiProcessorCount"]


def poison_shared() -> None:
    """Leave NaN in the shared memory of every SM of the current device."""
    import cupy

    kernel, size, processors = _poisoner(cupy.cuda.Device().id)
    kernel((2 * processors,), (1024,), (np.uint32(size // 4),), shared_mem=size)


def poisoned(size: int) -> Any:
    """Allocate from CuPy's pool, as its allocators do, memory that holds NaN."""
    import cupy

    pointer = cupy.get_default_memory_pool().malloc(size)
    pointer.memset_async(0xFF, size)
    return pointer


@cache
def _spinner() -> Any:
    import cupy

    return cupy.RawKernel(SPIN, "spin")


def spin(milliseconds: float, stream: Any = None) -> None:
    """Keep a stream (an object with ``ptr``, or CuPy's current one) busy for so long at 2 GHz."""
    _spinner().kernel((1,), (1,), (np.int64(milliseconds * 2_000_000),), stream=stream)


def fetch(array: Any) -> np.ndarray:
    """Copy a CuPy array of any dtype and non-negative strides to the host, its strides kept."""
    import cupy

    if array.size == 0:
        return np.empty(array.shape, array.dtype)
    steps = zip(array.shape, array.strides, strict=True)
    span = sum((n - 1) * s for n, s in steps) + array.itemsize
    raw = cupy.ndarray((span,), np.uint8, array.data).get()
    return np.ndarray(array.shape, array.dtype, raw, 0, array.strides)


def free_bytes() -> int:
    """Bytes that the current device has free, once CuPy's pool has given back what it can."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    return int(cupy.cuda.Device().mem_info[0])
