"""Launches: a kernel's unit, grid and parameters as plain data, and what runs them on a GPU.

A `Launch` is made without a GPU and says all of one. `load` compiles and loads its kernel once per
process and device; what it returns takes other parameters on a later call. Anything that runs a
`Launch` may stand in for the GPU: `EMULATOR` does for arrays in host memory, where there is one.
"""

import struct
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from . import _jit, _modifiers, _tickets
from ._problem import Operands, Problem
from ._problem_backward import Backward
from ._tensor_map import BYTES, TensorMap, encode, moving
from .errors import DeviceUnavailable

__all__ = [
    "EMULATOR",
    "FORWARD_BYTES",
    "Bound",
    "Emulator",
    "Launch",
    "Loaded",
    "Steps",
    "bind",
    "execute",
    "load",
    "pack_forward",
]

# Params of cuda/kernels/attention_fwd_sm80.cu: the pointers, which alone change between warm calls;
# 12 strides, 8 integers and the scale, in units of log 2 and as it is; then those of policies.
POINTERS = struct.Struct("<5Q")
FORWARD = struct.Struct("<12q8i2f")
FORWARD_BYTES = POINTERS.size + FORWARD.size  # before those of the policies
# Params of a kernel that takes tensor maps start with those of q, k, v and out, and the pointers to
# out, lse and tickets.
MAPS_BYTES = 4 * BYTES
OUTPUTS = struct.Struct("<3Q")
TICKETS_OFFSET = MAPS_BYTES + 16


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel: what to compile, how many blocks, and the bytes of its Params."""

    unit: str
    symbol: str
    arch: str  # as NVRTC names it: "sm_90"
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    params: bytes
    maps: tuple[tuple[int, TensorMap], ...] = ()  # by offset in params, which leaves room for them
    persistent: bool = False  # a block computes tile after tile: one a multiprocessor is enough
    tickets: bool = False  # whether the blocks draw the numbers of their tiles, see _tickets
    # Of other addresses, see _modifiers.places. Among the launches of `Steps` also of the arrays of
    # `Operands` and `Backward` by their names, where a tensor map's offset stands for its base, and
    # of the counter of tiles as "tickets".
    places: tuple[tuple[str | int, int], ...] = ()
    scratch: tuple[tuple[int, int], ...] = ()  # offset in params, bytes into the scratch of `Steps`

    def blocks(self, multiprocessors: int) -> tuple[int, int, int]:
        """Return the grid on a device of so many multiprocessors."""
        x, y, z = self.grid
        return (min(x, multiprocessors), y, z) if self.persistent else self.grid

    def moved(self, addresses: Mapping[int, int]) -> "Launch":
        """Return the launch with other addresses at these offsets in params, of maps too."""
        params = bytearray(self.params)
        for offset, pointer in addresses.items():
            struct.pack_into("<Q", params, offset, pointer)
        maps = tuple(
            (offset, tensor._replace(pointer=addresses.get(offset, tensor.pointer)))
            for offset, tensor in self.maps
        )
        return replace(self, params=bytes(params), maps=maps)

    def complete(self, encode: Callable[[TensorMap], bytes]) -> bytes:
        """Return params with the tensor maps in their places, encoded for what runs the launch."""
        params = bytearray(self.params)
        for offset, tensor in self.maps:
            params[offset : offset + BYTES] = encode(tensor)
        return bytes(params)


class Steps(NamedTuple):
    """Launches that run one after the other on one stream, and what they need beside the arrays."""

    scratch: int  # bytes that hold anything before the first, from an address of whole 256 bytes
    launches: tuple[Launch, ...]


class Emulator(Protocol):
    """What runs the kernels of a GPU on the host: a session of `cupyflash.emulate`."""

    arch: int  # the compute capability that it stands for

    def attend(
        self,
        launch: Callable[..., Launch],
        problem: Problem,
        operands: Operands,
        lse: np.ndarray | None,
    ) -> None:
        """Run the launch of a row of the dispatch table on operands in host memory."""

    def differentiate(
        self,
        steps: Callable[..., Steps],
        problem: Problem,
        operands: Operands,
        backward: Backward,
    ) -> None:
        """Run the steps of a backward row likewise."""


EMULATOR: ContextVar[Emulator | None] = ContextVar("EMULATOR", default=None)  # of this thread


class _Stream(NamedTuple):
    """A raw stream handle, as CuPy's launch takes it."""

    ptr: int


class Loaded:
    """A launch whose kernel is loaded on a device."""

    __slots__ = ("_block", "_grid", "_shared_bytes", "function")

    def __init__(self, launch: Launch, function: Any, device: int) -> None:
        self.function = function
        persistent = launch.persistent
        self._grid = launch.blocks(_jit.multiprocessors(device)) if persistent else launch.grid
        self._block = launch.block
        self._shared_bytes = launch.shared_bytes

    def __call__(self, params: bytes, stream: int) -> None:
        """Launch with these parameters on a raw stream of the current device."""
        self.function(
            self._grid, self._block, (np.void(params),), self._shared_bytes, _Stream(stream)
        )


_functions: dict[tuple[str, str, int, int], Any] = {}


def load(launch: Launch, device: int, *, capturing: bool = False) -> Loaded:
    """Return a launch with its kernel compiled and loaded on a device, once for each unit.

    Parameters
    ----------
    launch : Launch
        What to load.
    device : int
        CUDA ordinal.
    capturing : bool
        Whether the current stream records a graph, where a kernel that is not loaded is an error.
    """
    key = (launch.unit, launch.arch, device, launch.shared_bytes)
    function = _functions.get(key)
    if function is None:
        if capturing:
            raise DeviceUnavailable(
                f"{launch.symbol} is not loaded yet, which a CUDA graph capture forbids: call "
                "cupyflash.warmup with the same arguments, or the same function, before the capture"
            )
        cubin = _jit.compile(launch.unit, launch.symbol, launch.arch)
        function = _jit.load(cubin, device, launch.shared_bytes)
        _functions[key] = function
    return Loaded(launch, function, device)


def execute(launch: Launch, device: int, stream: int) -> None:
    """Run a launch as it is on a raw stream; the device must be current."""
    if launch.grid[0]:
        load(launch, device)(launch.complete(encode), stream)


Words = tuple[tuple[int, tuple[int, ...]], ...]  # by offset in Params


class Bound:
    """A forward launch bound to its loaded kernel: a warm call rewrites the five pointers.

    ``words`` are others that it rewrites, where Launch.places says.
    """

    __slots__ = ("_loaded", "_rest")
    start = POINTERS.size  # of what does not change, or only by words

    def __init__(self, loaded: Loaded | None, launch: Launch) -> None:
        self._loaded = loaded  # None: there is no block to launch
        self._rest = launch.params[self.start :]

    def __call__(
        self, q: int, k: int, v: int, out: int, lse: int, stream: int, words: Words = ()
    ) -> None:
        """Launch on these pointers (``lse`` may be 0) and a raw stream of the current device."""
        if self._loaded is not None:
            rest = self._changed(words) if words else self._rest
            self._loaded(POINTERS.pack(q, k, v, out, lse) + rest, stream)

    def _changed(self, words: Words) -> bytes:
        rest = bytearray(self._rest)
        for offset, values in words:
            struct.pack_into(f"<{len(values)}Q", rest, offset - self.start, *values)
        return bytes(rest)


class BoundMaps(Bound):
    """The same for a kernel that takes tensor maps of q, k, v and out, which move with them."""

    __slots__ = ("_k", "_out", "_q", "_tickets", "_v")
    start = MAPS_BYTES + OUTPUTS.size

    def __init__(self, loaded: Loaded, launch: Launch, device: int) -> None:
        super().__init__(loaded, launch)
        self._q, self._k, self._v, self._out = (moving(tensor) for _, tensor in launch.maps)
        self._tickets = _tickets.of(loaded.function, device) if launch.tickets else None

    def __call__(
        self, q: int, k: int, v: int, out: int, lse: int, stream: int, words: Words = ()
    ) -> None:
        """Launch on these pointers (``lse`` may be 0) and a raw stream of the current device."""
        maps = self._q(q), self._k(k), self._v(v), self._out(out)
        assert self._loaded is not None
        tickets = 0 if self._tickets is None else self._tickets(stream)
        rest = self._changed(words) if words else self._rest
        self._loaded(b"".join((*maps, OUTPUTS.pack(out, lse, tickets), rest)), stream)


def bind(launch: Launch, device: int, *, capturing: bool = False) -> Bound:
    """Return a forward launch, loaded as by `load`, that takes other pointers on each call."""
    if launch.grid[0] == 0:
        return Bound(None, launch)
    loaded = load(launch, device, capturing=capturing)
    return BoundMaps(loaded, launch, device) if launch.maps else Bound(loaded, launch)


def pack_forward(problem: Problem, operands: Operands, lse: int, group: int) -> bytes:
    """Return the bytes of the Params of attention_fwd_sm80.

    Parameters
    ----------
    problem, operands : Problem, Operands
        The call.
    lse : int
        Pointer to the log-sum-exp, or 0.
    group : int
        Heads whose K and V share the L2 cache.
    """
    arrays = (operands.q, operands.k, operands.v, operands.out)
    if problem.empty:
        # No block reads them, and the other sizes may have any value.
        return bytes(FORWARD_BYTES + _modifiers.policies(problem).params_bytes)
    return (
        POINTERS.pack(*(array.pointer for array in arrays), lse)
        + FORWARD.pack(
            *(stride for array in arrays for stride in array.strides[:3]),
            problem.batch,
            problem.len_q,
            problem.len_k,
            problem.heads_q,
            problem.heads_k,
            problem.head_dim,
            problem.head_dim_v,
            group,
            problem.scale * _modifiers.LOG2_E,
            problem.scale,
        )
        + _modifiers.pack(problem, operands)
    )
