"""Forward kernels at values with a known answer: magnitudes, scales, head dims, NaN."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import KERNELS, WARP_ROWS, check, judge, run, same_bits

pytestmark = pytest.mark.parametrize("kernel", KERNELS)
BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)


def constant(shape: tuple[int, ...], value: float, dtype: Any) -> np.ndarray:
    return np.full(shape, value, dtype)


def normal(seed: int, *shape: int, dtype: Any = F16) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# Magnitudes


@pytest.mark.parametrize("len_k", [1, 2, 65])
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
def test_huge_equal_values_give_themselves(kernel: str, dtype: np.dtype, len_k: int) -> None:
    q = constant((1, 1, 1, 64), 133120.0, dtype)
    kv = constant((1, len_k, 1, 64), 133120.0, dtype)
    out, _ = check(kernel, q, kv, kv)
    assert (out == dtype.type(133120.0)).all()


def test_a_dot_product_beyond_float16_is_kept(kernel: str) -> None:
    q = constant((1, 1, 1, 64), 350, F16)
    k = constant((1, 3, 1, 64), 350, F16)
    v = np.repeat(np.array([1, 2, 4], F16), 8).reshape(1, 3, 1, 8)
    out, _ = check(kernel, q, k, v)
    assert (out == F16.type(7 / 3)).all()


def test_a_sum_beyond_float16_is_kept(kernel: str) -> None:
    q = constant((1, 5, 1, 64), 0, F16)
    k = normal(1, 1, 1024, 1, 64)
    v = constant((1, 1024, 1, 64), 60000, F16)
    out, _ = check(kernel, q, k, v)
    assert (out == 60000).all()


@pytest.mark.parametrize("len_k", [1, 2, 1000])
def test_scores_far_below_any_sentinel_are_kept(kernel: str, len_k: int) -> None:
    q = constant((1, 3, 1, 128), 64, BF16)
    k = constant((1, len_k, 1, 128), -64, BF16)
    v = constant((1, len_k, 1, 128), 1, BF16)
    out, lse = check(kernel, q, k, v)
    assert (out == 1).all()
    assert (lse < -46000).all()


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window_size": (100, 30)}, {"causal": True, "alignment": "top_left"}],
    ids=str,
)
def test_very_negative_scores_behind_masked_tiles(kernel: str, options: dict[str, Any]) -> None:
    q = constant((1, 88, 14, 64), 6.125, BF16)
    k = constant((1, 448, 2, 64), -6.125, BF16)
    v = normal(2, 1, 448, 2, 64, dtype=BF16)
    out, lse = check(kernel, q, k, v, **options)
    assert np.isfinite(out.astype(np.float32)).all()
    assert (lse < -290).all()


@pytest.mark.parametrize(("len_q", "len_k"), [(64, 64), (704, 704), (1, 128)])
def test_uniform_negative_scores(kernel: str, len_q: int, len_k: int) -> None:
    q = constant((1, len_q, 2, 64), 4, BF16)
    k = constant((1, len_k, 2, 64), -4, BF16)
    check(kernel, q, k, normal(3, 1, len_k, 2, 64, dtype=BF16))


def test_one_dominant_key_wins_wherever_it_lies(kernel: str) -> None:
    q = constant((1, 3, 1, 64), 8, F16)
    v = normal(4, 1, 300, 1, 64)
    for place in (0, 1, 63, 64, 127, 128, 299):
        k = constant((1, 300, 1, 64), -8, F16)
        k[:, place] = 8
        out, _ = run(kernel, q, k, v)
        assert same_bits(out, np.repeat(v[:, place : place + 1], 3, axis=1)), place


# Scales


@pytest.mark.parametrize("scale", [2, 2.0, np.float64(2), np.float32(2), np.array(2.0)], ids=repr)
def test_any_real_scalar_is_a_scale(kernel: str, scale: Any) -> None:
    q, k, v = (normal(seed, 1, 20, 2, 64) for seed in range(3))
    out, lse = run(kernel, q, k, v, softmax_scale=scale)
    expected = run(kernel, q, k, v, softmax_scale=2.0)
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])


def test_a_scale_of_zero_gives_means(kernel: str) -> None:
    q, k, v = (normal(seed, 1, 4, 1, 64) for seed in range(3))
    _, lse = check(kernel, q, k, v, softmax_scale=0.0, causal=True)
    assert lse[0, 0, 0] == 0


@pytest.mark.parametrize("dim", [1, 3, 40, 56, 72, 80, 100, 160, 192])
def test_the_default_scale_comes_from_the_true_head_dim(kernel: str, dim: int) -> None:
    q, k, v = (normal(seed, 1, 33, 1, dim) for seed in range(3))
    out, lse = run(kernel, q, k, v)
    explicit = run(kernel, q, k, v, softmax_scale=dim**-0.5)
    assert same_bits(out, explicit[0])
    assert same_bits(lse, explicit[1])
    judge((out, lse), q, k, v, softmax_scale=1 / np.sqrt(dim))


# Head dims


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 7, 9, 16, 33, 64, 72, 100, 128, 160, 192, 255, 256])
def test_the_last_column_alone_decides(kernel: str, dim: int) -> None:
    q = np.zeros((1, 4, 1, dim), F16)
    k = np.zeros((1, 70, 1, dim), F16)
    q[..., -1] = 16
    k[0, :, 0, -1] = -16
    k[0, 65, 0, -1] = 16
    v = normal(5, 1, 70, 1, dim)
    out, _ = check(kernel, q, k, v, softmax_scale=1.0)
    assert same_bits(out, np.repeat(v[:, 65:66], 4, axis=1))


def test_four_keys_by_hand(kernel: str) -> None:
    x = np.repeat(np.array([0.1, 0.1, 0.3, 0.1], np.float32), 4).reshape(1, 4, 1, 4)
    out, _ = check(kernel, x, x, x)
    by_hand = np.array([0.151515, 0.151515, 0.154633, 0.151515])
    assert (np.round(out[0, :, 0].astype(np.float64), 6) == by_hand[:, None]).all()


@pytest.mark.parametrize("dtype", [F16, np.dtype(np.float32)], ids=str)
def test_no_column_means_a_uniform_mean(kernel: str, dtype: np.dtype) -> None:
    empty = np.zeros((1, 4, 1, 0), dtype)
    v = np.arange(4, dtype=dtype).reshape(1, 4, 1, 1)
    out, lse = check(kernel, empty, empty, v)
    assert (out == 1.5).all()
    assert (np.abs(lse - np.log(4)) < 1e-5).all()


# NaN. A warp of Hopper's kernel chooses between two sums for its 16 rows at once, so that a row may
# decide on the last bits of its neighbours.


def test_a_masked_key_never_matters(kernel: str) -> None:
    q, k, v = (normal(seed, 2, 200, 2, 64) for seed in range(3))
    clean = run(kernel, q, k, v, causal=True)
    alone = [x[:, :70] for x in (q, k, v)]
    alike = 70 if kernel == "cpu" else 70 // WARP_ROWS * WARP_ROWS
    for value in (np.nan, np.inf, -np.inf, 60000):
        k[:, 70:] = value
        out, lse = run(kernel, q, k, v, causal=True)
        judge((out[:, :70], lse[:, :, :70]), *alone, causal=True)
        assert same_bits(out[:, :alike], clean[0][:, :alike])
        assert same_bits(lse[:, :, :alike], clean[1][:, :, :alike])


def test_a_key_left_of_the_window_never_matters(kernel: str) -> None:
    q, k, v = (normal(seed, 1, 200, 1, 64) for seed in range(3))
    clean = run(kernel, q, k, v, window_size=(20, 0))
    k[:, 90] = np.nan
    out, lse = run(kernel, q, k, v, window_size=(20, 0))
    hit = np.zeros(200, bool)
    hit[90:111] = True
    assert np.isnan(out[0, hit]).all()
    assert np.isnan(lse[0, 0, hit]).all()
    judge((out, lse), q, k, v, window_size=(20, 0))
    if kernel != "cpu":
        hit[90 // WARP_ROWS * WARP_ROWS : 110 // WARP_ROWS * WARP_ROWS + WARP_ROWS] = True
    assert same_bits(out[0, ~hit], clean[0][0, ~hit])
    assert same_bits(lse[0, 0, ~hit], clean[1][0, 0, ~hit])


@pytest.mark.parametrize("dtype", [F16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("rows", [[2], [0, 15], list(range(16))], ids=str)
def test_nan_in_a_query_stays_in_its_row(kernel: str, rows: list[int], dtype: np.dtype) -> None:
    q, k, v = (normal(seed, 2, 64, 4, 8, dtype=dtype) for seed in range(3))
    clean = run(kernel, q, k, v)
    q[:, rows] = np.nan
    out, lse = run(kernel, q, k, v)
    others = np.setdiff1d(np.arange(64), rows) if kernel == "cpu" else np.arange(WARP_ROWS, 64)
    assert np.isnan(out[:, rows]).all()
    assert np.isnan(lse[:, :, rows]).all()
    judge((out, lse), q, k, v)
    assert same_bits(out[:, others], clean[0][:, others])
    assert same_bits(lse[:, :, others], clean[1][:, :, others])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it(kernel: str, value: float) -> None:
    q, k, v = (normal(seed, 1, 300, 1, 64) for seed in range(3))
    v[0, 0, 0, 5] = value
    out, lse = run(kernel, q * 0, k, v)  # uniform weights, so that no weight is 0
    assert np.isfinite(lse).all()
    column = out[0, :, 0, 5].astype(np.float64)
    assert (np.isnan(column) if np.isnan(value) else column == value).all()
    assert np.isfinite(np.delete(out, 5, axis=3)).all()
