"""Arithmetic of fp32: one rounding, subnormals as zeros, and the approximations' errors."""

import numpy as np
import pytest
from machine import Kernel, Machine, Out
from model import SMALLEST, flushed, same_numbers

MATH = Kernel(
    "math",
    "const float *x, *y, *z; float *to; u32 count, function;",
    """
  for (u32 i = threadIdx.x; i < p.count; i += blockDim.x) {
    const float x = p.x[i], y = p.y[i], z = p.z[i];
    p.to[i] = p.function == 0   ? ptx::mul(x, y)
              : p.function == 1 ? ptx::fma(x, y, z)
              : p.function == 2 ? ptx::ex2(x)
              : p.function == 3 ? ptx::lg2(x)
              : p.function == 4 ? ptx::rcp(x)
              : p.function == 5 ? ptx::min_nan(x, y)
                                : ptx::max_nan(x, y);
  }
""",
    threads=256,
)
ERROR = 2.0**-22  # PTX ISA, "ex2" and "lg2"

INFINITY, NAN = np.float32(np.inf), np.float32(np.nan)
TINY = np.float32(2.0**-130)  # a subnormal
SPECIAL = np.array([0, -0.0, 1, -1, INFINITY, -INFINITY, NAN, TINY, -TINY, SMALLEST], np.float32)


def run(machine: Machine, function: int, *operands: np.ndarray) -> np.ndarray:
    x, y, z = (*operands, *[operands[0]] * (3 - len(operands)))
    out = Out.empty(x.shape, np.float32)
    (got,) = machine.run(MATH, x, y, z, out, np.uint32(x.size), np.uint32(function))
    return got


def numbers(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return numbers of every size, subnormals included."""
    return rng.integers(0, 2**32, count, np.uint32).view(np.float32)


def once_rounded(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return x * y + z in fp32.

    The product is exact in fp64; the sum is rounded there to odd where it is inexact, so that its
    rounding to fp32 is as that of the exact sum.
    """
    product, z = x.astype(np.float64) * y, z.astype(np.float64)
    total = product + z
    part = total - product
    error = (product - (total - part)) + (z - part)
    even = (total.view(np.int64) & 1) == 0
    towards = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    odd = np.where(even & (error != 0) & np.isfinite(total), towards, total)
    return odd.astype(np.float32)


def certain(exact: np.ndarray) -> np.ndarray:
    """Where a result is far enough from the least normal number to say whether it is flushed."""
    return ~(np.abs(np.abs(exact) - SMALLEST) <= SMALLEST * 2.0**-22)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_mul_rounds_once_and_flushes(machine: Machine, rng: np.random.Generator) -> None:
    x = np.concatenate([numbers(rng, 4096), np.repeat(SPECIAL, len(SPECIAL))])
    y = np.concatenate([numbers(rng, 4096), np.tile(SPECIAL, len(SPECIAL))])
    expected = flushed(x) * flushed(y)
    known = certain(expected) | (flushed(x) == 0) | (flushed(y) == 0)
    assert same_numbers(run(machine, 0, x, y)[known], flushed(expected)[known])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fma_rounds_once_and_flushes(machine: Machine, rng: np.random.Generator) -> None:
    """Products near their addend, whose rounding before the sum would show."""
    x, y = (rng.standard_normal(4096).astype(np.float32) for _ in "xy")
    z = (-x * y * rng.choice([1, 1 + 2.0**-23, 1e-3, 1e3, 2.0**-30], 4096)).astype(np.float32)
    every = np.stack(np.meshgrid(SPECIAL, SPECIAL, SPECIAL), axis=-1).reshape(-1, 3)
    x, y, z = (np.concatenate([a, b]) for a, b in zip((x, y, z), every.T, strict=True))
    expected = once_rounded(flushed(x), flushed(y), flushed(z))
    # An exact sum of zeros has the sign of both, or is positive.
    assert same_numbers(run(machine, 1, x, y, z), flushed(expected))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_ex2_of_special_values_is_exact(machine: Machine) -> None:
    x = np.concatenate([SPECIAL, np.arange(-160, 140)]).astype(np.float32)
    expected = np.exp2(flushed(x).astype(np.float64))
    expected = np.where(expected < SMALLEST, 0, expected).astype(np.float32)
    got = run(machine, 2, x)
    special = ~np.isfinite(x) | (flushed(x) == 0) | ~np.isfinite(expected) | (expected == 0)
    assert same_numbers(got[special], expected[special])
    np.testing.assert_allclose(got, expected, rtol=ERROR, atol=0)


def test_ex2_is_within_the_stated_error(machine: Machine, rng: np.random.Generator) -> None:
    x = np.concatenate([rng.uniform(-126, 127.9, 8192), rng.uniform(-1, 1, 8192)])
    x = x.astype(np.float32)
    np.testing.assert_allclose(run(machine, 2, x), np.exp2(x.astype(np.float64)), rtol=ERROR)


def test_lg2_of_special_values_is_exact(machine: Machine) -> None:
    """Zeros, infinities, negative numbers and NaN; PTX ISA has no other."""
    got = run(machine, 3, SPECIAL)
    infinite = flushed(SPECIAL) == 0
    np.testing.assert_array_equal(got[infinite], -INFINITY)
    assert np.isnan(got[[3, 5, 6]]).all()
    assert got[4] == INFINITY


def test_lg2_is_within_the_stated_error(machine: Machine, rng: np.random.Generator) -> None:
    """Absolute between 1/2 and 2, relative elsewhere, also where the logarithm is whole."""
    x = np.concatenate([np.exp2(rng.uniform(-126, 127.9, 8192)), rng.uniform(0.5, 2, 8192)])
    x = np.concatenate([x, np.exp2(np.arange(-126.0, 128))]).astype(np.float32)
    exact = np.log2(x.astype(np.float64))
    bound = np.where((x > 0.5) & (x < 2), ERROR, ERROR * np.abs(exact))
    assert (np.abs(run(machine, 3, x) - exact) <= bound).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rcp_is_within_a_unit_and_exact_for_special_values(
    machine: Machine, rng: np.random.Generator
) -> None:
    x = np.concatenate([numbers(rng, 8192), np.exp2(np.arange(-126.0, 128)), SPECIAL])
    x = x.astype(np.float32)
    exact = 1 / flushed(x).astype(np.float64)
    rounded = flushed(exact.astype(np.float32))
    got = run(machine, 4, x)
    special = ~np.isfinite(exact) | (exact == 0)
    assert same_numbers(got[special], rounded[special])
    known = ~special & certain(exact)
    error = np.abs(got.astype(np.float64) - rounded)
    assert (error[known] <= np.spacing(np.abs(rounded[known]))).all()


@pytest.mark.parametrize("greater", [False, True], ids=["min", "max"])
def test_a_bound_lets_nan_through(
    machine: Machine, rng: np.random.Generator, greater: bool
) -> None:
    """Zeros are ordered too: -0 is less than +0."""
    x = np.concatenate([numbers(rng, 4096), np.repeat(SPECIAL, len(SPECIAL))])
    y = np.concatenate([numbers(rng, 4096), np.tile(SPECIAL, len(SPECIAL))])
    got = run(machine, 5 + greater, x, y)
    x, y = flushed(x), flushed(y)
    less = (x < y) | ((x == y) & np.signbit(x))
    expected = np.where(less ^ greater, x, y)
    expected[np.isnan(x) | np.isnan(y)] = NAN
    assert same_numbers(got, expected)
