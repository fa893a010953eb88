"""The exceptions of cupyflash: each is also the built-in exception that a caller would expect."""

from typing import Any

__all__ = [
    "CompileFailed",
    "CupyflashError",
    "DeviceUnavailable",
    "InvalidArgument",
    "InvalidType",
    "KernelFault",
    "UnsupportedProblem",
    "shown",
]

LONGEST = 60  # characters of a value in a message


def shown(x: Any) -> str:
    """Return what a message says of a wrong value: a few words on one line, of an array its shape.

    The elements of an array are not read: a GPU would be waited for.
    """
    shape = getattr(x, "shape", None)
    try:
        if isinstance(shape, tuple) and shape:
            return f"a {type(x).__name__} of shape {tuple(shape)}"
        text = " ".join(repr(x).split())
    except Exception:  # of an integer with too many digits, for one
        return f"a {type(x).__name__}"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


class CupyflashError(Exception):
    """Base class of every exception that cupyflash raises on purpose."""


class InvalidArgument(CupyflashError, ValueError):
    """An argument has a wrong value, shape, stride or device."""


class InvalidType(CupyflashError, TypeError):
    """An argument is of a type, framework or dtype that is not accepted."""


class UnsupportedProblem(CupyflashError, NotImplementedError):
    """The arguments are right, but no kernel computes this problem on this device."""


class DeviceUnavailable(CupyflashError, RuntimeError):
    """A GPU, its driver or CuPy is needed and missing."""


class CompileFailed(CupyflashError, RuntimeError):
    """A compiler refused a translation unit; the message holds its log and the unit's path."""


class KernelFault(CupyflashError, RuntimeError):
    """The emulator saw a kernel do what it must not; the message names the line and the thread."""
