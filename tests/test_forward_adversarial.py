"""Scores, scales and values at which a softmax that lags behind its maximum would go wrong.

attention_fwd_sm90 walks key blocks from the last to the first. It looks for the maximum of a row
in the first block that it meets; in the others it guesses, and looks again only where the weights
leave a limit (cuda/tile/lazy_softmax.cuh). Every kernel is held to the same cases, that one on the
emulator too.
"""

from typing import Any

import emulated
import harness
import ml_dtypes
import numpy as np
import pytest
from harness import HOPPER, KERNELS, Result

EMULATED = "emulated"
pytestmark = pytest.mark.parametrize(
    "kernel", [*KERNELS, pytest.param(EMULATED, marks=emulated.needs_compiler)]
)
BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
both = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)

DIM, BLOCK = 64, 128
LEN_Q, LEN_K = 70, 3 * BLOCK + 13
BLOCKS = np.arange(LEN_K) // BLOCK
LAST = BLOCKS[-1]
LOG_2 = float(np.log(2))  # as a scale it makes a score a power of 2


def check(kernel: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Result:
    if kernel == EMULATED:
        return emulated.check(q, k, v, seeds=(1,), kernel=HOPPER, **options)
    return harness.check(kernel, q, k, v, **options)


def normal(seed: int, length: int, dtype: Any, size: float = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (size * rng.standard_normal((1, length, 1, DIM))).astype(dtype)


def scored(rows: Any, keys: Any, dtype: Any, noise: float = 0.25) -> tuple[np.ndarray, ...]:
    """Return q, k and v; the scores, unscaled, are rows[i] * keys[j] and some noise."""
    q, k = normal(0, len(rows), dtype, noise), normal(1, len(keys), dtype)
    q[0, :, 0, 0], k[0, :, 0, 0] = rows, keys
    return q, k, normal(2, len(keys), dtype)


# By block, from the first, which is met last; in units of a height.
SHAPES = {
    "each block met is higher": LAST - BLOCKS,
    "each block met is lower": BLOCKS,
    "every other block is higher": BLOCKS % 2,
    "one block is higher": BLOCKS == LAST // 2,
    "one block is lower": BLOCKS != LAST // 2,
    "the first block met is lower": BLOCKS != LAST,
}


@both
@pytest.mark.parametrize("shape", SHAPES)
def test_scores_that_jump_between_blocks(kernel: str, shape: str, dtype: np.dtype) -> None:
    """In some rows of a warp they jump up, in others down, in others not at all."""
    rows = np.arange(LEN_Q) % 3 - 1
    for height in (11.5, 300, 3000):
        q, k, v = scored(rows, height * SHAPES[shape], dtype)
        check(kernel, q, k, v, softmax_scale=1.0)
        check(kernel, q, k, v, softmax_scale=-1.0)


@both
@pytest.mark.parametrize("lonely", [True, False])
def test_one_huge_score_in_any_place(kernel: str, lonely: bool, dtype: np.dtype) -> None:
    """For one row of a warp, or for all rows."""
    rows = np.arange(LEN_Q) == 21 if lonely else np.ones(LEN_Q)
    for place in (0, 127, 128, 200, 383, 384, LEN_K - 1):
        keys = np.zeros(LEN_K)
        keys[place] = 500
        check(kernel, *scored(rows, keys, dtype), softmax_scale=1.0)


@both
@pytest.mark.parametrize("share", [1, 8, 32], ids=lambda share: f"one_key_in_{share}")
def test_weights_about_the_limit(kernel: str, share: int, dtype: np.dtype) -> None:
    """Weights of 2^5 to 2^18 against the first block met, of many keys or of a few."""
    some = (np.arange(LEN_K) % share == 0) & (LAST > BLOCKS)
    for power in (5, 8, 9, *np.arange(10, 17, 0.5), 18):
        q, k, v = scored(np.ones(LEN_Q), power * some, dtype, noise=0)
        check(kernel, q, k, v, softmax_scale=LOG_2)


@both
def test_weights_that_grow_from_block_to_block(kernel: str, dtype: np.dtype) -> None:
    """Each block below the limit of its own, all of them above."""
    for power in (2.0, 4.0, 6.0, 7.5):
        keys = power * (LAST - BLOCKS)
        check(kernel, *scored(np.ones(LEN_Q), keys, dtype, noise=0), softmax_scale=LOG_2)


@both
def test_rows_that_first_meet_a_key_in_different_blocks(kernel: str, dtype: np.dtype) -> None:
    for height in (-300, 300):
        q, k, v = scored(np.ones(LEN_Q), height * BLOCKS, dtype)
        check(kernel, q, k, v, softmax_scale=1.0, causal=True)
        check(kernel, q, k[:, :40], v[:, :40], softmax_scale=1.0, causal=True)  # or none


# The ends of the ranges


@pytest.mark.parametrize("scale", [1.0, 2.0, 3.0, -1.0, 1e-36, 1e-37])
def test_scores_near_the_end_of_float32(kernel: str, scale: float) -> None:
    """Of 1e38, and where the scale is 3 beyond the range in base 2."""
    rows = 1e19 * np.resize([1, -1, 0.5, 0.001], LEN_Q)
    keys = 1e19 * np.resize([1, -1, 0.3, -0.7, 0.999], LEN_K)
    check(kernel, *scored(rows, keys, BF16, noise=0), softmax_scale=scale)
    check(kernel, *scored(rows, keys * (BLOCKS % 2), BF16, noise=0), softmax_scale=scale)


@pytest.mark.parametrize("size", [1e-18, 1e-10, 1e10, 1e18])
def test_a_scale_that_undoes_the_size_of_q_and_k(kernel: str, size: float) -> None:
    q, k, v = normal(0, LEN_Q, BF16, size), normal(1, LEN_K, BF16, size), normal(2, LEN_K, BF16)
    check(kernel, q, k, v, softmax_scale=0.125 / size**2)


def test_subnormal_float16(kernel: str) -> None:
    q, k = normal(0, LEN_Q, F16, 2.0**-17), normal(1, LEN_K, F16, 2.0**-17)
    check(kernel, q, k, normal(2, LEN_K, F16), softmax_scale=0.125 * 2.0**34)


def test_the_largest_float16(kernel: str) -> None:
    signs = np.sign(normal(0, LEN_K, F16)) * F16.type(65504)
    v = normal(2, LEN_K, F16)
    check(kernel, signs[:, :LEN_Q], signs, v, softmax_scale=2.0**-34)
    check(kernel, signs[:, :LEN_Q], signs, v, softmax_scale=1.0)
    for power in (0, 8, 12.5, 13.5):
        q, k, _ = scored(np.ones(LEN_Q), power * (LAST > BLOCKS), F16, noise=0)
        out, _ = check(kernel, q, k, np.full_like(v, 65504), softmax_scale=LOG_2)
        assert (out == 65504).all()


@both
@pytest.mark.parametrize("value", [1.0, -3.0, 0.1])
def test_equal_scores_of_a_long_row(kernel: str, value: float, dtype: np.dtype) -> None:
    """The sum of the weights is exact, and so is the mean of equal values."""
    length = 2048 if kernel == EMULATED else 16384
    q, k = normal(0, LEN_Q, dtype, 0), normal(1, length, dtype)
    v = np.full((1, length, 1, DIM), value, dtype)
    out, lse = check(kernel, q, k, v)
    assert (out == dtype.type(value)).all()
    assert (np.abs(lse - np.log(length)) <= 1e-5 * np.log(length)).all()


def test_huge_values_under_weights_about_the_limit(kernel: str) -> None:
    """Sums of unnormalised O reach 2^18 a key block and value."""
    for power in (0, 10, 10.9, 15.9):
        q, k, v = scored(np.ones(LEN_Q), power * (LAST > BLOCKS), BF16, noise=0)
        check(kernel, q, k, v * BF16.type(1e30), softmax_scale=LOG_2)


# What is not finite


@both
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("operand", ["q", "k"])
def test_a_row_that_is_not_finite(kernel: str, operand: str, value: float, dtype: np.dtype) -> None:
    """All of it, and q and k are positive, so that infinite scores have the sign of the value."""
    length = LEN_Q if operand == "q" else LEN_K
    for place in (0, 37, length - 1):
        q, k = np.abs(normal(0, LEN_Q, dtype)), np.abs(normal(1, LEN_K, dtype))
        (q if operand == "q" else k)[0, place] = value
        check(kernel, q, k, normal(2, LEN_K, dtype))
        check(kernel, q, k, normal(2, LEN_K, dtype), causal=True)


@both
@pytest.mark.parametrize("blocks", [[0], [1], [LAST], [2, LAST], [0, 1, 2]], ids=str)
def test_blocks_whose_scores_are_all_minus_infinity(
    kernel: str, blocks: list[int], dtype: np.dtype
) -> None:
    q, k = np.abs(normal(0, LEN_Q, dtype)), np.abs(normal(1, LEN_K, dtype))
    q[0, ::7] = 0
    q[0, ::7, 0, 0] = 1
    k[0, np.isin(BLOCKS, blocks)] = 0
    k[0, np.isin(BLOCKS, blocks), 0, 0] = -np.inf
    check(kernel, q, k, normal(2, LEN_K, dtype))


# Scales


@both
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.125, -2.0, 1e-42, -1e-42, 1e-310, 1e-7])
def test_scales_that_are_not_positive_or_tiny(kernel: str, scale: float, dtype: np.dtype) -> None:
    rows = np.arange(LEN_Q) % 3 - 1
    q, k, v = scored(rows, 100 * (LAST - BLOCKS), dtype)
    check(kernel, q, k, v, softmax_scale=scale)
    check(kernel, q, k, v, softmax_scale=scale, causal=True)
