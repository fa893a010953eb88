"""The functions of the CUDA driver that CuPy does not have, through ctypes."""

import ctypes
import functools

from .errors import DeviceUnavailable

__all__ = ["call", "function", "text"]

LIBRARY = "libcuda.so.1"

_int, _pointer = ctypes.c_int, ctypes.c_void_p
SIGNATURES: dict[str, tuple[type, ...]] = {
    "cuGetErrorString": (_int, _pointer),
    "cuStreamGetId": (_pointer, _pointer),
    "cuStreamIsCapturing": (_pointer, _pointer),
    "cuTensorMapEncodeTiled": (
        _pointer, _int, ctypes.c_uint32, *(_pointer,) * 5, _int, _int, _int, _int,
    ),
}  # fmt: skip


@functools.cache
def function(name: str) -> "ctypes._NamedFuncPointer":
    """Return a function of the driver, which returns a CUresult."""
    found: ctypes._NamedFuncPointer
    try:
        found = getattr(ctypes.CDLL(LIBRARY), name)
    except (OSError, AttributeError) as error:
        raise DeviceUnavailable(
            f"the NVIDIA driver's {name} cannot be used ({error}): install a driver of CUDA 12.0 "
            "or newer"
        ) from error
    found.argtypes, found.restype = SIGNATURES[name], ctypes.c_int
    return found


def call(name: str, *arguments: object) -> None:
    """Call a function of the driver; DeviceUnavailable, with the driver's words, if it fails."""
    if result := function(name)(*arguments):
        raise DeviceUnavailable(f"{name} failed: {text(result)}")


def text(result: int) -> str:
    """Return the driver's description of a CUresult."""
    words = ctypes.c_char_p()
    function("cuGetErrorString")(result, ctypes.byref(words))
    return f"{(words.value or b'unknown error').decode()} ({result})"
