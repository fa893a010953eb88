"""Arrays of unknown libraries, through ``__cuda_array_interface__`` or DLPack."""

import sys
from typing import Any

import numpy as np

from .._jit import import_cupy
from ..errors import InvalidType
from . import dlpack, gpu, host
from .base import (
    HOST,
    ITEMSIZES,
    Adapter,
    Array,
    contiguous_strides,
    element_strides,
    host_dtype,
    normal_strides,
)


class ForeignAdapter(Adapter):
    """One exporting type: `admit` makes an `Array` of it, which all other methods take.

    Work runs on CuPy's current stream. Results go back through the library's ``from_dlpack`` where
    it has one at its top level; otherwise they are CuPy or NumPy arrays.
    """

    framework = "dlpack"
    protocols = ("__cuda_array_interface__", "__dlpack__")

    def __init__(self, kind: type) -> None:
        self.elsewhere = kind is not Array
        self._library = kind.__module__.partition(".")[0]

    def admit(self, x: Any, name: str) -> Array:
        if isinstance(x, Array):
            return x
        interface = getattr(x, "__cuda_array_interface__", None)
        if interface is not None:
            dtype = _interface_dtype(x, interface)
            if dtype in ITEMSIZES:
                return self._from_interface(x, interface, dtype, name)
        if hasattr(x, "__dlpack__"):
            return self._from_dlpack(x, name)
        raise InvalidType(
            f"`{name}` has elements of type {(interface or {}).get('typestr')}: "
            "expected real numbers in the machine's byte order, convert it"
        )

    def _from_interface(self, x: Any, interface: dict[str, Any], dtype: str, name: str) -> Array:
        if interface.get("mask") is not None:
            raise InvalidType(f"`{name}` has a mask in its interface: pass a plain array")
        shape, strides = tuple(interface["shape"]), interface.get("strides")
        pointer, readonly = interface["data"]
        device = _device_of(pointer or 0)
        if interface.get("stream") is not None:
            _wait_for(interface["stream"], self.stream(device), device)
        return Array(
            pointer=pointer or 0,
            shape=shape,
            strides=contiguous_strides(shape)
            if strides is None
            else element_strides(shape, tuple(strides), ITEMSIZES[dtype], name),
            dtype=dtype,
            device=device,
            framework=self.framework,
            readonly=bool(readonly),
            owner=x,
        )

    def _from_dlpack(self, x: Any, name: str) -> Array:
        kind, ordinal = x.__dlpack_device__()
        if kind in (dlpack.CPU, dlpack.CUDA_HOST):
            device, stream = HOST, None
        elif kind in (dlpack.CUDA, dlpack.CUDA_MANAGED):
            device = ordinal
            stream = self.stream(device) or 1  # DLPack's name of the legacy default stream
        else:
            raise InvalidType(
                f"`{name}` must be on the CPU or on an NVIDIA GPU, got DLPack device type "
                f"{int(kind)}: move it"
            )
        with gpu.device_guard(device):  # some export from the current device only
            capsule = dlpack.export(x, name, stream)
        tensor = dlpack.consume(capsule, name)
        strides = contiguous_strides(tensor.shape) if tensor.strides is None else tensor.strides
        return Array(
            pointer=tensor.pointer,
            shape=tensor.shape,
            strides=normal_strides(tensor.shape, strides),
            dtype=tensor.dtype,
            device=device,
            framework=self.framework,
            readonly=tensor.readonly,
            owner=tensor.owner,
        )

    def facts(self, x: Array) -> tuple[Any, ...]:
        return (x.shape, x.strides, x.dtype, x.device, x.readonly)

    def pointer(self, x: Array) -> int:
        return x.pointer

    def device(self, x: Array) -> int:
        return x.device

    def array(self, x: Any, name: str) -> Array:
        return self.admit(x, name)

    def empty_strided(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, device: int
    ) -> Array:
        if device != HOST:
            owner = gpu.empty_strided(import_cupy(), shape, strides, dtype)
            pointer = owner.data.ptr
        else:
            owner = host.empty_strided(shape, strides, dtype)
            pointer = owner.__array_interface__["data"][0]
        return Array(pointer, shape, strides, dtype, device, self.framework, False, owner)

    def full(self, value: float, device: int) -> Array:
        if device == HOST:
            owner = np.full((), value, np.float32)
            pointer = owner.__array_interface__["data"][0]
        else:
            owner = import_cupy().full((), value, "float32")
            pointer = owner.data.ptr
        return Array(pointer, (), (), "float32", device, self.framework, False, owner)

    def upload(self, x: np.ndarray, device: int) -> Array:
        owner = import_cupy().array(x)
        return Array(
            pointer=owner.data.ptr,
            shape=x.shape,
            strides=contiguous_strides(x.shape),
            dtype=x.dtype.name,
            device=device,
            framework=self.framework,
            readonly=False,
            owner=owner,
        )

    def contiguous_last(self, x: Array) -> Array:
        if x.device == HOST or x.shape[-1] <= 1 or x.strides[-1] == 1:
            return x
        return _copied(x)

    def contiguous(self, x: Array) -> Array:
        if x.device == HOST or x.strides == contiguous_strides(x.shape):
            return x
        return _copied(x)

    def stream(self, device: int) -> int:
        return 0 if device == HOST else import_cupy().cuda.get_current_stream(device).ptr

    def capturing(self, device: int) -> bool:
        return device != HOST and gpu.capturing(import_cupy(), device)

    def deliver(self, x: Array) -> Any:
        from_dlpack = getattr(sys.modules.get(self._library), "from_dlpack", None)
        if from_dlpack is None:
            return x.owner
        try:
            return from_dlpack(x.owner)
        except (BufferError, TypeError, ValueError, RuntimeError):  # not every dtype is everywhere
            return x.owner


def _interface_dtype(x: Any, interface: dict[str, Any]) -> str:
    """Return the element type: bfloat16 and float8 have no type string of their own."""
    typestr = interface["typestr"]
    try:
        dtype = np.dtype(typestr)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.isnative and dtype.name in ITEMSIZES:
        return dtype.name
    named = str(getattr(x, "dtype", None))
    same_size = typestr[:1] != ">" and typestr[2:] == str(ITEMSIZES.get(named))
    return named if same_size else typestr


def _device_of(pointer: int) -> int:
    """Return the ordinal of the device that holds an address (the current one for none)."""
    runtime = import_cupy().cuda.runtime
    return runtime.pointerGetAttributes(pointer).device if pointer else runtime.getDevice()


class _Stream:
    """A raw stream handle as CuPy takes it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


def _wait_for(producer: int, consumer: int, device: int) -> None:
    """Order what follows on one stream after what the other holds now; the host does not wait."""
    if producer in (consumer, consumer or 1):
        return
    cuda = import_cupy().cuda
    with gpu.device_guard(device):
        event = cuda.Event(disable_timing=True)
        cuda.Stream.from_external(_Stream(producer)).record(event)
        cuda.Stream.from_external(_Stream(consumer)).wait_event(event)


def _copied(x: Array) -> Array:
    """Return a C-contiguous copy on CuPy's current stream."""
    copy = gpu.contiguous(import_cupy(), _cupy_view(x))
    return x._replace(
        pointer=copy.data.ptr, strides=contiguous_strides(x.shape), readonly=False, owner=copy
    )


def _cupy_view(x: Array) -> Any:
    """Return a CuPy array over an Array's memory, which it keeps alive."""
    cupy, kind = import_cupy(), host_dtype(x.dtype)
    extent = [(n - 1) * s * kind.itemsize for n, s in zip(x.shape, x.strides, strict=True)]
    first, last = sum(e for e in extent if e < 0), sum(e for e in extent if e > 0)
    memory = cupy.cuda.UnownedMemory(x.pointer + first, last - first + kind.itemsize, x, x.device)
    strides = tuple(stride * kind.itemsize for stride in x.strides)
    return cupy.ndarray(x.shape, kind, cupy.cuda.MemoryPointer(memory, -first), strides)
