"""Arrays of a call in the emulated GPU's memory: each in an allocation of its own, guarded.

An allocation has just the bytes that its array spans, from an address of the same alignment, and
ends at a page that cannot be touched. What lies between the rows of an array is NaN, and so are
outputs before the launch.
"""

import ctypes
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from .._array import ITEMSIZES, Array
from .._array.host import host_view
from .._steps import SCRATCH_ALIGNMENT
from .._views import span
from ..errors import KernelFault

__all__ = ["Memory"]

ALIGNMENT = 16  # bytes: no instruction of a kernel needs more of an address of its arguments


class _Placed(NamedTuple):
    """An array of the caller, its twin, and the bytes of the twin's allocation."""

    name: str
    array: Array
    twin: Array
    bytes: np.ndarray
    before: np.ndarray  # the bytes that a kernel must leave as they are


class Memory:
    """What a launch may touch; a context that frees it all at its end."""

    def __init__(self, runtime: ctypes.CDLL) -> None:
        self._runtime = runtime
        self._allocations: list[int] = []
        self._inputs: list[_Placed] = []
        self._outputs: list[_Placed] = []

    def __enter__(self) -> "Memory":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._allocations:
            self._runtime.emu_free(self._allocations.pop())

    def read(self, name: str, array: Array) -> Array:
        """Return the twin of an input."""
        twin, content = self._place(name, array)
        if content.size:
            _bits(twin)[...] = _bits(array)
        self._inputs.append(_Placed(name, array, twin, content, content.copy()))
        return twin

    def written(self, name: str, array: Array) -> Array:
        """Return the twin of an output."""
        twin, content = self._place(name, array)
        self._outputs.append(_Placed(name, array, twin, content, content.copy()))
        return twin

    def scratch(self, size: int) -> int:
        """Return the address, a multiple of 256, of bytes that are NaN; 0 for none."""
        whole = -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT  # it ends where a page does
        return self._allocate(whole, "scratch", fill_nan=1) if size else 0

    def counter(self) -> np.ndarray:
        """Return two words of a kernel's own, zeros."""
        allocation = self._allocate(8, "tickets", fill_nan=0)
        return _bytes(allocation, 8).view(np.uint32)

    def collect(self) -> None:
        """Copy the outputs back, and raise KernelFault where anything else was written."""
        for placed in self._outputs:
            if placed.bytes.size:
                result = _bits(placed.twin)
                _bits(placed.array)[...] = result
                result[...] = -1  # as it was: what remains are strays
        self._refuse_strays(self._inputs, "to the input")
        self._refuse_strays(self._outputs, "between the rows of the output")

    def _refuse_strays(self, placed: list[_Placed], where: str) -> None:
        for name, _, _, now, before in placed:
            strays = np.flatnonzero(now != before)
            if strays.size:
                raise KernelFault(
                    f"{strays.size} bytes were written {where} `{name}`, the first of them "
                    f"{strays[0]} bytes from its start"
                )

    def _allocate(self, size: int, name: str, fill_nan: int) -> int:
        allocation = self._runtime.emu_alloc(size, name.encode(), fill_nan)
        if not allocation:
            raise MemoryError(f"the emulator has no memory for the {size} bytes of `{name}`")
        self._allocations.append(allocation)
        return int(allocation)

    def _place(self, name: str, array: Array) -> tuple[Array, np.ndarray]:
        """Allocate the bytes that an array spans; return its twin there, and those bytes."""
        first, end = span(array, ITEMSIZES[array.dtype])
        if first == end:
            return array._replace(pointer=0, owner=None), np.empty(0, np.uint8)
        lead = (array.pointer + first) % ALIGNMENT
        size = lead + end - first
        allocation = self._allocate(size, name, fill_nan=1)
        twin = array._replace(pointer=allocation + lead - first, readonly=False, owner=None)
        return twin, _bytes(allocation, size)


def _bytes(address: int, size: int) -> np.ndarray:
    """Return the bytes at an address as an array."""
    return np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))


def _bits(array: Array) -> Any:
    """Return an array in host memory as signed integers of its size: NaN is copied as it is."""
    return host_view(array).view(f"i{ITEMSIZES[array.dtype]}")
