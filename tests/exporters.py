"""Objects that export memory as foreign libraries do, and a CUDA runtime that only remembers."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np

from cupyflash._array import dlpack, foreign, gpu

CODES = {name: key for key, name in dlpack.DTYPES.items()}

_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))
_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)


def capsule_name(capsule: Any) -> str:
    return _capsule_name(capsule).decode()


class DlpackExporter:
    """A DLPack exporter over a NumPy array; keyword arguments lie about what it holds.

    Parameters
    ----------
    x
        The array, of any strides.
    version
        (major, minor) of a versioned capsule, or None for an exporter that knows only legacy ones.
    device
        What ``__dlpack_device__`` and the capsule say.
    fields
        Fields of DLTensor in place of the right ones; ``strides=None`` is a null pointer.
    """

    def __init__(
        self,
        x: np.ndarray,
        *,
        version: tuple[int, int] | None = (1, 1),
        device: tuple[int, int] = (1, 0),
        readonly: bool = False,
        **fields: Any,
    ) -> None:
        self.x, self.version, self.device, self.readonly = x, version, device, readonly
        self.fields = fields
        self.calls: list[dict[str, Any]] = []
        self.capsules: list[Any] = []
        self.deleted = 0
        self._alive: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **arguments: Any) -> Any:
        self.calls.append(arguments)
        if self.version is None and "max_version" in arguments:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.capsules.append(self._capsule())
        return self.capsules[-1]

    def _capsule(self) -> Any:
        managed = dlpack.Legacy() if self.version is None else dlpack.Versioned()
        deleter = _Deleter(self._count)
        managed.deleter = ctypes.cast(deleter, ctypes.c_void_p)
        if self.version is not None:
            managed.major, managed.minor = self.version
            managed.flags = dlpack.READ_ONLY if self.readonly else 0
        self._fill(managed.tensor)
        self._alive += [managed, deleter]
        name = b"dltensor" if self.version is None else b"dltensor_versioned"
        self._alive.append(name)
        return _new_capsule(ctypes.addressof(managed), name, None)

    def _count(self, address: int) -> None:
        self.deleted += 1

    def _fill(self, tensor: Any) -> None:
        x = self.x
        code, bits = CODES.get(x.dtype.name, (2, 8 * x.itemsize))
        values: dict[str, Any] = {
            "data": x.__array_interface__["data"][0],
            "device_type": self.device[0],
            "device_id": self.device[1],
            "ndim": x.ndim,
            "code": code,
            "bits": bits,
            "lanes": 1,
            "shape": x.shape,
            "strides": tuple(s // x.itemsize for s in x.strides),
            "byte_offset": 0,
        }
        values.update(self.fields)
        for name, value in values.items():
            if isinstance(value, tuple):
                value = (ctypes.c_int64 * max(1, len(value)))(*value)
                self._alive.append(value)
            if value is not None:
                setattr(tensor, name, value)


class CudaExporter:
    """An object with ``__cuda_array_interface__`` and, where given, a dtype of its own."""

    def __init__(self, dtype: Any = None, **interface: Any) -> None:
        self.__cuda_array_interface__ = {"version": 3, "strides": None, **interface}
        if dtype is not None:
            self.dtype = dtype


def install_fake_cuda(monkeypatch: Any) -> SimpleNamespace:
    """A CUDA runtime that only remembers: the current device, and stream ``100 + device``."""
    state = SimpleNamespace(device=0, moves=[], waits=[], stream=lambda device: 100 + device)

    def set_device(device: int) -> None:
        state.device = device
        state.moves.append(device)

    runtime = SimpleNamespace(getDevice=lambda: state.device, setDevice=set_device)
    monkeypatch.setattr(gpu, "_runtime", lambda: runtime)
    monkeypatch.setattr(foreign.ForeignAdapter, "stream", lambda self, d: state.stream(d))
    monkeypatch.setattr(foreign, "_device_of", lambda pointer: pointer >> 32)
    monkeypatch.setattr(foreign, "_wait_for", lambda *streams: state.waits.append(streams))
    return state
