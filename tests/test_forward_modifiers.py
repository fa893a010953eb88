"""Masks, biases and lengths in use, at the values where other libraries went wrong.

On the host: the kernels of the GPU do not take these options yet (test_gpu_errors.py holds them to
saying so).
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import check, run, same_bits

KERNEL = "cpu"
LOWEST = float(np.finfo(np.float32).min)


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_a_row_of_a_mask_that_is_all_false_is_empty() -> None:
    q, k, v = normal(0, 1, 6, 2, 8), normal(1, 1, 10, 2, 8), normal(2, 1, 10, 2, 8)
    mask = np.tril(np.ones((6, 10), np.bool_))
    mask[5] = False
    out, lse = check(KERNEL, q, k, v, attn_mask=mask, softmax_scale=0.125)
    assert not out[:, 5].any()
    assert np.isneginf(lse[:, :, 5]).all()
    assert np.isfinite(lse[:, :, :5]).all()


def test_a_row_of_a_bias_that_is_all_lowest_is_a_mean() -> None:
    q, k, v = normal(0, 1, 6, 2, 8), normal(1, 1, 10, 2, 8), normal(2, 1, 10, 2, 8)
    bias = np.where(np.tril(np.ones((6, 10), np.bool_)), 0, LOWEST).astype(np.float32)
    bias[5] = LOWEST
    out, _ = check(KERNEL, q, k, v, attn_bias=bias, softmax_scale=0.125)
    uniform, _ = run(KERNEL, q * 0, k, v)
    assert same_bits(out[:, 5], uniform[:, 5])


def test_columns_of_the_lowest_bias_get_no_weight() -> None:
    q, k, v = (normal(seed, 1, 441, 1, 64) for seed in range(3))
    bias = np.zeros((441, 441), np.float32)
    bias[:, :128] = LOWEST
    out, lse = check(KERNEL, q, k, v, attn_bias=bias)
    k[:, :128], v[:, :128] = 5, 1e30
    again, lse_again = run(KERNEL, q, k, v, attn_bias=bias)
    assert same_bits(again, out)
    assert same_bits(lse_again, lse)


def test_a_bias_of_any_magnitude_is_added_in_float32() -> None:
    q, k, v = (normal(seed, 1, 8, 1, 16, dtype=ml_dtypes.bfloat16) for seed in range(3))
    rng = np.random.default_rng(3)
    bias = rng.choice([0, -1e4, -3e38], (8, 8)).astype(ml_dtypes.bfloat16)
    out, lse = check(KERNEL, q, k, v, attn_bias=bias)
    wide = run(KERNEL, q, k, v, attn_bias=bias.astype(np.float32))
    assert same_bits(out, wide[0])
    assert same_bits(lse, wide[1])


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_masked_key_never_matters(poison: float) -> None:
    x = np.arange(8, dtype=np.float32).reshape(1, 2, 1, 4)
    mask = np.array([[True, False], [True, False]])
    k = x.copy()
    k[0, 1, 0, 0] = poison
    out, _ = run(KERNEL, x, k, x, attn_mask=mask)
    assert (out[0, :, 0] == [0, 1, 2, 3]).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_lies_beyond_the_length_in_use_never_matters(poison: float) -> None:
    q, k, v = normal(0, 3, 5, 2, 8), normal(1, 3, 5, 2, 8), normal(2, 3, 5, 2, 8)
    lengths = np.array([3, 0, 5])
    out, lse = check(KERNEL, q, k, v, seqused_k=lengths)
    assert not out[1].any()
    assert np.isneginf(lse[1]).all()
    for batch, length in enumerate(lengths):
        k[batch, length:] = v[batch, length:] = poison
    again, lse_again = run(KERNEL, q, k, v, seqused_k=lengths)
    assert same_bits(again, out)
    assert same_bits(lse_again, lse)


def test_a_mask_of_all_true_is_no_mask() -> None:
    q, k, v = normal(0, 1, 1, 16, 128), normal(1, 1, 16, 16, 128), normal(2, 1, 16, 16, 128)
    out, lse = run(KERNEL, q, k, v, attn_mask=np.ones((1, 1, 1, 16), np.bool_))
    expected = run(KERNEL, q, k, v)
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])


@pytest.mark.parametrize(
    "shape", [(5,), (4, 5), (1, 1, 5), (1, 1, 1, 5), (2, 1, 1, 5), (2, 3, 4, 5)]
)
def test_masks_broadcast_as_in_numpy(shape: tuple[int, ...]) -> None:
    q, k, v = normal(0, 2, 4, 3, 8), normal(1, 2, 5, 3, 8), normal(2, 2, 5, 3, 8)
    mask = np.random.default_rng(4).random(shape) < 0.6
    out, lse = check(KERNEL, q, k, v, attn_mask=mask)
    whole = np.broadcast_to(mask, (2, 3, 4, 5)).copy()
    expected = run(KERNEL, q, k, v, attn_mask=whole)
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])


def test_a_bias_and_a_causal_mask_act_together() -> None:
    q, k, v = (normal(seed, 2, 8, 4, 16) for seed in range(3))
    out, _ = run(KERNEL, q, k, v, attn_bias=np.zeros((8, 8), np.float32), causal=True)
    expected, _ = run(KERNEL, q, k, v, causal=True)
    assert same_bits(out, expected)
