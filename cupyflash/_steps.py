"""Launches of one call that run one after the other, bound to their loaded kernels.

What moves between calls are addresses: of the arrays by name, of the scratch that the launches hand
to one another, of the counters of tiles. A call writes them into the Params of each launch, and
into its tensor maps.
"""

import struct
from collections.abc import Callable, Iterable, Mapping

from . import _tickets
from ._launch import Launch, Loaded, Steps, load
from ._tensor_map import BYTES, TensorMap, moving

__all__ = ["SCRATCH_ALIGNMENT", "TICKETS", "BoundSteps", "bind_steps", "scratch_bytes"]

SCRATCH_ALIGNMENT = 256  # bytes, of the address of a scratch
TICKETS = "tickets"  # the name of the counter of tiles among the places of a launch

Words = Mapping[str, tuple[int, ...]]  # by name: an address, or 0 and the random state


class BoundSteps:
    """Steps whose kernels are loaded: a call writes what moves, and launches them."""

    __slots__ = ("_launches", "places", "scratch")

    def __init__(self, scratch: int, launches: list["_BoundStep"]) -> None:
        self.scratch = scratch  # bytes to allocate
        self.places = frozenset().union(*(launch.places for launch in launches))
        self._launches = launches

    def __call__(self, words: Words, scratch: int, stream: int) -> None:
        """Launch on a raw stream of the current device.

        Parameters
        ----------
        words : mapping of str to tuple of int
            What each of ``places`` is to hold.
        scratch : int
            The address of ``scratch`` bytes that are this call's own until the last launch ends.
        stream : int
            The stream's handle.
        """
        base = -(-scratch // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        for launch in self._launches:
            launch(words, base, stream)


Write = Callable[..., None]  # (params, values): into their place


class _BoundStep:
    """One launch of `BoundSteps`."""

    __slots__ = ("_loaded", "_params", "_scratch", "_tickets", "_words", "places")

    def __init__(self, launch: Launch, loaded: Loaded, names: tuple[str, ...], device: int) -> None:
        maps = dict(launch.maps)
        own = [(name if isinstance(name, str) else names[name], at) for name, at in launch.places]
        self.places = {name for name, _ in own if name != TICKETS}
        self._loaded = loaded
        self._params = launch.params
        self._words = [(name, _writer(at, maps)) for name, at in own if name != TICKETS]
        self._scratch = [(offset, _writer(at, maps)) for at, offset in launch.scratch]
        drawn = [_writer(at, maps) for name, at in own if name == TICKETS]
        self._tickets = [(_tickets.of(loaded.function, device), write) for write in drawn]

    def __call__(self, words: Words, scratch: int, stream: int) -> None:
        params = bytearray(self._params)
        for name, write in self._words:
            write(params, *words[name])
        for offset, write in self._scratch:
            write(params, scratch + offset)
        for tickets, write in self._tickets:
            write(params, tickets(stream))
        self._loaded(bytes(params), stream)


def _writer(at: int, maps: Mapping[int, TensorMap]) -> Write:
    """Return what writes words at an offset in Params, or the tensor map there for an address."""
    if at in maps:
        moved = moving(maps[at])

        def write_map(params: bytearray, pointer: int) -> None:
            params[at : at + BYTES] = moved(pointer)

        return write_map

    def write_words(params: bytearray, *values: int) -> None:
        struct.pack_into(f"<{len(values)}Q", params, at, *values)

    return write_words


def bind_steps(
    steps: Steps, device: int, names: Iterable[str] = (), *, capturing: bool = False
) -> BoundSteps:
    """Return steps whose kernels are compiled and loaded on a device.

    Parameters
    ----------
    steps : Steps
        What to load.
    device : int
        CUDA ordinal.
    names : iterable of str
        Of the arrays of the call's masks, which places have by number.
    capturing : bool
        As `load` takes it.
    """
    names = tuple(names)
    launches = [launch for launch in steps.launches if all(launch.grid)]
    bound = [
        _BoundStep(launch, load(launch, device, capturing=capturing), names, device)
        for launch in launches
    ]
    return BoundSteps(scratch_bytes(steps), bound)


def scratch_bytes(steps: Steps) -> int:
    """Return how much to allocate as the scratch of steps, wherever that begins."""
    needed = steps.scratch and any(all(launch.grid) for launch in steps.launches)
    return steps.scratch + SCRATCH_ALIGNMENT - 1 if needed else 0
