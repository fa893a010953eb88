"""Modifiers of the scores, masks and lengths in use, alone, together, and at values that hurt."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import MODIFIED, Modified
from harness import KERNELS, WARP_ROWS, Result, check, judge, run, same_bits

from cupyflash import dropout_mask, reference
from cupyflash.masks import Band, PrefixLM, Segments

pytestmark = pytest.mark.parametrize("kernel", KERNELS)
LOWEST = float(np.finfo(np.float32).min)


def normal(seed: int, *shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def inputs(len_q: int, len_k: int, *, batch: int = 1, heads: int = 2, dim: int = 64) -> Any:
    """Draw q, k and v."""
    q = normal(0, batch, len_q, heads, dim)
    return q, normal(1, batch, len_k, heads, dim), normal(2, batch, len_k, heads, dim)


def assert_like(kernel: str, result: Result, *arrays: np.ndarray, **options: Any) -> None:
    """Assert that a result is what other options ask for too: on the CPU to the last bit.

    A GPU's kernels have tiles of their own for some modifiers, and so other sums.
    """
    judge(result, *arrays, **options)
    if kernel == "cpu":
        for x, expected in zip(result, run(kernel, *arrays, **options), strict=True):
            np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("case", MODIFIED, ids=lambda case: case.id)
def test_case(kernel: str, case: Modified) -> None:
    check(kernel, *case.arrays(), **case.options)


@pytest.mark.parametrize("case", MODIFIED[::9], ids=lambda case: case.id)
def test_repeated_calls_give_the_same_bits(kernel: str, case: Modified) -> None:
    first = run(kernel, *case.arrays(), **case.options)
    for _ in range(3):
        again = run(kernel, *case.arrays(), **case.options)
        assert all(map(same_bits, again, first))


# What hides a key and what does not


def test_a_row_of_a_mask_that_is_all_false_is_empty(kernel: str) -> None:
    mask = np.tril(np.ones((6, 10), np.bool_))
    mask[5] = False
    out, lse = check(kernel, *inputs(6, 10), attn_mask=mask, softmax_scale=0.125)
    assert not out[:, 5].any()
    assert np.isneginf(lse[:, :, 5]).all()
    assert np.isfinite(lse[:, :, :5]).all()


def test_a_row_of_a_bias_that_is_all_lowest_is_a_mean(kernel: str) -> None:
    q, k, v = inputs(6, 10)
    bias = np.where(np.tril(np.ones((6, 10), np.bool_)), 0, LOWEST).astype(np.float32)
    bias[5] = LOWEST
    out, _ = check(kernel, q, k, v, attn_bias=bias, softmax_scale=0.125)
    uniform, _ = run(kernel, q * 0, k, v, attn_bias=bias * 0)
    assert same_bits(out[:, 5], uniform[:, 5])


def test_columns_of_the_lowest_bias_get_no_weight(kernel: str) -> None:
    q, k, v = inputs(441, 441, heads=1)
    bias = np.zeros((441, 441), np.float32)
    bias[:, :128] = LOWEST
    out, lse = check(kernel, q, k, v, attn_bias=bias)
    k[:, :128], v[:, :128] = 5, 1e4
    again, lse_again = run(kernel, q, k, v, attn_bias=bias)
    assert same_bits(again, out)
    assert same_bits(lse_again, lse)


def test_a_bias_of_any_magnitude_is_added_in_float32(kernel: str) -> None:
    q, k, v = (normal(seed, 1, 8, 1, 16, dtype=ml_dtypes.bfloat16) for seed in range(3))
    rng = np.random.default_rng(3)
    bias = rng.choice([0, -1e4, -3e38], (8, 8)).astype(ml_dtypes.bfloat16)
    for wider in (np.float32, np.float64):
        wide = run(kernel, q, k, v, attn_bias=bias.astype(wider))
        assert_like(kernel, wide, q, k, v, attn_bias=bias)


def test_a_bias_of_minus_infinity_hides_as_a_mask_does(kernel: str) -> None:
    arrays = inputs(70, 130)
    mask = np.random.default_rng(5).random((70, 130)) < 0.5
    mask[9] = False
    bias = np.where(mask, 0, -np.inf).astype(np.float16)
    result = check(kernel, *arrays, attn_bias=bias)
    assert not result[0][:, 9].any()
    assert_like(kernel, result, *arrays, attn_bias=np.zeros_like(bias), attn_mask=mask)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("hidden_by", ["attn_mask", "segments", "prefix"])
def test_a_masked_key_never_matters(kernel: str, hidden_by: str, poison: float) -> None:
    x = np.zeros((1, 2, 1, 16), np.float16)
    x[0, :, 0, :4] = np.arange(8).reshape(2, 4)
    options: dict[str, Any] = {
        "attn_mask": {"attn_mask": np.array([[True, False], [True, False]])},
        "segments": {"mask": Segments(np.int32([[7, 7]]), np.int32([[7, 8]]))},
        "prefix": {"mask": PrefixLM(1) & Band(right=-1)},
    }[hidden_by]
    k = x.copy()
    k[0, 1, 0, 0] = poison
    out, _ = run(kernel, x, k, x, **options)
    sees = [1] if hidden_by == "prefix" else [0, 1]
    assert (out[0, sees, 0] == x[0, 0, 0]).all()
    assert not out[0, [i for i in (0, 1) if i not in sees]].any()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_lies_beyond_the_length_in_use_never_matters(kernel: str, poison: float) -> None:
    q, k, v = inputs(5, 100, batch=3)
    lengths = np.array([66, 0, 100])
    out, lse = check(kernel, q, k, v, seqused_k=lengths)
    assert not out[1].any()
    assert np.isneginf(lse[1]).all()
    for batch, length in enumerate(lengths):
        k[batch, length:] = v[batch, length:] = poison
    again, lse_again = run(kernel, q, k, v, seqused_k=lengths)
    assert same_bits(again, out)
    assert same_bits(lse_again, lse)


def test_a_mask_of_all_true_is_no_mask(kernel: str) -> None:
    arrays = (normal(0, 1, 1, 16, 128), normal(1, 1, 16, 16, 128), normal(2, 1, 16, 16, 128))
    result = run(kernel, *arrays, attn_mask=np.ones((1, 1, 1, 16), np.bool_))
    assert_like(kernel, result, *arrays)


@pytest.mark.parametrize(
    "shape", [(5,), (4, 5), (1, 1, 5), (1, 1, 1, 5), (2, 1, 1, 5), (2, 3, 4, 5)]
)
def test_masks_and_biases_broadcast_as_in_numpy(kernel: str, shape: tuple[int, ...]) -> None:
    arrays = inputs(4, 5, batch=2, heads=3)
    for name, x in (
        ("attn_mask", np.random.default_rng(4).random(shape) < 0.6),
        ("attn_bias", normal(5, *shape, dtype=np.float32)),
    ):
        out, lse = check(kernel, *arrays, **{name: x})
        expected = run(kernel, *arrays, **{name: np.broadcast_to(x, (2, 3, 4, 5)).copy()})
        assert same_bits(out, expected[0])
        assert same_bits(lse, expected[1])


def test_a_bias_and_a_causal_mask_act_together(kernel: str) -> None:
    arrays = inputs(8, 8, batch=2, heads=4)
    result = run(kernel, *arrays, attn_bias=np.zeros((8, 8), np.float32), causal=True)
    assert_like(kernel, result, *arrays, causal=True)


def test_masks_intersect_however_they_are_given(kernel: str) -> None:
    arrays = inputs(70, 90, batch=2)
    ids = np.sort(np.random.default_rng(6).integers(0, 3, (2, 90)))
    segments = Segments(ids[:, :70], ids)
    ways: list[dict[str, Any]] = [
        {"causal": True, "mask": segments},
        {"mask": Band(right=0) & segments},
        {"mask": segments & Band(None, 0)},
        {"causal": True, "segment_ids": (ids[:, :70], ids)},
        {"mask": Band(right=0), "segment_ids": (ids[:, :70], ids)},
    ]
    dense = (ids[:, :70, None] == ids[:, None]) & Band(right=0).dense(70, 90)
    for options in ways:
        assert_like(kernel, run(kernel, *arrays, **options), *arrays, attn_mask=dense[:, None])


def test_one_array_of_segments_serves_queries_and_keys(kernel: str) -> None:
    arrays = inputs(140, 140, batch=2)
    ids = np.sort(np.random.default_rng(7).integers(0, 5, (2, 140)).astype(np.int32))
    out, lse = run(kernel, *arrays, segment_ids=ids)
    expected = check(kernel, *arrays, mask=Segments(ids))
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])
    b, first = 1, int((ids[1] < 2).sum())
    length = int((ids[1] == 2).sum())
    part = tuple(x[b : b + 1, first : first + length] for x in arrays)
    alone, _ = reference.attention(*part)
    np.testing.assert_allclose(out[b, first : first + length], alone[0], atol=3e-3)


@pytest.mark.parametrize("prefix", [-3, 0, 1, 63, 64, 65, 130, 10**9])
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
def test_a_prefix_of_any_length(kernel: str, prefix: int, alignment: str) -> None:
    check(kernel, *inputs(97, 130), mask=PrefixLM(prefix, alignment))


def test_a_prefix_of_everything_is_no_mask_and_one_of_nothing_is_causal(kernel: str) -> None:
    arrays = inputs(70, 90, batch=2)
    out, lse = run(kernel, *arrays, mask=PrefixLM(np.array([90, 0])))
    for b, options in ((slice(0, 1), {}), (slice(1, 2), {"causal": True})):
        assert_like(kernel, (out[b], lse[b]), *(x[b] for x in arrays), **options)


# Order and values of the modifiers


def test_softcap_comes_before_the_bias(kernel: str) -> None:
    zeros, bias = np.zeros((1, 4, 1, 16), np.float16), np.float32([0, 0, 10, 0])
    v = np.eye(4, 16, dtype=np.float16)[None, :, None]
    out, _ = check(kernel, zeros, zeros, v, softcap=1.0, attn_bias=bias)
    assert (out[0, :, 0, 2] > 0.999).all(), "e^10 / (e^10 + 3), and not e / (e + 3)"


@pytest.mark.parametrize("cap", [1e-3, 0.5, 30.0, 1e4])
def test_scores_far_beyond_and_far_below_the_cap(kernel: str, cap: float) -> None:
    q, k, v = inputs(70, 90)
    check(kernel, q * 4, k * 4, v, softcap=cap)


@pytest.mark.parametrize("first", [0, 130, 290])
def test_scores_beside_the_cap_in_some_keys_alone(kernel: str, first: int) -> None:
    """Some blocks of keys are near zero against the cap, one is far beyond it."""
    q, k, v = inputs(150, 320)
    k[:, first : first + 9] *= 40
    check(kernel, q, k, v, softcap=30.0)


@pytest.mark.parametrize("offset", [0, 1])
def test_a_bias_that_hides_and_lifts_keys_of_later_blocks(kernel: str, offset: int) -> None:
    """Of pairs that lie as words of 32 bits do, and not; -inf, the least and large numbers."""
    q, k, v = inputs(150, 320)
    storage = np.zeros((150, 322), np.float32)
    bias = storage[:, offset : offset + 320]
    bias[::7, 10:90], bias[1::7, 40:200], bias[3::7, 5] = -np.inf, -6e4, 6e4
    for dtype in (np.float16, ml_dtypes.bfloat16):
        small = storage.astype(dtype)[:, offset : offset + 320]
        check(kernel, q, k, v, attn_bias=small)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("causal", [False, True])
def test_alibi_of_any_number_of_heads_where_keys_exceed_queries(
    kernel: str, heads: int, causal: bool
) -> None:
    slopes = (0.5 ** np.arange(1, heads + 1)).astype(np.float32)
    for len_q, len_k in ((1, 5), (5, 1), (70, 90)):
        arrays = inputs(len_q, len_k, heads=heads, dim=16)
        options = {"alibi_slopes": slopes, "causal": causal}
        check(kernel, *arrays, **options)
        ends = {"cu_seqlens_q": np.array([0, len_q]), "cu_seqlens_k": np.array([0, len_k])}
        check(kernel, *(x[0] for x in arrays), **options, **ends)


@pytest.mark.parametrize("sink", [0.0, 40.0, -np.inf, -1e30, 1e30])
def test_a_sink_of_any_size(kernel: str, sink: float) -> None:
    arrays = inputs(70, 40)  # causal: 30 queries see no key
    out, lse = check(kernel, *arrays, causal=True, learnable_sink=np.full(2, sink, np.float32))
    assert not out[:, :30].any()
    assert (lse[:, :, :30] == np.float32(sink)).all()


def test_a_sink_of_minus_infinity_is_none(kernel: str) -> None:
    arrays = inputs(70, 90)
    result = run(kernel, *arrays, learnable_sink=np.full(2, -np.inf, np.float16))
    assert_like(kernel, result, *arrays)


# Dropout


def weights(kernel: str, len_q: int, len_k: int, **options: Any) -> np.ndarray:
    """Return the weights (batch 2, heads 2, len_q, len_k) of equal scores: out with one-hot V."""
    dim_v = -(-len_k // 16) * 16
    q, k = np.zeros((2, len_q, 2, dim_v), np.float16), np.zeros((2, len_k, 2, dim_v), np.float16)
    v = np.zeros((2, len_k, 2, dim_v), np.float16)
    v[:, range(len_k), :, range(len_k)] = 1
    out, _ = run(kernel, q, k, v, **options)
    return out.swapaxes(1, 2)[..., :len_k].astype(np.float32)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_is_its_mask_bit_for_bit(kernel: str, p: float) -> None:
    state = (2**64 - 5, 2**63 + 9)
    for len_q, len_k in ((130, 190), (70, 33)):
        kept = weights(kernel, len_q, len_k, dropout_p=p, rng_state=state) > 0
        np.testing.assert_array_equal(kept, dropout_mask(state, p, (2, 2, len_q, len_k)))


def test_dropout_does_not_see_lengths_layouts_or_packing(kernel: str) -> None:
    options: dict[str, Any] = {"dropout_p": 0.3, "rng_state": (7, 0)}
    whole = weights(kernel, 192, 192, **options) > 0
    part = weights(kernel, 128, 128, **options) > 0
    np.testing.assert_array_equal(part, whole[:, :, :128, :128])
    q, k = (np.zeros((256, 2, 192), np.float16) for _ in "qk")
    v = np.tile(np.eye(128, 192, dtype=np.float16)[:, None], (2, 2, 1))
    cu = np.array([0, 128, 256])
    out, _ = run(kernel, q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, **options)
    packed = out.reshape(2, 128, 2, 192).swapaxes(1, 2)[..., :128]
    np.testing.assert_array_equal(packed > 0, part)


@pytest.mark.parametrize(
    "state",
    [
        np.array([5, -7], np.int64),
        np.array([5, 2**64 - 7], np.uint64),
        np.array([5, 0, 2**32 - 7, 2**32 - 1], np.uint32),
    ],
    ids=lambda state: f"{state.dtype}{state.shape}",
)
def test_a_state_may_be_an_array(kernel: str, state: np.ndarray) -> None:
    arrays = inputs(70, 90)
    out, _ = run(kernel, *arrays, dropout_p=0.5, rng_state=state)
    expected, _ = run(kernel, *arrays, dropout_p=0.5, rng_state=(5, 2**64 - 7))
    assert same_bits(out, expected)


def test_dropout_leaves_the_lse_and_of_nothing_is_none(kernel: str) -> None:
    arrays = inputs(70, 90)
    plain = run(kernel, *arrays)
    for p in (0.0, 2**-18):
        assert all(map(same_bits, run(kernel, *arrays, dropout_p=p, rng_state=(1, 2)), plain))
    _, lse = check(kernel, *arrays, dropout_p=0.5, rng_state=(1, 2))
    assert_like(kernel, (plain[0], lse), *arrays)
    out, lse = run(kernel, *arrays, dropout_p=1.0, rng_state=(1, 2))
    assert not out.any()
    assert_like(kernel, (plain[0], lse), *arrays)


# Rows of NaN


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0},
        {"learnable_sink": np.float32([0, 1])},
        {"attn_mask": np.ones((70, 90), np.bool_)},
        {"attn_bias": np.zeros((70, 90), np.float32)},
        {"dropout_p": 0.5, "rng_state": (1, 2)},
        {"mask": PrefixLM(9)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_nan_in_a_query_stays_in_its_row(kernel: str, options: dict[str, Any]) -> None:
    q, k, v = inputs(70, 90)
    out, lse = run(kernel, q, k, v, **options)
    q[0, 20, 1] = np.nan
    again, lse_again = check(kernel, q, k, v, **options)
    assert np.isnan(again[0, 20, 1]).all()
    assert np.isnan(lse_again[0, 1, 20])
    near = np.array([20]) if kernel == "cpu" else np.arange(WARP_ROWS)
    again[0, near, 1], lse_again[0, 1, near] = out[0, near, 1], lse[0, 1, near]
    assert same_bits(again, out)
    assert same_bits(lse_again, lse)


def test_calls_that_differ_in_a_modifier_do_not_mix(kernel: str) -> None:
    arrays = inputs(70, 90)
    ways: list[dict[str, Any]] = [
        {"softcap": 1.0},
        {"softcap": 2.0},
        {"attn_bias": normal(3, 70, 90)},
        {"attn_bias": normal(4, 70, 90)},
        {"attn_bias": normal(4, 70, 1)},
        {"dropout_p": 0.5, "rng_state": (1, 2)},
        {"dropout_p": 0.25, "rng_state": (1, 2)},
        {"dropout_p": 0.25, "rng_state": (1, 3)},
        {"mask": PrefixLM(5)},
        {"mask": PrefixLM(6)},
        {"learnable_sink": np.float32([0, 1])},
        {"learnable_sink": np.float32([1, 0])},
        {"seqused_k": np.array([50])},
        {"seqused_k": np.array([51])},
    ]
    for _ in range(2):  # the second time everything is compiled and planned
        for options in ways:
            check(kernel, *arrays, **options)
