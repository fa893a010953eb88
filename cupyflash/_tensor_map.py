"""Tensor maps: what the tensor memory accelerator (TMA) of compute capability 9.0 copies boxes of.

A `TensorMap` describes one as plain data, made without a GPU. `encode` has the driver write the 128
bytes that a kernel takes: a pure function of the description, whose results are remembered.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from . import _driver
from ._array import ITEMSIZES, Array
from .errors import InvalidArgument

__all__ = ["BYTES", "MAX_STRIDE", "TensorMap", "encode", "encode_by", "moving", "of", "refusal"]

BYTES = 128  # of a CUtensorMap
ALIGNMENT = 64  # of the address that the driver writes it to
UNIT = 16  # bytes: addresses, strides and the box's rows are multiples of it
MAX_STRIDE = 2**40  # bytes, exclusive
MAX_SIZE = 2**32
MAX_BOX = 256  # elements in each dimension
REMEMBERED = 8192  # encoded maps

# cuda.h: CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion
DTYPES = {"float16": 6, "float32": 7, "bfloat16": 9, "float8_e4m3fn": 0, "float8_e5m2": 0}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # by span, in bytes
PROMOTE_128_BYTES = 2


class TensorMap(NamedTuple):
    """A tensor in global memory and the box of it that one copy moves; innermost dimension first.

    ``strides`` are in bytes, of all dimensions but the innermost, whose elements lie side by side;
    ``swizzle`` is the span in bytes within which shared memory permutes the box's rows, or 0.
    """

    pointer: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


def of(array: Array, axes: tuple[int, ...], box: tuple[int, ...], swizzle: int) -> TensorMap:
    """Describe an array.

    Parameters
    ----------
    array : Array
        Its innermost dimension must have stride 1.
    axes : tuple of int
        Its dimensions in the map's order.
    box : tuple of int
        Sizes of the box in the map's order.
    swizzle : {0, 32, 64, 128}
        Bytes of the swizzle's span.
    """
    itemsize = ITEMSIZES[array.dtype]
    shape = tuple(array.shape[axis] for axis in axes)
    row = -(-shape[0] * itemsize // UNIT) * UNIT  # a stride that fits where none is ever used
    strides = tuple(
        row if array.shape[axis] == 1 else array.strides[axis] * itemsize for axis in axes[1:]
    )
    return TensorMap(array.pointer, array.dtype, shape, strides, box, swizzle)


def refusal(tensor: TensorMap) -> str | None:
    """Return why no map can describe a tensor, as the rest of a sentence, or None."""
    if tensor.pointer % UNIT or not tensor.pointer:
        return f"needs an address that is a multiple of {UNIT}, got {tensor.pointer:#x}"
    return _refuse_view(tensor)


def _refuse_view(tensor: TensorMap) -> str | None:
    rank = len(tensor.shape)
    if not len(tensor.strides) + 1 == rank == len(tensor.box) or not 1 <= rank <= 5:
        return (
            "needs 1 to 5 dimensions, a stride for each but the first and a box of as many, "
            f"got shape {tensor.shape}, strides {tensor.strides}, box {tensor.box}"
        )
    if tensor.dtype not in DTYPES:
        return f"takes {', '.join(DTYPES)}, got {tensor.dtype}"
    if tensor.swizzle not in SWIZZLES:
        return f"needs a swizzle of {', '.join(map(str, SWIZZLES))} bytes, got {tensor.swizzle}"
    for size in tensor.shape:
        if not 1 <= size <= MAX_SIZE:
            return f"needs sizes from 1 to {MAX_SIZE}, got {size}"
    for stride in tensor.strides:
        if stride % UNIT or not 0 <= stride < MAX_STRIDE:
            return f"needs strides below {MAX_STRIDE} that are multiples of {UNIT}, got {stride}"
    for size in tensor.box:
        if not 1 <= size <= MAX_BOX:
            return f"needs a box of 1 to {MAX_BOX} elements in each dimension, got {size}"
    row = tensor.box[0] * ITEMSIZES[tensor.dtype]
    if row % UNIT or row > (tensor.swizzle or row):
        return (
            f"needs rows of the box of whole {UNIT} bytes within the swizzle's span of "
            f"{tensor.swizzle}, got {row}"
        )
    return None


def encode(tensor: TensorMap) -> bytes:
    """Return the bytes of a map, for the GPU.

    Elements outside the tensor are read as zeros, and 128 bytes at a time go to the L2 cache. The
    driver describes no tensor without elements: its map is zeros, which no copy may use.

    Raises
    ------
    InvalidArgument
        No map can describe the tensor.
    DeviceUnavailable
        There is no driver, or it refused.
    """
    return encode_by(functools.partial(_driver.call, "cuTensorMapEncodeTiled"), tensor)


def encode_by(write: Callable[..., None], tensor: TensorMap) -> bytes:
    """Return the bytes of a map as a function writes them that takes the driver's arguments."""
    if 0 in tensor.shape:
        return bytes(BYTES)
    if reason := refusal(tensor):
        raise InvalidArgument(f"a tensor map {reason}")
    dtype, rank, *view = _operands(*tensor[1:])
    room = ctypes.create_string_buffer(BYTES + ALIGNMENT)
    start = -ctypes.addressof(room) % ALIGNMENT
    write(ctypes.byref(room, start), dtype, rank, tensor.pointer, *view)
    return room.raw[start : start + BYTES]


@functools.lru_cache(maxsize=1024)
def _operands(
    dtype: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> tuple[Any, ...]:
    """Return the driver's arguments, but for the map and the address; it only reads them."""
    rank, u32, u64 = len(shape), ctypes.c_uint32, ctypes.c_uint64
    steps = (u32 * rank)(*(1,) * rank)
    arrays = ((u64 * rank)(*shape), (u64 * (rank - 1))(*strides), (u32 * rank)(*box), steps)
    interleave, zeros = 0, 0
    return (
        DTYPES[dtype], rank, *arrays, interleave, SWIZZLES[swizzle], PROMOTE_128_BYTES, zeros,
    )  # fmt: skip


def moving(tensor: TensorMap) -> Callable[[int], bytes]:
    """Return a function from an address to the bytes of the same map there."""
    return functools.partial(_encode_at, _Tensor(tensor))


class _Tensor:
    """A description with an identity, by which it is found faster than by its value."""

    __slots__ = ("description",)

    def __init__(self, description: TensorMap) -> None:
        self.description = description


@functools.lru_cache(maxsize=REMEMBERED)
def _encode_at(tensor: _Tensor, pointer: int) -> bytes:
    return encode(tensor.description._replace(pointer=pointer))
