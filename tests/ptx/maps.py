"""Tensor maps of arrays [batch, length, heads, head_dim], by the driver and by the emulator."""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle, by the bytes of its span
# CUtensorMapDataType
TYPES = {
    "uint8": 0,
    "uint16": 1,
    "float32": 7,
    "float16": 6,
    "bfloat16": 9,
}


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor map: its coordinates and its box are in order (column, row, head, batch)."""

    of: Any  # an array, or an Out
    box: tuple[int, int, int, int]
    swizzle: int  # bytes of its span: 0, 32, 64 or 128


@functools.cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    return library.cuTensorMapEncodeTiled


def driver_map(
    address: int, array: np.ndarray, box: tuple[int, int, int, int], swizzle: int
) -> bytes:
    """Return the 128 bytes that the driver makes."""
    return _encoded(_driver(), address, array, box, swizzle)


def emulated_map(
    runtime: Any, address: int, array: np.ndarray, box: tuple[int, int, int, int], swizzle: int
) -> bytes:
    """Return the 128 bytes that the emulator makes."""
    return _encoded(runtime.emu_tensor_map, address, array, box, swizzle)


def _encoded(
    function: Any, address: int, array: np.ndarray, box: tuple[int, int, int, int], swizzle: int
) -> bytes:
    storage = ctypes.create_string_buffer(128 + 64)
    start = -(-ctypes.addressof(storage) // 64) * 64
    axes = (3, 1, 2, 0)
    sizes = (ctypes.c_uint64 * 4)(*(array.shape[axis] for axis in axes))
    strides = (ctypes.c_uint64 * 3)(*(array.strides[axis] for axis in axes[1:]))
    boxes = (ctypes.c_uint32 * 4)(*box)
    steps = (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    failed = function(
        ctypes.c_void_p(start), TYPES[array.dtype.name], 4, ctypes.c_void_p(address), sizes,
        strides, boxes, steps, 0, SWIZZLES[swizzle], 0, 0,
    )  # fmt: skip
    assert not failed, f"the tensor map was refused: {failed}"
    return ctypes.string_at(start, 128)
