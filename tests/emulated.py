"""The kernels of a GPU on the emulator, held against the oracle by the accuracy rule; tiny ones."""

import contextlib
import ctypes
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Case
from harness import (
    GPU_KERNEL,
    HOPPER,
    Operand,
    Result,
    attend,
    hosted,
    run_child,
    same_bits,
    strided,
)

import cupyflash
from cupyflash import _accuracy, _emulator
from cupyflash._emulator import build
from cupyflash._emulator.stats import Stats
from cupyflash._launch import Launch

# Asynchronous copies as late as possible, and threads at random, last in first out, by rank of
# their warps: what catches most faults of synchronisation. `make test-nightly` asks for more.
NIGHTLY = int(os.environ.get("CUPYFLASH_EMULATOR_SEEDS", 0))
SEEDS = tuple(range(NIGHTLY)) or (0, 2, 3)
# And threads at random with copies at random: what is wrong between roles of a block.
SEEDS_OF = {GPU_KERNEL: SEEDS, HOPPER: tuple(range(NIGHTLY)) or (*SEEDS, 8)}
# And some copies at once while others are late: what is wrong between blocks that add in turns.
SEEDS_IN_TURNS = tuple(range(NIGHTLY)) or (*SEEDS_OF[HOPPER], 6)
EACH = 7  # at night a case that shares the seeds with others has each seventh of them
ARCH = 90

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="the emulator compiles kernels with g++"
)


def every_other_at_night(cases: Iterable[Any]) -> list[Any]:
    """Return parameters of a test, of which the nightly run alone has each second one."""
    marks = ((), pytest.mark.nightly)
    return [pytest.param(case, marks=marks[n % 2]) for n, case in enumerate(cases)]


def shared_seeds(case: Case, kernel: str = GPU_KERNEL) -> tuple[int, ...]:
    """Return the seeds of one of many cases among which a kernel's are spread: one by day."""
    seeds, number = SEEDS_OF[kernel], sum(case.id.encode())
    return seeds[number % EACH :: EACH] if NIGHTLY > EACH else (seeds[number % len(seeds)],)


def run(
    q: Operand,
    k: Operand,
    v: Operand,
    *,
    kernel: str = GPU_KERNEL,
    seed: int = 0,
    arch: int = ARCH,
    **options: Any,
) -> Result:
    """Return (out, lse) of a kernel of a GPU on the emulator."""
    arrays = (strided(x).host for x in (q, k, v))
    with cupyflash.emulate(seed=seed, arch=arch):
        out, lse = attend(kernel, *arrays, return_lse=True, **hosted(options))
    return out, lse


def check(
    q: Operand,
    k: Operand,
    v: Operand,
    *,
    kernel: str = GPU_KERNEL,
    seeds: tuple[int, ...] | None = None,
    arch: int = ARCH,
    **options: Any,
) -> Result:
    """Hold the result of the first seed against the oracle, and the others to the same bits.

    The seeds are the kernel's own by default.
    """
    seeds = seeds or SEEDS_OF[kernel]
    first, *others = (
        run(q, k, v, kernel=kernel, seed=seed, arch=arch, **options) for seed in seeds
    )
    options.pop("out", None)
    arrays = (strided(x).host for x in (q, k, v))
    verdict = _accuracy.verdict(*first, *arrays, **hosted(options))
    assert verdict.ok, verdict.message
    for seed, result in zip(seeds[1:], others, strict=True):
        for name, one, other in zip(("out", "lse"), first, result, strict=True):
            assert same_bits(one, other), f"{name} of seed {seed} is not that of seed {seeds[0]}"
    return first


def arrays(*shape: int, dtype: Any = np.float16, seed: int = 1) -> tuple[np.ndarray, ...]:
    """Return q, k and v of (batch, length, heads, head_dim)."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for _ in "qkv")
    return q, k, v


TINY = """#include "ptx/atomic.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
struct Params { float *x; u32 *counts; int n; };
extern "C" __global__ void tiny(const __grid_constant__ Params p) {
  const int i = threadIdx.x;
  float *shared = ptx::shared<float[256]>();
  %s
}
"""
TINY_LINE = 8  # of the unit, where a body begins
COUNTS = 8


def tiny(body: str, params: bytes, blocks: int = 1) -> Launch:
    """Return the launch of a kernel of a few lines, by blocks of 64 threads."""
    return Launch(TINY % body, "tiny", "sm_90", (blocks, 1, 1), (64, 1, 1), 1024, params)


class Numbers:
    """What tiny kernels work on: `n` floats at x, NaN at first, and counts of zero."""

    def __init__(self, x: int, counts: int, n: int) -> None:
        self.params = struct.pack("<QQi4x", x, counts, n)
        self.x = np.ctypeslib.as_array((ctypes.c_float * n).from_address(x))
        self.counts = np.ctypeslib.as_array((ctypes.c_uint32 * COUNTS).from_address(counts))

    def run(self, body: str, seed: int = 0, blocks: int = 1) -> Stats:
        """Run a tiny kernel."""
        return _emulator.run(tiny(body, self.params, blocks), seed)


@contextlib.contextmanager
def numbers(n: int = 4) -> Iterator[Numbers]:
    """Let tiny kernels find guarded memory."""
    runtime = build.runtime()
    x, counts = runtime.emu_alloc(4 * n, b"x", 1), runtime.emu_alloc(4 * COUNTS, b"counts", 0)
    try:
        yield Numbers(x, counts, n)
    finally:
        runtime.emu_free(x)
        runtime.emu_free(counts)


def sanitized(
    library: str, script: str, *arguments: str, **options: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder, a sanitizer's library loaded before all that Python loads."""
    command = [build.compiler().path, f"-print-file-name={library}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"g++ has no {library}")
    # Where addresses are random in more bits than a sanitizer expects, it does not start.
    fixed = ["setarch", "--addr-no-randomize"]
    if shutil.which(fixed[0]) is None or subprocess.run([*fixed, "true"], check=False).returncode:
        fixed = []
    child = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    return run_child(*fixed, "env", f"LD_PRELOAD={path}", *child, timeout=1800, **options)
