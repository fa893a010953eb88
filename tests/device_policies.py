"""The policies of cuda/ as a library of the host, whose functions take Params as bytes."""

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from cupyflash import _emulator
from cupyflash._modifiers import DENSE, INTEGERS

ROOT = Path(__file__).resolve().parents[1]
COMPILER = shutil.which("g++")


def build(folder: Path, cuda: Path = ROOT / "cuda") -> ctypes.CDLL:
    """Compile policies.cpp over the instructions of the emulator; undefined behaviour aborts."""
    assert COMPILER is not None
    library = folder / "policies.so"
    twins = Path(_emulator.__file__).parent / "cpp"
    subprocess.run(
        [COMPILER, "-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror",
         "-Wno-unknown-pragmas", "-ffp-contract=off", "-fsanitize=undefined",
         "-fno-sanitize-recover", "-I", twins, "-I", cuda, ROOT / "tests" / "policies.cpp",
         "-o", library],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(library))


class Policies:
    """Calls the library with arrays of NumPy."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def call(self, name: str, *arguments: Any, result: Any = None) -> Any:
        """Call a function: integers are ints of C unless they are of ctypes."""
        function = getattr(self.library, name)
        function.restype = result
        return function(
            *(
                x.ctypes.data_as(ctypes.c_void_p) if isinstance(x, np.ndarray) else x
                for x in arguments
            )
        )

    def size(self, name: str) -> int:
        """Return what a function without arguments says."""
        return int(self.call(name, result=ctypes.c_size_t))

    def keep(
        self, name: str, params: bytes, lengths: tuple[int, int],
        shape: tuple[int, int] | None = None, entry: tuple[int, int] = (0, 0),
        start: tuple[int, int] = (0, 0),
    ) -> np.ndarray:  # fmt: skip
        """Return what a mask keeps of pairs from `start` on; `entry` is a batch and a head."""
        kept = np.zeros(lengths if shape is None else shape, bool)
        self.call(f"{name}_keep", params, *entry, *lengths, *start, *kept.shape, kept)
        return kept

    def blocks(
        self, name: str, params: bytes, lengths: tuple[int, int], block: int, batch: int = 0
    ) -> np.ndarray:
        """Return keys, queries and whole of all blocks, five integers for each."""
        counts = [-(-length // block) for length in lengths]
        answers = np.zeros((*counts, 5), np.int32)
        self.call(f"{name}_blocks", params, batch, 0, *lengths, block, answers)
        return answers

    def look(
        self, name: str, params: bytes, lengths: tuple[int, int], rows: tuple[int, int],
        block: int, batch: int = 0,
    ) -> tuple[range, bool, np.ndarray]:  # fmt: skip
        """Return what a mask says that has looked at a range of queries.

        The range of its keys, whether it is made of intervals, and which blocks of keys are whole.
        """
        answers = np.zeros(3 + -(-lengths[1] // block), np.int32)
        self.call(f"{name}_look", params, batch, 0, *lengths, *rows, block, answers)
        begin, end, intervals, *whole = answers.tolist()
        return range(begin, end), bool(intervals), np.array(whole, bool)

    def apply(
        self, name: str, params: bytes, scores: np.ndarray, lengths: tuple[int, int],
        entry: tuple[int, int] = (0, 0), start: tuple[int, int] = (0, 0),
    ) -> np.ndarray:  # fmt: skip
        """Return modified scores, of pairs from `start` on."""
        result = np.array(scores, np.float32, order="C")
        self.call(f"{name}_apply", params, *entry, *lengths, *start, *result.shape, result)
        return result

    def quick(
        self, name: str, params: bytes, scores: np.ndarray, lengths: tuple[int, int],
        start: tuple[int, int] = (0, 0), *, scale: float = 1.0, unit: float = 1.0,
    ) -> tuple[int, np.ndarray]:  # fmt: skip
        """Return what policies.cpp says of a quick policy, and scores of 16 rows and 32 keys."""
        result = np.array(scores, np.float32, order="C")
        assert result.shape == (16, 32)
        numbers = (ctypes.c_float(scale), ctypes.c_float(unit))
        said = self.call(
            f"{name}_quick", params, 0, 0, *lengths, *start, *numbers, result, result=ctypes.c_int
        )
        return said, result


@functools.cache
def policies(folder: Path) -> Policies:
    """Return the library, built once."""
    return Policies(build(folder))


def address(x: np.ndarray) -> int:
    """Return where an array's first element is."""
    return int(x.__array_interface__["data"][0])


def strides(x: np.ndarray) -> tuple[int, ...]:
    """Return strides in elements."""
    return tuple(stride // x.itemsize for stride in x.strides)


def integers(x: np.ndarray) -> bytes:
    """Return Integers along the last axis."""
    return INTEGERS.pack(address(x), strides(x)[-1], x.itemsize, x.dtype.kind == "i")


def pairs(x: np.ndarray, extents: tuple[int, int] = (0, 0)) -> bytes:
    """Return what a bias or a boolean mask (batch, heads, queries, keys) is read by."""
    return DENSE.pack(address(x), *strides(x), *extents)
