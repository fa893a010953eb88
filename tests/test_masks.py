"""Mask policies in Python: their questions against their dense form, and that against the rules."""

import functools
import itertools
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash.errors import CupyflashError, InvalidArgument, InvalidType
from cupyflash.masks import All, Band, PrefixLM, Segments

sides = st.one_of(st.just(-1), st.none(), st.integers(0, 12), st.just(10**30))
bands = st.builds(
    lambda causal, left, right, alignment: Band.of(causal, (left, right), alignment),
    st.booleans(),
    sides,
    sides,
    st.sampled_from(["bottom_right", "top_left"]),
)
lengths = st.integers(0, 9)


def sees(i, j, len_q, len_k, *, causal=False, left=-1, right=-1, alignment="bottom_right"):
    """Say whether query i sees key j, word for word as the contract has it."""
    d = len_k - len_q if alignment == "bottom_right" else 0
    return (
        (not causal or j <= i + d)
        and (left in (-1, None) or i + d - left <= j)
        and (right in (-1, None) or j <= i + d + right)
    )


@settings(max_examples=200, deadline=None)
@given(st.booleans(), sides, sides, st.sampled_from(["bottom_right", "top_left"]), lengths, lengths)
def test_dense_is_the_rule(causal, left, right, alignment, len_q, len_k):
    dense = Band.of(causal, (left, right), alignment).dense(len_q, len_k)
    assert dense.shape == (len_q, len_k)
    assert dense.dtype == bool
    for i, j in itertools.product(range(len_q), range(len_k)):
        expected = sees(
            i, j, len_q, len_k, causal=causal, left=left, right=right, alignment=alignment
        )
        assert dense[i, j] == expected


@settings(max_examples=200, deadline=None)
@given(bands, lengths, lengths, st.data())
def test_keys_is_the_union_of_what_the_queries_see(band, len_q, len_k, data):
    begin = data.draw(st.integers(0, len_q))
    end = data.draw(st.integers(begin, len_q))
    first, last = band.keys(begin, end, len_q, len_k)
    assert 0 <= first <= last <= len_k
    seen = np.flatnonzero(band.dense(len_q, len_k)[begin:end].any(axis=0))
    assert seen.size == last - first
    if seen.size:
        assert (first, last) == (seen[0], seen[-1] + 1)


@settings(max_examples=200, deadline=None)
@given(bands, lengths, lengths, st.data())
def test_whole_is_every_pair_kept(band, len_q, len_k, data):
    q_begin = data.draw(st.integers(0, max(len_q - 1, 0)))
    q_end = data.draw(st.integers(q_begin + 1, len_q + 1))
    k_begin = data.draw(st.integers(0, max(len_k - 1, 0)))
    k_end = data.draw(st.integers(k_begin + 1, len_k + 1))
    if q_end > len_q:
        return
    every = k_end <= len_k and bool(band.dense(len_q, len_k)[q_begin:q_end, k_begin:k_end].all())
    assert band.whole(q_begin, q_end, k_begin, k_end, len_q, len_k) == every


@settings(max_examples=200, deadline=None)
@given(bands, lengths, lengths)
def test_operands_describe_the_same_band_in_32_bits(band, len_q, len_k):
    left, right, bottom_right = band.operands(len_q, len_k)
    assert 0 <= left <= max(len_q, len_k)
    assert 0 <= right <= max(len_q, len_k)
    same = Band(
        None if band.left is None else left,
        None if band.right is None else right,
        "bottom_right" if bottom_right else "top_left",
    )
    assert np.array_equal(same.dense(len_q, len_k), band.dense(len_q, len_k))


def test_window_right_of_more_than_len_k_reaches_the_last_key():
    """Ten queries over four keys: the right side counts from a diagonal that is negative."""
    assert Band.of(window_size=(-1, 100)).dense(10, 4).all()


def test_window_zero_is_the_diagonal():
    assert np.array_equal(Band.of(window_size=(0, 0)).dense(4, 4), np.eye(4, dtype=bool))


def test_left_window_alone_does_not_hide_the_future():
    assert Band.of(window_size=(4, -1)).dense(16, 16)[0].all()
    assert not Band.of(window_size=(4, 0)).dense(16, 16)[8, 9:].any()


@pytest.mark.parametrize(
    ("causal", "window", "cuda_type", "label"),
    [
        (False, (-1, -1), "Band<false, false>", "full"),
        (False, (None, None), "Band<false, false>", "full"),
        (True, (-1, -1), "Band<false, true>", "causal"),
        (True, (-1, 7), "Band<false, true>", "causal"),
        (True, (4, 7), "Band<true, true>", "window:4,0"),
        (False, (4, -1), "Band<true, false>", "window:4,-1"),
        (np.bool_(False), [np.int64(4), np.uint8(2)], "Band<true, true>", "window:4,2"),
    ],
)
def test_type_and_label(causal, window, cuda_type, label):
    band = Band.of(causal, window)
    assert band.cuda_type() == cuda_type
    assert band.label == label
    assert isinstance(hash(band), int)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"window_size": (-1, -3)}, InvalidArgument, "`window_size`.*-3.*use -1"),
        ({"window_size": (-2, 0), "causal": True}, InvalidArgument, "`window_size`.*-2"),
        ({"window_size": (1.0, 0)}, InvalidType, "`window_size`.*float"),
        ({"window_size": (True, 0)}, InvalidType, "`window_size`.*bool"),
        ({"window_size": 4}, InvalidArgument, "`window_size`.*pair.*4"),
        ({"window_size": (1, 2, 3)}, InvalidArgument, "`window_size`.*pair"),
        ({"causal": "yes"}, InvalidType, "`causal`.*bool.*str"),
        ({"alignment": "bottom"}, InvalidArgument, "`alignment`.*'bottom'"),
        ({"alignment": None}, InvalidArgument, "`alignment`.*None"),
    ],
)
def test_errors_name_the_argument(arguments, error, words):
    with pytest.raises(error, match=words) as caught:
        Band.of(**arguments)
    assert isinstance(caught.value, CupyflashError)


# Masks with arrays, and their intersection


def prefixed(i, j, len_q, len_k, prefix, alignment):
    d = len_k - len_q if alignment == "bottom_right" else 0
    return j < prefix or j <= i + d


alignments = st.sampled_from(["bottom_right", "top_left"])
prefixes = st.lists(st.integers(-2, 12), min_size=2, max_size=2)
ids = st.lists(st.integers(0, 2), min_size=18, max_size=18)


@settings(max_examples=100, deadline=None)
@given(prefixes, alignments, lengths, lengths)
def test_prefix_lm_is_the_rule(prefix, alignment, len_q, len_k):
    mask = PrefixLM(np.array(prefix, np.int16), alignment)
    for b in range(2):
        dense = mask.dense(len_q, len_k, b)
        assert dense.shape == (len_q, len_k)
        for i, j in itertools.product(range(len_q), range(len_k)):
            assert dense[i, j] == prefixed(i, j, len_q, len_k, prefix[b], alignment)


def test_one_prefix_is_that_of_every_entry():
    for prefix in (3, np.int64(3), np.array(3), np.array([3])):
        assert np.array_equal(PrefixLM(prefix).dense(4, 6, 1), PrefixLM([3, 3]).dense(4, 6, 1))


@settings(max_examples=100, deadline=None)
@given(ids, ids, lengths, lengths)
def test_segments_are_the_rule(q, k, len_q, len_k):
    q, k = (np.array(x).reshape(2, 9) for x in (q, k))
    for b in range(2):
        dense = Segments(q, k).dense(len_q, len_k, b)
        for i, j in itertools.product(range(len_q), range(len_k)):
            assert dense[i, j] == (q[b, i] == k[b, j])
        assert np.array_equal(
            Segments(q).dense(len_q, len_k, b), Segments(q, q).dense(len_q, len_k, b)
        )


masks = st.one_of(
    bands,
    st.builds(PrefixLM, prefixes.map(np.array), alignments),
    st.builds(lambda q, k: Segments(*(np.sort(x).reshape(2, 9) for x in (q, k))), ids, ids),
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(masks, min_size=1, max_size=3), lengths, lengths, st.integers(1, 4), st.integers(0, 1)
)
def test_an_intersection_answers_for_all_parts(parts, len_q, len_k, block, b):
    """Ranges hold all that is seen, and whole is never wrong; a mask alone is its own part."""
    mask = functools.reduce(operator.and_, parts)
    dense = mask.dense(len_q, len_k, b)
    every = [part.dense(len_q, len_k, b) for part in parts]
    assert np.array_equal(dense, np.logical_and.reduce(every))
    for q, k in itertools.product(range(0, len_q, block), range(0, len_k, block)):
        q_end, k_end = min(q + block, len_q), min(k + block, len_k)
        first, end = mask.keys(q, q_end, len_q, len_k, b)
        assert 0 <= first <= end <= len_k
        seen = dense[q:q_end].any(axis=0)
        assert not seen[:first].any()
        assert not seen[end:].any()
        if mask.whole(q, q_end, k, k_end, len_q, len_k, b):
            assert dense[q:q_end, k:k_end].all()


@settings(max_examples=100, deadline=None)
@given(prefixes, alignments, lengths, lengths, st.data())
def test_a_prefix_skips_what_it_can(prefix, alignment, len_q, len_k, data):
    mask = PrefixLM(np.array(prefix), alignment)
    begin = data.draw(st.integers(0, len_q))
    end = data.draw(st.integers(begin, len_q))
    dense = mask.dense(len_q, len_k)[begin:end]
    seen = np.flatnonzero(dense.any(axis=0))
    assert mask.keys(begin, end, len_q, len_k) == (0, seen[-1] + 1 if seen.size else 0)
    if end > begin:
        for k_end in range(1, len_k + 1):
            assert mask.whole(begin, end, 0, k_end, len_q, len_k) == dense[:, :k_end].all()


def test_parts_are_flat_and_types_are_joined():
    band, prefix, segments = Band(4, 0), PrefixLM(3), Segments([[0, 1]])
    mask = band & (prefix & segments)
    assert mask.parts == (band, prefix, segments)
    types = "All<Band<true, true>, PrefixLM, Segments<2>>"
    assert mask.cuda_type("int64", "int16", "int16") == types
    assert mask == (band & prefix) & segments
    assert mask != band & prefix


def test_an_intersection_is_of_masks():
    with pytest.raises(TypeError):
        Band() & np.ones((3, 3), bool)
    with pytest.raises(InvalidType, match=r"`masks`.*ndarray"):
        All(Band(), np.ones((3, 3), bool))


@pytest.mark.parametrize("alignment", ["bottom", None])
def test_errors_of_a_prefix_name_the_argument(alignment):
    with pytest.raises(InvalidArgument, match="`alignment`"):
        PrefixLM(3, alignment)
