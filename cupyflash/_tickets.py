"""Counters of tiles: where the blocks of a persistent kernel draw the number of their next tile.

A kernel that hands tiles out this way declares ``u32 tickets[SLOTS][2]`` in its module, zeros, and
leaves the slot that it used as zeros. Launches that may run at the same time must not share a slot.
Each stream has its own for the life of the process, by the stream's identity: a handle may be that
of a stream which is gone. Each launch that a graph captures has its own too, so that one graph must
not run twice at a time. When the slots are given out a launch gets none: its blocks take tiles in
turn.
"""

import ctypes
import threading
from typing import Any

from . import _driver

__all__ = ["SLOTS", "Slots", "Tickets", "of"]

NAME = "tickets"  # of the array in a module
SLOTS = 16384
BYTES = 8  # of a slot
NOT_CAPTURING, CAPTURING = 0, 1  # cuda.h: CUstreamCaptureStatus


class Slots:
    """The slots of one device, the same in every module; any number of threads may ask."""

    def __init__(self) -> None:
        self._of_stream: dict[int, int | None] = {}  # by identity
        self._given = 0
        self._lock = threading.Lock()

    def of(self, stream: int) -> int | None:
        """Return the slot of a launch on a raw stream of the current device, or None."""
        status = ctypes.c_int()
        # Fails on the default stream while another one captures, where a launch fails as well.
        if _driver.function("cuStreamIsCapturing")(stream, ctypes.byref(status)):
            return None
        if status.value != NOT_CAPTURING:  # the driver does not tell the identity then
            return self._new() if status.value == CAPTURING else None
        identity = ctypes.c_ulonglong()
        _driver.call("cuStreamGetId", stream, ctypes.byref(identity))
        if identity.value not in self._of_stream:
            self._meet(identity.value)
        return self._of_stream[identity.value]

    def _meet(self, identity: int) -> None:
        with self._lock:
            if identity not in self._of_stream:
                self._of_stream[identity] = self._next()

    def _new(self) -> int | None:
        with self._lock:
            return self._next()

    def _next(self) -> int | None:
        if self._given == SLOTS:
            return None
        self._given += 1
        return self._given - 1


class Tickets:
    """From a stream to the address of its slot in one loaded module."""

    __slots__ = ("_base", "_slots")

    def __init__(self, base: int, slots: Slots) -> None:
        self._base = base
        self._slots = slots

    def __call__(self, stream: int) -> int:
        """Return the address for a launch on a raw stream of the current device, or 0."""
        slot = self._slots.of(stream)
        return 0 if slot is None else self._base + slot * BYTES


_slots: dict[int, Slots] = {}


def of(function: Any, device: int) -> Tickets:
    """Return the tickets of a loaded function's module on a device."""
    return Tickets(function.module.get_global_var(NAME), _slots.setdefault(device, Slots()))
