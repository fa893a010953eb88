"""Packed sequences: each is computed as if it were alone, and no length leads out of the arrays."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import DTYPES, LENGTHS, MODIFIERS, Modified
from harness import KERNELS, WARP_ROWS, attend, check, judge, run, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strided import ROWWISE, Strided

import cupyflash
from cupyflash import InvalidArgument, InvalidType, _online
from cupyflash.masks import PrefixLM, Segments

kernels = pytest.mark.parametrize("kernel", KERNELS)


def inputs(
    total_q: int, total_k: int, heads: int = 2, heads_k: int = 1, dim: int = 64
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw q, k and v of packed rows."""
    rng = np.random.default_rng(total_q)
    shapes = ((total_q, heads, dim), (total_k, heads_k, dim), (total_k, heads_k, dim))
    q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    return q, k, v


def bounds(*lengths: int) -> np.ndarray:
    """Return where sequences of these lengths begin and end."""
    return np.cumsum([0, *lengths]).astype(np.int32)


def packed(cu_seqlens_q: Any, cu_seqlens_k: Any = None, **options: Any) -> dict[str, Any]:
    """Return the options of a packed call; queries and keys are cut alike by default."""
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    return {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, **options}


# Sequences and rows of none


@kernels
@pytest.mark.parametrize("causal", [False, True])
def test_a_sequence_of_nan_stays_alone(kernel: str, causal: bool) -> None:
    lengths = (1, 127, 128, 129, 0, 63)
    options = packed(bounds(*lengths), causal=causal)
    q, k, v = inputs(sum(lengths), sum(lengths))
    out, lse = run(kernel, q, k, v, **options)
    # On a GPU the last rows of a sequence may share a warp with the first of the next.
    bits = np.concatenate(
        [np.arange(n) < (n if kernel == "cpu" else n // WARP_ROWS * WARP_ROWS) for n in lengths]
    )
    for first, end in zip(bounds(*lengths), bounds(*lengths)[1:], strict=False):
        poisoned = [x.copy() for x in (q, k, v)]
        for x in poisoned:
            x[first:end] = np.nan
        again, lse_again = check(kernel, *poisoned, **options)
        assert np.isnan(again[first:end]).all()
        assert np.isnan(lse_again[:, first:end]).all()
        others = bits.copy()
        others[first:end] = False
        assert same_bits(again[others], out[others])
        assert same_bits(lse_again[:, others], lse[:, others])


@kernels
def test_rows_after_the_last_sequence_are_zeros(kernel: str) -> None:
    for rows, ends in ((946, [0, 400, 944]), (7, [0, 2, 5]), (3, [0]), (3, [0, 0])):
        q, k, v = inputs(rows, rows, heads_k=2)
        q[ends[-1] :] = k[ends[-1] :] = v[ends[-1] :] = np.nan
        out, lse = check(kernel, q, k, v, **packed(np.array(ends)))
        assert not out[ends[-1] :].any()
        assert np.isneginf(lse[:, ends[-1] :]).all()
        assert np.isfinite(lse[:, : ends[-1]]).all()


@kernels
def test_padding_between_sequences(kernel: str) -> None:
    offsets, used = np.array([0, 4, 8]), np.array([3, 2])
    q, k, v = inputs(8, 8)
    pad = [3, 6, 7]
    options = packed(offsets, causal=True, seqused_q=used, seqused_k=used)
    out, lse = check(kernel, q, k, v, **options)
    q[pad] = k[pad] = v[pad] = np.nan
    again, lse_again = run(kernel, q, k, v, **options)
    assert same_bits(again, out)
    assert same_bits(lse_again, lse)
    assert not out[pad].any()
    assert np.isneginf(lse[:, pad]).all()
    dense = np.delete(np.arange(8), pad)
    tight, lse_tight = run(
        kernel, q[dense], k[dense], v[dense], **packed(bounds(3, 2), causal=True)
    )
    np.testing.assert_array_equal(out[dense], tight)
    np.testing.assert_array_equal(lse[:, dense], lse_tight)


@kernels
def test_many_sequences(kernel: str) -> None:
    count, length = 80_000, 16
    rng = np.random.default_rng(8)
    q, k, v = (rng.standard_normal((count * length, 1, 8)).astype(np.float16) for _ in "qkv")
    options = packed(np.arange(0, (count + 1) * length, length))
    out, lse = run(kernel, q, k, v, **options, causal=True)
    for n in (0, 65534, 65535, 65536, count - 1):
        rows = slice(n * length, (n + 1) * length)
        alone = packed(bounds(length), causal=True)
        judge((out[rows], lse[:, rows]), q[rows], k[rows], v[rows], **alone)


@kernels
def test_queries_of_decoding(kernel: str) -> None:
    q, k, v = inputs(2, 8, heads=9, heads_k=3)
    out, lse = check(kernel, q, k, v, **packed(bounds(1, 0, 1), bounds(3, 0, 5)), causal=True)
    assert out.all()
    assert np.isfinite(lse).all()


@kernels
def test_one_key_for_many_queries(kernel: str) -> None:
    q, k, v = inputs(256, 3, heads=1, dim=32)
    ends = np.array([0, 76, 110, 256]), np.array([0, 1, 2, 3])
    out, lse = check(kernel, q, k, v, **packed(*ends), causal=True)
    last = ends[0][1:] - 1
    assert same_bits(out[last], v)
    assert not np.delete(out, last, 0).any()
    assert np.isneginf(np.delete(lse, last, 1)).all()


@kernels
def test_out_is_written_where_it_is_given(kernel: str) -> None:
    q, k, v = inputs(70, 70)
    options = packed(bounds(30, 35))
    for layout in ("packed", "heads_first"):
        strides = ROWWISE[layout]((1, 70, 2, 64))
        out = Strided.output((70, 2, 64), q.dtype, strides._replace(strides=strides.strides[1:]))
        result = run(kernel, q, k, v, out=out, **options)
        judge(result, q, k, v, **options)


# What describes the sequences


@kernels
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int32", "int64", "uint64"])
def test_lengths_of_any_integers(kernel: str, dtype: str) -> None:
    arrays = inputs(120, 120)
    expected = run(kernel, *arrays, **packed(bounds(50, 0, 61)))
    ends = bounds(50, 0, 61).astype(dtype)
    spread = np.repeat(ends, 2)[::2]
    for cu_seqlens in (ends, spread, ends.tolist(), tuple(ends.tolist())):
        result = run(kernel, *arrays, **packed(cu_seqlens))
        assert all(map(same_bits, result, expected))


@kernels
def test_what_follows_the_lengths_is_never_read(kernel: str) -> None:
    for count in (1, 3, 132, 133):
        arrays = inputs(count * 3, count * 3, dim=16)
        ends = np.full(count + 9, 2**30, np.int32)
        ends[: count + 1] = np.arange(count + 1) * 3
        view = Strided.of(ends).host[: count + 1]
        expected = run(kernel, *arrays, **packed(view.copy()))
        result = run(kernel, *arrays, **packed(view))
        assert all(map(same_bits, result, expected))


@kernels
@pytest.mark.parametrize("hint", [None, 0, 1, 50, 61, 2**40, np.int32(7)])
def test_the_longest_length_is_only_a_hint(kernel: str, hint: Any) -> None:
    arrays = inputs(111, 111)
    options = packed(bounds(50, 61), causal=True)
    expected = run(kernel, *arrays, **options)
    result = run(kernel, *arrays, **options, max_seqlen_q=hint, max_seqlen_k=hint)
    assert all(map(same_bits, result, expected))


@pytest.mark.parametrize(
    ("cu_seqlens", "words"),
    [
        ([5, 7], r"`cu_seqlens_q\[0\]` must be 0"),  # lengths, not their sums
        ([1, 5], r"`cu_seqlens_q\[0\]` must be 0"),
        ([0, 5, 3], "`cu_seqlens_q` must not decrease"),
        ([0, 256, 512, 768], r"`cu_seqlens_q\[2\]` must be from 0 to total_q = 256"),
        ([0, -1, 5], r"`cu_seqlens_q\[1\]` must be from 0"),
        ([[0, 5]], "`cu_seqlens_q` must have shape"),
        ([], "`cu_seqlens_q`"),
    ],
    ids=str,
)
def test_wrong_bounds_are_named(cu_seqlens: Any, words: str) -> None:
    q, k, v = inputs(256, 256, dim=8)
    right = np.array([0, *range(10, 10 * len(cu_seqlens), 10)])
    with pytest.raises(InvalidArgument, match=words):
        cupyflash.attention_varlen(q, k, v, np.array(cu_seqlens, np.int64), right)


def test_other_wrong_arguments_are_named() -> None:
    q, k, v = inputs(12, 12, dim=8)
    ends = bounds(5, 7)

    def refused(error: type[Exception], words: str, **options: Any) -> None:
        arrays = {"q": q, "k": k, "v": v, "cu_seqlens_q": ends, "cu_seqlens_k": ends} | options
        with pytest.raises(error, match=words):
            cupyflash.attention_varlen(**arrays)

    refused(InvalidType, "`cu_seqlens_q` has dtype float", cu_seqlens_q=ends.astype(np.float32))
    refused(InvalidArgument, "`cu_seqlens_k` of shape", cu_seqlens_k=bounds(5, 5, 2))
    refused(InvalidArgument, "`q` must have shape", q=q[None])
    refused(InvalidArgument, "`seqused_q` of shape", seqused_q=[1, 2, 3])
    refused(InvalidArgument, r"`seqused_k\[1\]`", seqused_k=[5, 8])
    refused(InvalidArgument, "`alibi_slopes`", alibi_slopes=np.ones((3, 2), np.float32))
    refused(InvalidArgument, "`attn_bias`", attn_bias=np.ones((2, 1, 6, 7), np.float32))
    refused(InvalidArgument, "`attn_mask`", attn_mask=np.ones((5, 7), np.bool_))
    refused(InvalidArgument, "`mask.prefix`", mask=PrefixLM(np.array([1, 2, 3])))
    refused(TypeError, "layout", layout="bhsd")


# Modifiers by sequence and position


@kernels
def test_slopes_of_heads_and_of_sequences(kernel: str) -> None:
    lengths = (5, 1, 7)
    q, k, v = inputs(13, 13, heads=6, heads_k=2)
    slopes = np.random.default_rng(1).random((3, 6)).astype(np.float32)
    options = packed(bounds(*lengths), causal=True)
    check(kernel, q, k, v, **options, alibi_slopes=slopes[0])
    out, _ = check(kernel, q, k, v, **options, alibi_slopes=slopes)
    first, _ = run(kernel, q, k, v, **options, alibi_slopes=slopes[0])
    np.testing.assert_array_equal(out[:5], first[:5])
    assert (out[6:] != first[6:]).any()


@kernels
def test_a_bias_and_a_mask_are_by_position_in_the_sequence(kernel: str) -> None:
    q, k, v = inputs(130, 150)
    ends = bounds(70, 60), bounds(60, 90)
    rng = np.random.default_rng(2)
    bias = rng.standard_normal((2, 2, 70, 90)).astype(np.float16)
    mask = rng.random((2, 1, 70, 90)) < 0.6
    out, lse = check(kernel, q, k, v, **packed(*ends), attn_bias=bias, attn_mask=mask)
    for b in range(2):
        rows = slice(ends[0][b], ends[0][b + 1])
        keys = slice(ends[1][b], ends[1][b + 1])
        part = q[None, rows], k[None, keys], v[None, keys]
        at = (slice(b, b + 1), slice(None), slice(part[0].shape[1]), slice(part[1].shape[1]))
        options = {"attn_bias": bias[at], "attn_mask": mask[at]}
        judge((out[None, rows], lse[None, :, rows]), *part, **options)


@kernels
def test_masks_of_sequences(kernel: str) -> None:
    arrays = inputs(130, 130)
    ids = np.sort(np.random.default_rng(3).integers(0, 4, (2, 70)))
    for mask in (PrefixLM(40), PrefixLM(np.array([5, 60])), Segments(ids)):
        check(kernel, *arrays, **packed(bounds(70, 60)), mask=mask)


# Random sets of modifiers on the CPU, in tiles so small that short sequences have many


@st.composite
def problems(draw: Any) -> Modified:
    """Draw a problem of packed sequences."""
    length = st.sampled_from([0, 1, 15, 16, 17, 23, 24, 25]) | st.integers(0, 60)
    pair = st.tuples(length, length)
    runs = draw(st.lists(st.tuples(pair, st.integers(1, 3)), max_size=4))
    kinds = st.sampled_from([name for name in MODIFIERS if name != "dropout_of_all"])
    dim = st.sampled_from([1, 3, 8, 16, 33])
    heads_k, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    side = st.none() | st.integers(0, 70)
    describable = [name for name in ROWWISE if name != "reversed_batch"]
    names = draw(st.sets(kinds, max_size=6))
    return Modified.varlen(
        tuple(pair for pair, count in runs for _ in range(count)),
        draw(dim),
        draw(dim),
        draw(st.sampled_from(DTYPES)),
        heads_q=heads_k * group,
        heads_k=heads_k,
        causal=draw(st.booleans()),
        window_size=(draw(side), draw(side)),
        alignment=draw(st.sampled_from(["bottom_right", "top_left"])),
        memory=tuple(draw(st.sampled_from(describable)) for _ in "qkv"),
        modifiers=tuple(sorted(names)),
        tail=draw(st.integers(0, 2)),
        label=str(draw(st.integers(0, 2**32))),
    )


@settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=problems())
def test_random_problem(case: Modified, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        # Many small tiles round more often than the bound of a few fp32 elements allows.
        if case.dtype != "float32":
            patch.setattr(_online, "BLOCK_Q", 16)
            patch.setattr(_online, "BLOCK_K", 24)
        check("cpu", *case.arrays(), **case.options)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_every_pair_of_lengths(kernel: str) -> None:
    pairs = tuple((n, m) for n in LENGTHS[:8] for m in LENGTHS[:8])
    for options in ({}, {"causal": True}, {"window_size": (20, 9)}):
        case = Modified.varlen(pairs, 16, 16, "float16", **options)
        if kernel == "cpu":
            check(kernel, *case.arrays(), **case.options)
            continue
        arrays = [x.host for x in case.arrays()]
        out, lse = attend(kernel, *arrays, return_lse=True, **case.options)
        ref, ref_lse = cupyflash.reference.attention(*arrays, **case.options)
        assert same_bits(out, ref.astype(np.float16))
        assert same_bits(lse, ref_lse.astype(np.float32))


def test_equal_sequences_are_one_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many short sequences cost what their tokens cost."""
    from cupyflash import _threads

    given: list[int] = []
    attend_item: Callable[..., None] = _online.attend

    def count(call: Any, item: Any, scratch: Any) -> None:
        given.append(item.heads[0].stop - item.heads[0].start)
        attend_item(call, item, scratch)

    monkeypatch.setattr(_online, "attend", count)
    monkeypatch.setattr(_threads, "PRODUCTS_PER_THREAD", 2**40)
    check("cpu", *inputs(4 * 64 + 9, 4 * 64 + 9), **packed(bounds(64, 64, 64, 64, 9)))
    assert given == [4, 1]
