"""Two machines that run the same small kernel on the same arguments: a GPU, and the emulator.

A test states what the PTX ISA says in NumPy and holds a machine against it, so that the emulator is
believed about the instructions of ``cuda/ptx`` because a GPU agrees with it.
"""

import contextlib
import ctypes
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gpu
import numpy as np
import pytest

from cupyflash import _emulator, _jit, _launch
from cupyflash._emulator import build
from cupyflash._launch import Launch
from cupyflash._tensor_map import BYTES as MAP_BYTES
from cupyflash._tensor_map import TensorMap

SYMBOL = "micro"
ARCH = "sm_90a"  # what the emulator stands for
GUARD = 256  # bytes before and after an array on the GPU, which a kernel must leave as they are
LIMIT = 5.0  # seconds that a launch may take: a kernel that hangs is not waited for
MAP_ALIGNMENT = 64  # ptx::TensorMap's

Maps = tuple[tuple[int, TensorMap], ...]  # by offset in Params


@dataclass(frozen=True)
class Kernel:
    """A kernel of a few lines: what it includes of ``cuda/ptx``, its Params and its body."""

    headers: str  # names, with blanks between
    params: str
    body: str
    functions: str = ""  # that the body calls; they see Params
    threads: int = 32
    blocks: int = 1
    shared: int = 0  # bytes
    capability: int = 80  # the oldest that has the instructions; 90 is Hopper alone

    @property
    def unit(self) -> str:
        """The text that NVRTC and g++ compile."""
        includes = "".join(f'#include "ptx/{name}.cuh"\n' for name in self.headers.split())
        return (
            f"{includes}struct Params {{\n{self.params}\n}};\n{self.functions}\n"
            f'extern "C" __global__ void __launch_bounds__({self.threads}, 1)\n'
            f"    {SYMBOL}(const __grid_constant__ Params p) {{\n{self.body}\n}}\n"
        )

    def launch(self, arch: str, params: bytes, maps: Maps) -> Launch:
        """Return what either machine runs."""
        grid, block = (self.blocks, 1, 1), (self.threads, 1, 1)
        return Launch(self.unit, SYMBOL, arch, grid, block, self.shared, params, maps)


@dataclass(frozen=True, eq=False)
class Out:
    """An array that a kernel writes: what is in it before, and that `Machine.run` returns it."""

    array: np.ndarray

    @classmethod
    def empty(cls, shape: int | Sequence[int], dtype: Any) -> "Out":
        """Return one whose bytes are all 0xff: NaN in every float type."""
        bits = np.full(np.prod(shape) * np.dtype(dtype).itemsize, 0xFF, np.uint8)
        return cls(bits.view(dtype).reshape(shape))


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor map of an array [batch, length, heads, head_dim].

    Its box and its coordinates are in the order column, row, head, batch; ``swizzle`` is 0, 32, 64
    or 128 bytes.
    """

    of: np.ndarray | Out
    box: tuple[int, int, int, int]
    swizzle: int = 0

    def map(self, address: int) -> TensorMap:
        """Return the map of the copy at an address."""
        array = self.of.array if isinstance(self.of, Out) else self.of
        axes = (3, 1, 2, 0)
        shape = tuple(array.shape[axis] for axis in axes)
        strides = tuple(array.strides[axis] for axis in axes[1:])
        return TensorMap(address, array.dtype.name, shape, strides, self.box, self.swizzle)


Argument = np.ndarray | Out | Tensor | np.generic


class Machine(Protocol):
    """What runs kernels."""

    def run(self, kernel: Kernel, *arguments: Argument) -> list[np.ndarray]:
        """Run a kernel on these members of its Params, in order.

        An array becomes a pointer to a copy, which has to stay as it is; an `Out` is a pointer to
        what the kernel writes; a `Tensor` is a tensor map; NumPy's numbers are themselves.

        Returns
        -------
        list of numpy.ndarray
            What the kernel left in each `Out`.
        """


def array_of(argument: Argument) -> np.ndarray | None:
    """Return the array that an argument names, if it does."""
    if isinstance(argument, Tensor):
        return array_of(argument.of)
    if isinstance(argument, Out):
        return argument.array
    return argument if isinstance(argument, np.ndarray) else None


class Memory:
    """Copies of the arrays of a launch where its machine reaches them."""

    def __init__(self, place: Callable[[np.ndarray], int]) -> None:
        self._place = place
        self._placed: dict[int, tuple[np.ndarray, int]] = {}  # by identity: maps share arrays

    def address(self, array: np.ndarray) -> int:
        """Return the address of the copy of an array, made once."""
        if id(array) not in self._placed:
            self._placed[id(array)] = (array, self._place(array))
        return self._placed[id(array)][1]

    def params(self, arguments: Sequence[Argument]) -> tuple[bytes, Maps]:
        """Lay the arguments out as the members of Params, each aligned as C++ aligns it."""
        params, maps, strictest = b"", [], 1
        for argument in arguments:
            array = array_of(argument)
            if isinstance(argument, Tensor):
                member, alignment = bytes(MAP_BYTES), MAP_ALIGNMENT
            elif array is not None:
                member, alignment = self.address(array).to_bytes(8, "little"), 8
            else:
                member, alignment = argument.tobytes(), argument.itemsize
            params = params.ljust(rounded_up(len(params), alignment), b"\0")
            if isinstance(argument, Tensor):
                maps.append((len(params), argument.map(self.address(array))))
            params += member
            strictest = max(strictest, alignment)
        return params.ljust(rounded_up(len(params), strictest), b"\0"), tuple(maps)

    def results(
        self, arguments: Sequence[Argument], fetch: Callable[[int, np.ndarray], np.ndarray]
    ) -> list[np.ndarray]:
        """Return the outputs; the other arrays must be what they were."""
        outputs = [out for argument in arguments if (out := output(argument)) is not None]
        for array, address in self._placed.values():
            if not any(array is out for out in outputs):
                assert fetch(address, array).tobytes() == array.tobytes(), "an input was written"
        return [fetch(self.address(out), out) for out in outputs]


def output(argument: Argument) -> np.ndarray | None:
    """Return the array that an argument lets the kernel write, if it does."""
    out = argument.of if isinstance(argument, Tensor) else argument
    return out.array if isinstance(out, Out) else None


def rounded_up(size: int, alignment: int) -> int:
    """Return the least multiple that is not smaller."""
    return -(-size // alignment) * alignment


@functools.cache
def compiled(unit: str, arch: str) -> _jit.Cubin:
    """Return a unit as NVRTC compiles it, about which it must have nothing to remark."""
    cubin = _jit.compile(unit, SYMBOL, arch)
    assert cubin.log == "", cubin.log
    assert cubin.resources.spill_stores == cubin.resources.stack == 0, cubin.resources
    return cubin


class Emulator:
    """The emulator, with the orders that a seed chooses."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._runtime = build.runtime()

    def run(self, kernel: Kernel, *arguments: Argument) -> list[np.ndarray]:
        """Run it as `Machine.run` says."""
        allocations: list[int] = []

        def place(array: np.ndarray) -> int:
            address = self._runtime.emu_alloc(array.nbytes, f"array {len(allocations)}".encode(), 1)
            allocations.append(address)
            ctypes.memmove(address, array.tobytes(), array.nbytes)
            return int(address)

        def fetch(address: int, array: np.ndarray) -> np.ndarray:
            content = ctypes.string_at(address, array.nbytes)
            return np.frombuffer(content, array.dtype).reshape(array.shape)

        memory = Memory(place)
        try:
            _emulator.run(kernel.launch(ARCH, *memory.params(arguments)), self.seed)
            return memory.results(arguments, fetch)
        finally:
            for address in allocations:
                self._runtime.emu_free(address)


class Gpu:
    """CUDA device 0.

    Parameters
    ----------
    report : callable
        What says, past pytest's capture, why this process ends: a context in which a kernel hangs
        or has failed can run nothing else, and ending the process is what stops the kernel.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report

    def run(self, kernel: Kernel, *arguments: Argument) -> list[np.ndarray]:
        """Run it as `Machine.run` says."""
        import cupy

        arch = self._arch(kernel)
        compiled(kernel.unit, arch)
        storages: dict[int, Any] = {}

        def place(array: np.ndarray) -> int:
            guard = np.full(GUARD, 0xFF, np.uint8)
            content = np.frombuffer(array.tobytes(), np.uint8)
            storage = cupy.asarray(np.concatenate([guard, content, guard]))
            address = storage.data.ptr + GUARD
            storages[address] = storage
            return int(address)

        def fetch(address: int, array: np.ndarray) -> np.ndarray:
            content = storages[address].get()
            inside = slice(GUARD, GUARD + array.nbytes)
            assert (np.delete(content, inside) == 0xFF).all(), "it wrote beside an array"
            return content[inside].view(array.dtype).reshape(array.shape)

        memory = Memory(place)
        with self._surviving():
            gpu.poison_shared()
            _launch.execute(kernel.launch(arch, *memory.params(arguments)), 0, 0)
            done = cupy.cuda.Event()
            done.record(cupy.cuda.Stream.null)
            self._wait(done)
        return memory.results(arguments, fetch)

    @staticmethod
    def _arch(kernel: Kernel) -> str:
        capability = _jit.compute_capability(0)
        if capability < kernel.capability or (kernel.capability == 90 != capability):
            pytest.skip(f"needs compute capability {kernel.capability / 10}, not {capability / 10}")
        return f"sm_{capability}a" if kernel.capability == 90 else f"sm_{capability}"

    def _wait(self, done: Any) -> None:
        deadline = time.monotonic() + LIMIT
        while not done.done:
            if time.monotonic() > deadline:
                self._end(f"the kernel did not end in {LIMIT:.0f} s")
            time.sleep(0.0002)

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        import cupy

        errors = (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError)
        try:
            yield
        except errors as error:
            self._end(str(error))

    def _end(self, reason: str) -> None:
        self._report(f"{os.environ.get('PYTEST_CURRENT_TEST')}: {reason}")
        os._exit(1)
