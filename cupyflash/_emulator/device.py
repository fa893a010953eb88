"""One `cupyflash.emulate`: launches on an emulated GPU, and what they did."""

import contextlib
import ctypes
import math
import threading
from collections.abc import Callable, Container, Iterator
from typing import Any

import numpy as np

from .._array import HOST, Array, contiguous_strides
from .._launch import EMULATOR, TICKETS_OFFSET, Launch, Steps
from .._problem import Operands, Problem
from .._problem_backward import Backward
from .._steps import TICKETS
from ..errors import InvalidArgument, KernelFault
from . import build, tensor_maps
from .memory import Memory
from .stats import Counters, Stats

__all__ = ["Session", "run", "session"]

WRITTEN = ("dq", "dk", "dv", "dbias", "dsink")  # of the arrays of a backward call
MESSAGE_BYTES = 1 << 14
PARAMS_ALIGNMENT = 64  # CUDA Driver API, "cuTensorMapEncodeTiled": of a tensor map in Params
MULTIPROCESSORS = 3  # few, so that a block of a persistent kernel computes several tiles

_lock = threading.Lock()  # the runtime runs one launch at a time


def run(launch: Launch, seed: int) -> Stats:
    """Run a launch as it is; its pointers are of memory that the runtime allocated.

    Parameters
    ----------
    launch : Launch
        What to run.
    seed : int
        Chooses the order of blocks, of threads and of asynchronous operations.

    Returns
    -------
    Stats
        What it did.

    Raises
    ------
    KernelFault
        The kernel did what it must not; the message names the line.
    """
    runtime, unit = build.runtime(), build.unit(launch)
    content = launch.complete(tensor_maps.encode)
    size = len(content)
    assert size == unit.params_bytes, f"Params of {unit.params_bytes} bytes, {size} were packed"
    storage = ctypes.create_string_buffer(size + PARAMS_ALIGNMENT)
    params = -(-ctypes.addressof(storage) // PARAMS_ALIGNMENT) * PARAMS_ALIGNMENT
    ctypes.memmove(params, content, size)
    counters, message = Counters(), ctypes.create_string_buffer(MESSAGE_BYTES)
    grid, threads = launch.blocks(MULTIPROCESSORS), math.prod(launch.block)
    with _lock:
        failed = runtime.emu_launch(
            unit.kernel, *grid, threads, launch.shared_bytes, params, size, seed,
            ctypes.byref(counters), message, MESSAGE_BYTES,
        )  # fmt: skip
    if failed:
        text = message.value.decode(errors="replace")
        raise KernelFault(f"{launch.symbol} (seed {seed}): {text}")
    return Stats.of(counters)


class Session:
    """An emulated GPU, and what its kernels did so far.

    Parameters
    ----------
    seed : int
        Of every launch.
    arch : int
        The compute capability that it stands for, 90 for 9.0.
    """

    def __init__(self, seed: int, arch: int) -> None:
        self.seed = seed
        self.arch = arch
        self.stats: dict[str, Stats] = {}  # by kernel
        build.compiler()

    def attend(
        self,
        launch: Callable[..., Launch],
        problem: Problem,
        operands: Operands,
        lse: np.ndarray | None,
    ) -> None:
        """Run the launch of a row of the dispatch table on operands in host memory."""
        with Memory(build.runtime()) as memory:
            placed = _placed(memory, operands, ("out",))
            sums = 0 if lse is None else memory.written("lse", _array(lse)).pointer
            ready = launch(problem, placed, sums)
            self._run(memory, ready, [TICKETS_OFFSET] if ready.tickets else [])
            memory.collect()

    def differentiate(
        self,
        steps: Callable[..., Steps],
        problem: Problem,
        operands: Operands,
        backward: Backward,
    ) -> None:
        """Run the steps of a backward row of the dispatch table on arrays in host memory."""
        with Memory(build.runtime()) as memory:
            placed = _placed(memory, operands)
            twins = {
                name: (memory.written if name in WRITTEN else memory.read)(name, x)
                for name, x in backward._asdict().items()
                if x is not None and name != "out"
            }
            scratch, launches = steps(problem, placed, backward._replace(out=placed.out, **twins))
            base = memory.scratch(scratch)
            for launch in launches:
                ready = launch.moved({at: base + offset for at, offset in launch.scratch})
                self._run(memory, ready, [at for name, at in launch.places if name == TICKETS])
            memory.collect()

    def _run(self, memory: Memory, launch: Launch, tickets: list[int]) -> None:
        """Run a launch whose Params have the addresses of counters of tiles at these offsets."""
        # The blocks of odd seeds take tiles in turn.
        counters = [memory.counter() for _ in tickets if self.seed % 2 == 0]
        addresses = zip(tickets, (counter.ctypes.data for counter in counters), strict=False)
        if all(launch.grid):
            self._count(launch.symbol, run(launch.moved(dict(addresses)), self.seed))
        for counter in counters:
            if counter.any():
                left = counter.tolist()
                raise KernelFault(f"{launch.symbol} left its tickets at {left}, not at zeros")

    def _count(self, kernel: str, stats: Stats) -> None:
        self.stats[kernel] = self.stats.get(kernel, Stats()) + stats


def _placed(memory: Memory, operands: Operands, written: Container[str] = ()) -> Operands:
    """Return the twins of operands."""
    twins: dict[str, Any] = {
        name: (memory.written if name in written else memory.read)(name, value)
        for name, value in operands._asdict().items()
        if isinstance(value, Array)
    }
    masks = tuple(tuple(memory.read("mask", x) for x in arrays) for arrays in operands.masks)
    return operands._replace(masks=masks, **twins)


def _array(x: np.ndarray) -> Array:
    """Return the record of a C-contiguous NumPy array."""
    pointer = x.__array_interface__["data"][0]
    strides = contiguous_strides(x.shape)
    return Array(pointer, x.shape, strides, x.dtype.name, HOST, "numpy", False, x)


@contextlib.contextmanager
def session(seed: int, arch: int) -> Iterator[Session]:
    """Let arrays in host memory be computed by an emulated GPU inside, in this thread."""
    if not 0 <= seed < 2**64:
        raise InvalidArgument(f"`seed` must be from 0 to 2**64 - 1, got {seed}")
    current = Session(seed, arch)
    token = EMULATOR.set(current)
    try:
        yield current
    finally:
        EMULATOR.reset(token)
