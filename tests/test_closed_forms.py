"""The oracle on problems with a known answer: worked examples, and inputs that broke others."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyflash import reference

INF, NAN = math.inf, math.nan
ROUNDING = {"rtol": 1e-12, "atol": 1e-12}  # of fp64


def same(actual: Any, expected: Any, **tolerance: float) -> None:
    np.testing.assert_allclose(actual, expected, **(ROUNDING | tolerance))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def of_scores(*scores: float, **options: Any) -> tuple[np.ndarray, float]:
    """Return the weights and the LSE of one query whose scores these are."""
    k, v = np.reshape(np.float64(scores), (1, -1, 1, 1)), np.eye(len(scores))[None, :, None]
    out, lse = reference.attention(np.ones((1, 1, 1, 1)), k, v, **options)
    return out[0, 0, 0], lse[0, 0, 0]


def constant(value: float, *shape: int) -> np.ndarray:
    return np.full(shape, float(value))


# The softmax


def test_worked_example_in_two_blocks() -> None:
    weights, lse = of_scores(2, 1, 3, 0)
    assert [f"{weight:.4f}" for weight in weights] == ["0.2369", "0.0871", "0.6439", "0.0321"]
    assert f"{math.exp(lse - 3):.4f}" == "1.5530"
    first, lse_first = of_scores(2, 1)
    second, lse_second = of_scores(3, 0)
    same(np.logaddexp(lse_first, lse_second), lse)
    share = math.exp(lse_first - lse), math.exp(lse_second - lse)
    same(np.concatenate([share[0] * first, share[1] * second]), weights)


def test_four_rows_of_four_columns() -> None:
    x = np.repeat([0.1, 0.1, 0.3, 0.1], 4).reshape(1, 4, 1, 4)
    out, _ = reference.attention(x, x, x)
    expected = np.repeat([0.151515, 0.151515, 0.154633, 0.151515], 4).reshape(out.shape)
    assert (np.round(out, 6) == expected).all()


def test_head_dim_zero_averages() -> None:
    q, k, v = np.zeros((1, 2, 1, 0)), np.zeros((1, 4, 1, 0)), np.arange(4.0).reshape(1, 4, 1, 1)
    for scale in (None, 3.0):
        out, lse = reference.attention(q, k, v, softmax_scale=scale)
        assert (out == 1.5).all()
        same(lse, math.log(4))


def test_lse_is_a_natural_logarithm() -> None:
    zeros = np.zeros((1, 256, 1, 8))
    same(reference.attention(zeros[:, :1], zeros, zeros)[1], 5.545177444479562)


def test_scale_of_zero_and_below() -> None:
    q, k, v = normal(1, 1, 4, 1, 8), normal(2, 1, 4, 1, 8), normal(3, 1, 4, 1, 8)
    out, lse = reference.attention(q, k, v, causal=True, softmax_scale=0.0)
    for i in range(4):
        same(out[0, i], v[0, : i + 1].mean(axis=0))
        same(lse[0, 0, i], math.log(i + 1))
    negative = reference.attention(q, k, v, causal=True, softmax_scale=-0.125)
    same(negative[0], reference.attention(-q, k, v, causal=True, softmax_scale=0.125)[0])


@pytest.mark.parametrize("scale", [2, 2.0, np.float64(2), np.float32(2), np.array(2.0)])
def test_scale_of_any_scalar_type(scale: Any) -> None:
    weights, _ = of_scores(0.5, 1, softmax_scale=scale)
    assert (weights == of_scores(1, 2)[0]).all()


def test_scores_far_below_zero_keep_their_weights() -> None:
    q, k, v = constant(1, 1, 88, 1, 64), constant(-1, 1, 448, 1, 64), normal(3, 1, 448, 1, 3)
    out, lse = reference.attention(q, k, v, causal=True, softmax_scale=300 / 64)
    for i in (0, 1, 87):
        same(out[0, i, 0], v[0, : i + 361, 0].mean(axis=0))
        same(lse[0, 0, i], -300 + math.log(i + 361))


@pytest.mark.parametrize("len_k", [1, 2, 1000])
def test_scores_below_any_finite_sentinel(len_k: int) -> None:
    q, k, v = (
        constant(64, 1, 1, 1, 128),
        constant(-64, 1, len_k, 1, 128),
        constant(1, 1, len_k, 1, 128),
    )
    out, lse = reference.attention(q, k, v)
    same(out, 1.0)
    same(lse, -524288 / math.sqrt(128) + math.log(len_k))


@pytest.mark.parametrize("len_k", [1, 2, 65])
def test_huge_inputs(len_k: int) -> None:
    x = constant(133120.0, 1, len_k, 1, 64).astype(ml_dtypes.bfloat16)
    out, lse = reference.attention(x[:, :1], x, x)
    same(out, 133120.0)
    same(lse, 133120.0**2 * 8 + math.log(len_k))


def test_only_the_last_column_informs() -> None:
    q, k = np.zeros((1, 8, 1, 200)), np.zeros((1, 8, 1, 200))
    q[0, :, 0, -1], k[0, :, 0, -1] = 100, np.arange(8)
    out, _ = reference.attention(q, k, np.eye(8)[None, :, None], softmax_scale=1.0)
    assert (out[0, :, 0].argmax(axis=1) == 7).all()
    same(out[0, :, 0, 7], 1.0)


# Band


def weights_of_band(len_q: int, len_k: int, **options: Any) -> np.ndarray:
    """Return the (len_q, len_k) weights of equal scores: the band, rows divided by their count."""
    q, k = np.zeros((1, len_q, 1, 2)), np.zeros((1, len_k, 1, 2))
    return reference.attention(q, k, np.eye(len_k)[None, :, None], **options)[0][0, :, 0]


def keys_seen(len_q: int, len_k: int, **options: Any) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in weights_of_band(len_q, len_k, **options)]


@pytest.mark.parametrize(
    ("lengths", "options", "expected"),
    [
        ((2, 4), {"causal": True}, [[0, 1, 2], [0, 1, 2, 3]]),
        ((2, 4), {"causal": True, "alignment": "top_left"}, [[0], [0, 1]]),
        ((4, 2), {"causal": True}, [[], [], [0], [0, 1]]),
        ((4, 2), {"causal": True, "alignment": "top_left"}, [[0], [0, 1], [0, 1], [0, 1]]),
        ((4, 12), {"window_size": (7, 0)}, [[*range(i, i + 8)] for i in range(1, 5)]),
        ((4, 4), {"window_size": (0, 0)}, [[0], [1], [2], [3]]),
        ((10, 4), {"window_size": (-1, 100)}, [[0, 1, 2, 3]] * 10),
        ((3, 3), {"window_size": (1, 5), "causal": True}, [[0], [0, 1], [1, 2]]),
        ((3, 3), {"window_size": (None, 1)}, [[0, 1], [0, 1, 2], [0, 1, 2]]),
        ((3, 5), {"window_size": (0, 1), "alignment": "top_left"}, [[0, 1], [1, 2], [2, 3]]),
        ((2, 3), {"window_size": (2**63, 10**30)}, [[0, 1, 2]] * 2),
    ],
)
def test_keys_of_a_band(lengths: Any, options: Any, expected: list[list[int]]) -> None:
    assert keys_seen(*lengths, **options) == expected


def test_rows_before_a_two_sided_window_see_nothing() -> None:
    zeros = np.zeros((1, 129, 1, 4))
    out, lse = reference.attention(zeros, zeros[:, :32], zeros[:, :32] + 1, window_size=(32, 64))
    empty = np.arange(129) + 32 - 129 + 64 < 0
    same(out[0, :, 0, 0], np.where(empty, 0, 1))
    assert ((lse[0, 0] == -INF) == empty).all()


def test_a_left_window_does_not_leak_the_future() -> None:
    v = np.where(np.arange(16) <= 8, 0.0, 1e4).reshape(1, 16, 1, 1)
    zeros = np.zeros_like(v)
    out, _ = reference.attention(zeros, zeros, v, window_size=(4, 0))
    assert not out[0, :9].any()
    assert out[0, 9:].all()


def test_mask_bias_and_causal_intersect() -> None:
    q, k, v = normal(1, 2, 8, 4, 16), normal(2, 2, 8, 4, 16), normal(3, 2, 8, 4, 16)
    causal = reference.attention(q, k, v, causal=True)
    for name, value in (("attn_bias", np.zeros((8, 8))), ("attn_mask", np.ones((8, 8), bool))):
        both = reference.attention(q, k, v, causal=True, **{name: value})
        assert (both[0] == causal[0]).all()
        assert (both[1] == causal[1]).all()


# Softcap, bias, ALiBi, sink, descales


def test_softcap_comes_before_bias() -> None:
    weights, _ = of_scores(0, 0, 0, 0, softcap=1.0, attn_bias=np.array([0, 0, 10.0, 0]))
    e = math.exp(10)
    same(weights, np.array([1, 1, e, 1]) / (e + 3))


def test_alibi_runs_from_the_diagonal() -> None:
    q, k, v = (
        np.zeros((1, 1, 4, 16)),
        np.zeros((1, 5, 4, 16)),
        np.eye(5)[None, :, None].repeat(4, 2),
    )
    slopes = 0.5 ** np.arange(1, 5)
    out, _ = reference.attention(q, k, v, alibi_slopes=slopes)
    expected = np.exp(-slopes[:, None] * np.array([4, 3, 2, 1, 0]))
    same(out[0, 0], expected / expected.sum(axis=1, keepdims=True))


def test_a_finite_bias_does_not_mask_and_an_infinite_one_does() -> None:
    lowest = float(np.finfo(np.float32).min)
    assert (of_scores(0, 0, attn_bias=np.full(2, lowest))[0] == 0.5).all()
    weights, lse = of_scores(1, 2, attn_bias=np.full(2, -INF))
    assert not weights.any()
    assert lse == -INF
    q, k, v = normal(1, 1, 9, 1, 8), normal(2, 1, 9, 1, 8), normal(3, 1, 9, 1, 8)
    bias = np.where(np.arange(9) < 4, lowest, 0)
    same(
        reference.attention(q, k, v, attn_bias=bias)[0],
        reference.attention(q, k[:, 4:], v[:, 4:])[0],
    )


def test_a_sink_takes_weight_and_gives_nothing() -> None:
    weights, lse = of_scores(0, 0, learnable_sink=np.array([math.log(2)]))
    same(weights, [0.25, 0.25])
    same(lse, math.log(4))
    weights, lse = of_scores(0, 0, learnable_sink=np.array([-INF]))
    same(lse, math.log(2))
    weights, lse = of_scores(0, learnable_sink=np.array([-3.0]), attn_mask=np.array([False]))
    assert weights == 0
    assert lse == -3


def test_descales_multiply() -> None:
    fp8 = ml_dtypes.float8_e4m3fn
    q, k, v = (normal(n, 2, 3, 2, 4).astype(fp8) for n in range(3))
    scales = [np.array([[0.5, 2.0], [3.0, 0.25]]), np.array([[4.0], [0.5]]), np.float32(4)]
    out, lse = reference.attention(
        q, k, v, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2]
    )
    by_head = (np.broadcast_to(scale, (2, 2))[:, None, :, None] for scale in scales)
    wide = [x.astype(float) * scale for x, scale in zip((q, k, v), by_head, strict=True)]
    expected = reference.attention(*wide)
    same(out, expected[0])
    same(lse, expected[1])


# Values that must not matter, and values that must


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("hide", ["attn_mask", "seqused_k", "attn_bias"])
def test_a_hidden_row_is_never_read(hide: str, poison: float) -> None:
    x = np.arange(8.0).reshape(1, 2, 1, 4)
    options = {"attn_mask": np.array([True, False]), "seqused_k": [1]}
    option = {hide: options.get(hide, np.array([0, -INF]))}
    k, v = x.copy(), x.copy()
    v[0, 1, 0, 1] = poison
    if hide != "attn_bias":  # a bias is added: a score of nan stays nan
        k[0, 1, 0, 0] = poison
    out, lse = reference.attention(x, k, v, **option)
    assert (out == [0, 1, 2, 3]).all()
    assert np.isfinite(lse).all()
    grads = reference.attention_backward(out, x, k, v, **option)
    assert all(np.isfinite(grad).all() for grad in grads[:3])
    assert not grads.dk[0, 1].any()
    assert not grads.dv[0, 1].any()


def test_a_visible_row_of_v_is_read() -> None:
    v = np.array([1.0, NAN, INF, 2.0]).reshape(1, 4, 1, 1).repeat(2, 3)
    v[..., 1] = 1
    zeros = np.zeros((1, 4, 1, 1))
    out, _ = reference.attention(zeros, zeros, v, causal=True)
    np.testing.assert_array_equal(out[0, :, 0, 0], [1, NAN, NAN, NAN])
    assert (out[0, :, 0, 1] == 1).all()
    out, _ = reference.attention(zeros, zeros, v[:, [0, 2, 2, 0]], causal=True)
    np.testing.assert_array_equal(out[0, :, 0, 0], [1, INF, INF, INF])


def test_nan_in_q_stays_in_its_row() -> None:
    q, k, v = normal(1, 2, 16, 4, 8), normal(2, 2, 16, 4, 8), normal(3, 2, 16, 4, 8)
    clean = reference.attention(q, k, v, causal=True, learnable_sink=np.zeros(4))
    q[1, 2, 3, 5] = NAN
    out, lse = reference.attention(q, k, v, causal=True, learnable_sink=np.zeros(4))
    assert np.isnan(out[1, 2, 3]).all()
    assert np.isnan(lse[1, 3, 2])
    out[1, 2, 3], lse[1, 3, 2] = clean[0][1, 2, 3], clean[1][1, 3, 2]
    assert (out == clean[0]).all()
    assert (lse == clean[1]).all()
    empty = reference.attention(q, k, v, attn_mask=np.zeros(16, bool))
    assert not empty[0].any()


def test_rows_that_see_nothing() -> None:
    q, k, v = normal(1, 1, 6, 2, 8), normal(2, 1, 10, 2, 8), normal(3, 1, 10, 2, 8)
    mask = np.tril(np.ones((6, 10), bool))
    mask[5] = False
    out, lse = reference.attention(q, k, v, softmax_scale=0.125, attn_mask=mask)
    assert not out[0, 5].any()
    assert (lse[0, :, 5] == -INF).all()
    assert np.isfinite(lse[0, :, :5]).all()
    grads = reference.attention_backward(np.ones_like(out), q, k, v, attn_mask=mask)
    assert not grads.dq[0, 5].any()
    assert all(np.isfinite(grad).all() for grad in grads[:3])
