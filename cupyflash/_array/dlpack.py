"""Reading a DLPack capsule, legacy or versioned, through ctypes: no array library in between."""

import ctypes
import weakref
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64
from ctypes import c_void_p as void_p
from typing import Any, NamedTuple

from ..errors import InvalidArgument, InvalidType

MAX_VERSION = (1, 1)
READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType

# (DLDataTypeCode, bits) of the element types that we name.
DTYPES = {
    (2, 16): "float16", (4, 16): "bfloat16", (2, 32): "float32", (2, 64): "float64",
    (10, 8): "float8_e4m3fn", (12, 8): "float8_e5m2", (6, 8): "bool",
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
}  # fmt: skip


class DLTensor(Structure):
    """The C struct of the same name; strides count elements."""

    _fields_ = [
        ("data", void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32),
        ("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16),
        ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)), ("byte_offset", c_uint64),
    ]  # fmt: skip


class Legacy(Structure):
    """DLManagedTensor."""

    _fields_ = [("tensor", DLTensor), ("context", void_p), ("deleter", void_p)]


class Versioned(Structure):
    """DLManagedTensorVersioned."""

    _fields_ = [
        ("major", c_uint32), ("minor", c_uint32), ("context", void_p), ("deleter", void_p),
        ("flags", c_uint64), ("tensor", DLTensor),
    ]  # fmt: skip


KINDS: dict[bytes, Any] = {b"dltensor_versioned": Versioned, b"dltensor": Legacy}
# A capsule keeps the address of its name: these bytes live as long as the module.
USED = {name: b"used_" + name for name in KINDS}

_deleter = ctypes.CFUNCTYPE(None, void_p)
_api = ctypes.pythonapi
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _api)
)
_pointer = ctypes.PYFUNCTYPE(void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", _api)
)


class Managed:
    """Owns a consumed capsule's tensor: the producer's deleter runs once, when this object dies."""

    __slots__ = ("__weakref__",)

    def __init__(self, address: int, deleter: int | None) -> None:
        if deleter:
            # Not at exit: the producer may be torn down by then, and the process frees all anyway.
            weakref.finalize(self, _deleter(deleter), address).atexit = False


class Tensor(NamedTuple):
    """What a capsule holds; strides count elements, ``pointer`` includes the byte offset."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    device_type: int
    device_id: int
    readonly: bool
    owner: Managed


def export(x: Any, name: str, stream: int | None) -> Any:
    """Return a fresh capsule of ``x``, versioned if the exporter can, ordered before ``stream``."""
    arguments = {} if stream is None else {"stream": stream}
    try:
        try:
            return x.__dlpack__(**arguments, max_version=MAX_VERSION)
        except TypeError:  # the exporter is older than the argument
            return x.__dlpack__(**arguments)
    except (BufferError, TypeError, ValueError) as error:
        raise InvalidType(f"`{name}` refuses to be exported through DLPack: {error}") from error


def consume(capsule: Any, name: str) -> Tensor:
    """Take a capsule over: it is renamed, and its tensor lives as long as the result's owner."""
    kind = next((kind for kind in KINDS if _is_valid(capsule, kind)), None)
    if kind is None:
        raise InvalidType(
            f"`{name}` must export a fresh DLPack capsule, got one that is already used or "
            "something else"
        )
    address = _pointer(capsule, kind)
    managed = KINDS[kind].from_address(address)
    _rename(capsule, USED[kind])
    owner = Managed(address, managed.deleter)
    # A later major version may lay the tensor out differently: only its deleter may be used.
    if kind == b"dltensor_versioned" and managed.major > MAX_VERSION[0]:
        raise InvalidType(f"`{name}` must export DLPack version 1, got {managed.major}")
    readonly = kind == b"dltensor_versioned" and bool(managed.flags & READ_ONLY)
    return _read(managed.tensor, name, readonly, owner)


def address(capsule: Any) -> int:
    """Return where the elements of a legacy capsule begin, which stays as it is."""
    kind = b"dltensor"
    tensor = KINDS[kind].from_address(_pointer(capsule, kind)).tensor
    return int(tensor.data or 0) + int(tensor.byte_offset)


def _read(tensor: DLTensor, name: str, readonly: bool, owner: Managed) -> Tensor:
    """Copy a DLTensor's fields out."""
    dtype = DTYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise InvalidType(
            f"`{name}` must have a real element type, got DLPack type code {tensor.code} of "
            f"{tensor.bits} bits and {tensor.lanes} lanes: convert it first"
        )
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides and tensor.ndim else None
    if any(length < 0 for length in shape):
        raise InvalidArgument(f"`{name}` exports the shape {shape} through DLPack")
    return Tensor(
        pointer=tensor.data + tensor.byte_offset if tensor.data else 0,
        shape=shape,
        strides=strides,
        dtype=dtype,
        device_type=tensor.device_type,
        device_id=tensor.device_id,
        readonly=readonly,
        owner=owner,
    )
