"""Launches: a kernel's unit, grid and parameters as plain data, and what runs them on a GPU.

A `Launch` is made without a GPU and says all of one. `load` compiles and loads its kernel once per
process and device; what it returns takes other parameters on a later call. Anything that runs a
`Launch` may stand in for the GPU: `EMULATOR` does for arrays in host memory, where there is one.
"""

import math
import struct
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from . import _jit
from ._problem import Operands, Problem
from .errors import DeviceUnavailable

__all__ = [
    "EMULATOR",
    "FORWARD_BYTES",
    "Bound",
    "Emulator",
    "Launch",
    "Loaded",
    "bind",
    "execute",
    "load",
    "pack_forward",
]

# Params of cuda/kernels/attention_fwd_sm80.cu: the pointers, which alone change between warm calls;
# 12 strides, 8 integers and the scale, in units of log 2; the mask's own.
POINTERS = struct.Struct("<5Q")
FORWARD = struct.Struct("<12q8if")
BAND = struct.Struct("<3i")
FORWARD_BYTES = POINTERS.size + FORWARD.size + BAND.size
LOG2_E = math.log2(math.e)


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


EMULATOR: ContextVar[Emulator | None] = ContextVar("EMULATOR", default=None)  # of this thread


class _Stream(NamedTuple):
    """A raw stream handle, as CuPy's launch takes it."""

    ptr: int


class Loaded:
    """A launch whose kernel is loaded on a device."""

    __slots__ = ("_block", "_function", "_grid", "_shared_bytes")

    def __init__(self, launch: Launch, function: Any) -> None:
        self._function = function
        self._grid = launch.grid
        self._block = launch.block
        self._shared_bytes = launch.shared_bytes

    def __call__(self, params: bytes, stream: int) -> None:
        """Launch with these parameters on a raw stream of the current device."""
        self._function(
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
    return Loaded(launch, function)


def execute(launch: Launch, device: int, stream: int) -> None:
    """Run a launch as it is on a raw stream; the device must be current."""
    if launch.grid[0]:
        load(launch, device)(launch.params, stream)


class Bound:
    """A forward launch bound to its loaded kernel: a warm call rewrites the five pointers."""

    __slots__ = ("_loaded", "_rest")

    def __init__(self, loaded: Loaded | None, params: bytes) -> None:
        self._loaded = loaded  # None: there is no block to launch
        self._rest = params[POINTERS.size :]

    def __call__(self, q: int, k: int, v: int, out: int, lse: int, stream: int) -> None:
        """Launch on these pointers (``lse`` may be 0) and a raw stream of the current device."""
        if self._loaded is not None:
            self._loaded(POINTERS.pack(q, k, v, out, lse) + self._rest, stream)


def bind(launch: Launch, device: int, *, capturing: bool = False) -> Bound:
    """Return a forward launch, loaded as by `load`, that takes other pointers on each call."""
    empty = launch.grid[0] == 0
    loaded = None if empty else load(launch, device, capturing=capturing)
    return Bound(loaded, launch.params)


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
        return bytes(FORWARD_BYTES)  # no block reads them, and the other sizes may have any value
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
            problem.scale * LOG2_E,
        )
        + BAND.pack(*problem.band.operands(problem.len_q, problem.len_k))
    )
