"""Modifiers, masks and packed sequences of the Hopper kernel on the emulator, against the oracle.

Problems of few tiles and few units, for g++ takes longer than a run; test_forward_modifiers.py has
more.
"""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import MODIFIERS, Modified
from emulated import (
    SEEDS_OF,
    check,
    every_other_at_night,
    needs_compiler,
    run,
    shared_seeds,
)
from harness import HOPPER, hosted, same_bits

from cupyflash import _explain, _kernels, _problem, _tuning_sm90
from cupyflash._tuning_sm90 import Tiles

pytestmark = needs_compiler

DIMS = (64, 64)
HEADS = {"heads_q": 2, "heads_k": 1}
LOWEST = float(np.finfo(np.float32).min)
SCORES = ("softcap", "alibi", "bias_bf16", "sink", "dropout")
MASKS = ("mask", "prefix", "segments", "sink_fp16")
# Two tiles of queries; key blocks that the band hides whole, in part and not at all.
ALONE = tuple(
    Modified(200, 330, *DIMS, "float16", 2, causal=True, modifiers=(name,), label="alone")
    for name in MODIFIERS
    # Sinks and other types of a bias are below.
    if not name.startswith("sink")
    and name not in ("bias_bf16", "bias_fp64", "bias_of_keys", "bias_of_odd_rows")
)
# Other tiles, rows without keys, head dims that are filled up.
SUBSETS = (
    Modified(200, 270, 128, 128, **HEADS, window_size=(150, 3), modifiers=SCORES),
    Modified(140, 170, 192, 192, softmax_scale=-0.1,
             modifiers=("bias_fp64", "mask_of_keys", "dropout_array")),
    Modified(140, 150, 256, 256, "float16", modifiers=(*SCORES, *MASKS[:3])),
    Modified(140, 150, 192, 192, "float16", modifiers=("bias", "used_q", "used_k")),
    Modified(200, 150, 40, 24, batch=3, **HEADS, causal=True,
             modifiers=("prefix", "used_q", "used_k", "sink")),
)  # fmt: skip
EIGHT_BIT = (
    Modified(70, 600, *DIMS, "float8_e4m3fn", **HEADS, causal=True, modifiers=SCORES),
    Modified(70, 600, *DIMS, "float8_e5m2", 2, **HEADS, modifiers=MASKS),
    Modified(70, 210, 128, 128, "float8_e5m2", causal=True, modifiers=(*SCORES, *MASKS[:3])),
    Modified(140, 200, *DIMS, "float8_e4m3fn", 2, modifiers=("used_q", "used_k")),
)
# Ends of sequences in every place of a tile of 192 rows or a block of 64 keys; none in use.
LENGTHS = (
    ((70, 90), (0, 3), (193, 40), (5, 0), (0, 0)),
    ((191, 64), (192, 63), (1, 65), (2, 1)),
    ((2, 3),) * 40,
    ((300, 330),),
)
PACKED = tuple(
    Modified.varlen(lengths, *DIMS, "float16", **HEADS, causal=True, tail=tail)
    for lengths, tail in zip(LENGTHS, (0, 3, 200, 0), strict=True)
)
PACKED_EIGHT_BIT = (
    Modified.varlen(LENGTHS[1], *DIMS, "float8_e4m3fn", **HEADS, causal=True, tail=3),
    Modified.varlen(LENGTHS[0], 128, 128, "float8_e5m2", **HEADS, tail=3, modifiers=SCORES),
    Modified.varlen(LENGTHS[3], 256, 256, "float8_e4m3fn", modifiers=("alibi", "dropout")),
)
PACKED_SUBSETS = tuple(
    Modified.varlen(LENGTHS[0], *dims, "float16", **HEADS, tail=3, modifiers=names)
    for dims, names in (
        (DIMS, (*SCORES, *MASKS[:3])),
        ((128, 128), ("segments", "prefix", "sink", "used_q", "used_k")),
    )
)
# More tiles a block than shared memory keeps.
MANY = Modified.varlen(
    LENGTHS[2][:15], *DIMS, "float16", **HEADS,
    modifiers=("alibi_batch", "bias_of_queries", "mask_columns_first"),
)  # fmt: skip
CASES = (*ALONE, *SUBSETS, *EIGHT_BIT, *PACKED, *PACKED_SUBSETS, *PACKED_EIGHT_BIT, MANY)


def cases(*several: Modified) -> pytest.MarkDecorator:
    """Parametrise a test by cases."""
    return pytest.mark.parametrize("case", several, ids=lambda case: case.id)


TOGETHER = every_other_at_night((*SUBSETS, *EIGHT_BIT, *PACKED_SUBSETS, MANY))


def inputs(*shape: int, len_k: int = 200, dtype: Any = np.float16) -> list[np.ndarray]:
    """Draw q, k and v; the shape is q's."""
    rng = np.random.default_rng(3)
    shapes = (shape, *[(shape[0], len_k, *shape[2:])] * 2)
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


@cases(*CASES)
def test_no_case_is_refused(case: Modified) -> None:
    """A kernel that does not take a case is not tested by it."""
    arrays = tuple(x.host for x in case.arrays())
    problem = _explain.resolve(arrays, {}, hosted(case.options)).problem
    assert _kernels.FORWARD_SM90.refusal(replace(problem, arch=90)) is None


@cases(*ALONE)
def test_each_alone(case: Modified) -> None:
    check(*case.arrays(), kernel=HOPPER, seeds=shared_seeds(case, HOPPER), **case.options)


@pytest.mark.parametrize("case", TOGETHER, ids=lambda case: case.id)
def test_several_together(case: Modified) -> None:
    check(*case.arrays(), kernel=HOPPER, seeds=(0, 8), **case.options)


@cases(*PACKED)
def test_packed_sequences(case: Modified) -> None:
    check(*case.arrays(), kernel=HOPPER, **case.options)


def test_packed_sequences_by_other_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tuning_sm90, "HALF", {DIMS: Tiles(48, 2, 1, 3, 1, turns=True)})
    case = replace(PACKED[0], modifiers=("used_q", "used_k"))
    check(*case.arrays(), kernel=HOPPER, **case.options)


# Values that hurt


def test_scores_that_outgrow_the_first_block_met() -> None:
    """The first keys, which are met last, have a bias of many times the others' scores."""
    q, k, v = inputs(1, 200, 1, 64)
    bias = np.zeros((200, 200), np.float32)
    bias[:, :10], bias[::3, 70:80] = 300, 200
    check(q, k, v, attn_bias=bias, causal=True, kernel=HOPPER, seeds=(2,))


@pytest.mark.parametrize("dim", [64, 128])
def test_scores_far_below_the_cap(dim: int) -> None:
    """In blocks that are whole, and met first or later."""
    q, k, v = inputs(1, 140, 1, dim, len_k=600)
    check(q, k, v, softcap=30.0, kernel=HOPPER, seeds=(0,))
    check(q, k, v, softcap=30.0, causal=True, kernel=HOPPER, seeds=(2,))


@pytest.mark.parametrize(("cap", "score"), [(3000.0, 1000.0), (5000.0, 1500.0), (1e6, 8192.0)])
def test_large_equal_scores_below_the_cap_have_equal_weights(cap: float, score: float) -> None:
    """The first block met, which is masked for some, and the others."""
    q, k = np.full((1, 64, 1, 64), 16, np.float16), np.full((1, 256, 1, 64), 8, np.float16)
    v = np.ones_like(k)
    v[:, :128] = -1
    check(q, k, v, softcap=cap, softmax_scale=score / 8192, kernel=HOPPER, seeds=(0,))
    check(q, k[:, :250], v[:, :250], softcap=cap, softmax_scale=score / 8192, kernel=HOPPER)


@pytest.mark.parametrize("slope", [1e28, 1e36, 4e36])
def test_slopes_near_the_end_of_fp32(slope: float) -> None:
    q, k, v = inputs(1, 400, 1, 64, len_k=128)
    slopes = np.array([slope], np.float32)
    check(q, k, v, alibi_slopes=slopes, alignment="top_left", kernel=HOPPER, seeds=(0,))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("value", [1.0, 48.0, 240.0, 288.0, 320.0, 448.0])
def test_equal_8_bit_scores_of_any_size_have_exact_weights(dim: int, value: float) -> None:
    q = np.full((1, 3, 1, dim), value, ml_dtypes.float8_e4m3fn)
    k = np.full((1, 300, 1, dim), value, ml_dtypes.float8_e4m3fn)
    for keys in (1, 300):
        out, _ = run(q, k[:, :keys], np.ones_like(k[:, :keys]), kernel=HOPPER)
        assert (out == 1).all()


def test_rows_that_a_bias_or_a_mask_empties() -> None:
    """A sink is all that they see; where it is -inf they are empty. The lowest bias hides none."""
    q, k, v = inputs(1, 140, 3, 64)
    zeros, seen = np.zeros((140, 200), np.float32), np.ones((3, 140, 200), np.bool_)
    bias = zeros.copy()
    bias[3], bias[4, ::2], bias[7] = -np.inf, -np.inf, LOWEST
    bias[8:] = np.where(np.arange(200) < np.arange(8, 140)[:, None], 0, LOWEST)
    seen[:, 5] = False
    seen[:, 70:135] = False
    sink = np.array([-np.inf, 2, 1e4], np.float32)
    out, lse = check(
        q, k, v, attn_bias=bias, attn_mask=seen, learnable_sink=sink, kernel=HOPPER, seeds=(0, 3)
    )
    for row in (3, 5, 70, 134):
        assert not out[0, row].any()
        assert (lse[0, :, row] == sink).all()
    assert not out[0, :, 2].any()
    np.testing.assert_allclose(lse[0, 0, 7], LOWEST, rtol=1e-6)
    even, _ = run(q * 0, k, v, attn_mask=seen, learnable_sink=sink, kernel=HOPPER, attn_bias=zeros)
    assert same_bits(out[0, 7, 0], even[0, 0, 0])


def test_a_sink_of_any_size() -> None:
    """In rows that see keys, in those of a tile that see none, and in a tile of such rows."""
    q, k, v = inputs(1, 300, 7, 64, len_k=130)
    sink = np.array([3e38, -3e38, 0, np.nan, -np.inf, np.inf, 88.5], np.float32)
    out, lse = check(q, k, v, learnable_sink=sink, causal=True, kernel=HOPPER, seeds=(0,))
    assert not out[0, :170].any()
    np.testing.assert_array_equal(lse[0, :, :170], np.broadcast_to(sink[:, None], (7, 170)))


# Rows that are no sequence's. Keys and values never matter; a warp chooses between two sums for its
# 16 rows of Q at once, so that those beyond a sequence may decide on the last bits of its end.


@pytest.mark.parametrize(
    ("poison", "dtype"),
    [(np.nan, np.float16), (np.inf, np.float16), (np.nan, ml_dtypes.float8_e4m3fn)],
)
def test_what_lies_beyond_the_lengths_in_use_never_matters(poison: float, dtype: Any) -> None:
    q, k, v = inputs(3, 200, 1, 64, dtype=dtype)
    used_q, used_k = np.array([130, 0, 200]), np.array([190, 200, 65])
    options: dict[str, Any] = {"seqused_q": used_q, "seqused_k": used_k, "causal": True}
    clean = check(q, k, v, **options, kernel=HOPPER, seeds=(0, 2))
    for batch, (n, m) in enumerate(zip(used_q, used_k, strict=True)):
        assert not clean[0][batch, n:].any()
        assert np.isneginf(clean[1][batch, :, n:]).all()
        k[batch, m:] = v[batch, m:] = poison
    for seed in SEEDS_OF[HOPPER]:
        assert all(map(same_bits, run(q, k, v, **options, kernel=HOPPER, seed=seed), clean))
    for batch, n in enumerate(used_q):
        q[batch, n:] = poison
    assert all(map(same_bits, check(q, k, v, **options, kernel=HOPPER, seeds=(0,)), clean))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_other_rows_of_packed_sequences_never_matter(
    poison: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before the first sequence and after the last, and of each beyond what is in use."""
    monkeypatch.setattr(_problem, "_values", lambda array: None)  # as if a GPU held the bounds
    cu_q, cu_k = np.array([5, 135, 135, 330]), np.array([66, 200, 263, 400])
    used_q, used_k = np.array([130, 0, 65]), np.array([70, 63, 129])
    q, k, v = (x[0] for x in inputs(1, 400, 2, 64, len_k=410))
    options: dict[str, Any] = {
        "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "seqused_q": used_q, "seqused_k": used_k,
        "causal": True,
    }  # fmt: skip
    clean = check(q, k, v, **options, kernel=HOPPER, seeds=(0,))
    others_q, others_k = np.ones(400, np.bool_), np.ones(410, np.bool_)
    for others, cu, used in ((others_q, cu_q, used_q), (others_k, cu_k, used_k)):
        for first, n in zip(cu[:-1], used, strict=True):
            others[first : first + n] = False
    assert not clean[0][others_q].any()
    assert np.isneginf(clean[1][:, others_q]).all()
    k[others_k] = v[others_k] = poison
    for seed in SEEDS_OF[HOPPER]:
        assert all(map(same_bits, run(q, k, v, **options, kernel=HOPPER, seed=seed), clean))
    q[others_q] = poison
    check(q, k, v, **options, kernel=HOPPER)


def test_bounds_of_no_sequence_lead_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_problem, "_values", lambda array: None)
    q, k, v = (x[0] for x in inputs(1, 90, 2, 64, len_k=80))
    options = {
        "cu_seqlens_q": np.array([-7, 40, 40, 2**40]),
        "cu_seqlens_k": np.array([5, 2**62, -1, -(2**62)]),
        "seqused_q": np.array([2**50, 3, 45]),
        "seqused_k": np.array([70, -3, 2**33]),
    }
    check(q, k, v, **options, causal=True, kernel=HOPPER, seeds=(0,))
