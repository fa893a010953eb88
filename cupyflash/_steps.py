"""Launches of one call that run one after the other, bound to their loaded kernels.

What moves between calls are addresses: of the arrays by name, of the scratch that the launches hand
to one another, of the counters of tiles. A call writes them into the Params of each launch, and
into its tensor maps.
"""

import struct
from collections.abc import Iterable, Mapping

from . import _tickets
from ._launch import Launch, Loaded, Steps, load
from ._tensor_map import BYTES, moving

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


PACK = {n: struct.Struct(f"<{n}Q").pack_into for n in (1, 3)}  # by number of words


class _BoundStep:
    """One launch of `BoundSteps`."""

    __slots__ = ("_loaded", "_maps", "_params", "_scratch", "_tickets", "_words", "places")

    def __init__(self, launch: Launch, loaded: Loaded, names: tuple[str, ...], device: int) -> None:
        maps = {at: moving(tensor) for at, tensor in launch.maps}
        own = [(name if isinstance(name, str) else names[name], at) for name, at in launch.places]
        self.places = {name for name, _ in own if name != TICKETS}
        self._loaded = loaded
        self._params = launch.params
        self._words = [(name, at) for name, at in own if at not in maps and name != TICKETS]
        self._maps = [(name, at, maps[at]) for name, at in own if at in maps]
        self._scratch = [(offset, at, maps.get(at)) for at, offset in launch.scratch]
        self._tickets = [
            (at, _tickets.of(loaded.function, device)) for name, at in own if name == TICKETS
        ]

    def __call__(self, words: Words, scratch: int, stream: int) -> None:
        params, pack = bytearray(self._params), PACK[1]
        for name, at in self._words:
            values = words[name]
            PACK[len(values)](params, at, *values)
        for name, at, moved in self._maps:
            params[at : at + BYTES] = moved(words[name][0])
        for offset, at, map_at in self._scratch:
            if map_at is None:
                pack(params, at, scratch + offset)
            else:
                params[at : at + BYTES] = map_at(scratch + offset)
        for at, tickets in self._tickets:
            pack(params, at, tickets(stream))
        self._loaded(bytes(params), stream)


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
