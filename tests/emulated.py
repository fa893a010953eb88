"""The kernels of a GPU on the emulator, held against the oracle by the accuracy rule."""

import shutil
from typing import Any

import numpy as np
import pytest
from harness import GPU_KERNEL, Operand, Result, judge, same_bits, strided

import cupyflash

# Asynchronous copies as late as possible, and threads at random, last in first out, by rank of
# their warps: what catches most faults of synchronisation.
SEEDS = (0, 2, 3)
ARCH = 90

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="the emulator compiles kernels with g++"
)


def run(
    q: Operand, k: Operand, v: Operand, *, seed: int = 0, arch: int = ARCH, **options: Any
) -> Result:
    """Return (out, lse) of the GPU's kernel on the emulator."""
    arrays = (strided(x).host for x in (q, k, v))
    options = {"kernel": GPU_KERNEL, "return_lse": True} | options
    with cupyflash.emulate(seed=seed, arch=arch):
        out, lse = cupyflash.attention(*arrays, **options)
    return out, lse


def check(
    q: Operand,
    k: Operand,
    v: Operand,
    *,
    seeds: tuple[int, ...] = SEEDS,
    arch: int = ARCH,
    **options: Any,
) -> Result:
    """Hold the result of the first seed against the oracle, and the others to the same bits."""
    first, *others = (run(q, k, v, seed=seed, arch=arch, **options) for seed in seeds)
    options.pop("out", None)
    judge(first, q, k, v, **options)
    for seed, result in zip(seeds[1:], others, strict=True):
        for name, one, other in zip(("out", "lse"), first, result, strict=True):
            assert same_bits(one, other), f"{name} of seed {seed} is not that of seed {seeds[0]}"
    return first


def arrays(*shape: int, dtype: Any = np.float16, seed: int = 1) -> tuple[np.ndarray, ...]:
    """Return q, k and v of (batch, length, heads, head_dim)."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for _ in "qkv")
    return q, k, v
