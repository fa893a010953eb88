"""Dropout, sinks, sequences and integers of cuda/tile, compiled for the host, against NumPy."""

import itertools
from collections.abc import Iterator
from ctypes import c_bool, c_float, c_longlong, c_uint
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device_policies import COMPILER, Policies, address, integers, policies, strides

from cupyflash import _philox
from cupyflash._modifiers import DROPOUT, INTEGERS, SINK

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

U = 2.0**-24  # the unit roundoff of fp32
DTYPES = tuple(np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8))
LARGEST = 2**63 - 1


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return policies(tmp_path_factory.getbasetemp())


# Integers


def read(
    library: Policies, x: np.ndarray, low: int = 0, high: int = LARGEST
) -> tuple[list[int], list[int]]:
    """Return the elements and the clipped elements."""
    values, clipped = (np.zeros(x.size, np.int64) for _ in "vc")
    bounds = (c_longlong(low), c_longlong(high))
    library.call("integers", integers(x), x.size, *bounds, values, clipped)
    return values.tolist(), clipped.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_of_every_width(library: Policies, dtype: np.dtype) -> None:
    info = np.iinfo(dtype)
    numbers = [0, 1, 100, info.max, info.max - 1, info.max // 2 + 1, info.min, info.min // 2]
    x = np.array(numbers, dtype)
    wrapped = [n - 2**64 if n > LARGEST else n for n in numbers]
    for low, high in ((0, 0), (0, 7), (3, 100), (1, 2**31 - 1), (0, LARGEST)):
        values, clipped = read(library, x, low, high)
        assert values == wrapped
        assert clipped == [min(max(n, low), high) for n in numbers]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_of_any_stride(
    library: Policies, rng: np.random.Generator, dtype: np.dtype
) -> None:
    storage = rng.integers(0, 128, 40).astype(dtype)
    for view in (storage[3::3], storage[20:2:-2], np.broadcast_to(storage[5], 4)):
        assert read(library, view)[0] == view.tolist()


# Dropout


def test_the_block_of_a_counter_is_known(library: Policies) -> None:
    """The published answers of Philox4x32-10."""
    word = 2**32 - 1
    for counter, key, answer in (
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((word,) * 4, (word, word), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ):
        x = np.array(counter, np.uint32)
        library.call("philox", x, *map(c_uint, key))
        assert tuple(x.tolist()) == answer


def drop(
    library: Policies, state: Any, p: float, b: int = 0, h: int = 0,
    start: tuple[int, int] = (0, 0), shape: tuple[int, int] = (48, 96),
) -> np.ndarray:  # fmt: skip
    """Return what the device keeps; a state of integers is the host's, an array is read."""
    drops, factor = _philox.threshold(p), _philox.rescale(p)
    if isinstance(state, tuple):
        params = DROPOUT.pack(0, *state, drops, factor, 0, -1)
    else:
        words = state.size if state.itemsize == 8 else -state.size
        params = DROPOUT.pack(address(state), 1, 2, drops, factor, words, -1)
    kept = np.zeros(shape, bool)
    rescale = library.call("dropout", params, b, h, *start, *shape, kept, result=c_float)
    assert rescale == np.float32(factor)
    return kept


SEEDS = ((0, 0), (7, 3), (2**64 - 1, 2**64 - 1), (2**32 + 5, 2**33 + 1), (1, 0), (0, 1))


@pytest.mark.parametrize("p", [1 / 65536, 0.1, 0.5, 0.9, 65535 / 65536, 1.0])
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_dropout_is_that_of_the_definition(
    library: Policies, seeds: tuple[int, int], p: float
) -> None:
    expected = _philox.keep(seeds, p, 0, 0, range(48), range(96))
    np.testing.assert_array_equal(drop(library, seeds, p), expected)
    if p == 0.5:
        assert 0.4 < expected.mean() < 0.6


@pytest.mark.parametrize("drops", [1, 2, 6554, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000])
def test_signs_of_draws_are_those_that_drop(
    library: Policies, rng: np.random.Generator, drops: int
) -> None:
    """Both draws of a word, at every distance from the greatest that drops."""
    draws = np.arange(2**16, dtype=np.uint32)
    words = draws | rng.permutation(draws) << 16
    signs = np.zeros_like(words)
    params = DROPOUT.pack(0, 7, 3, drops, 1.0, 0, -1)
    seldom = library.call("signs", params, words.size, words, signs, result=c_bool)
    assert seldom == (drops <= 2**15)
    if seldom:
        np.testing.assert_array_equal(signs >> 15 & 1, (words & 0xFFFF) < drops)
        np.testing.assert_array_equal(signs >> 31, words >> 16 < drops)


@pytest.mark.parametrize(
    ("b", "h", "i", "j"),
    [(1, 0, 0, 0), (0, 1, 0, 0), (5, 70000, 16, 32), (66000, 3, 1600, 4096),
     (2**31 - 1, 2**31 - 1, 2**31 - 48, 2**31 - 96)],
)  # fmt: skip
def test_dropout_of_any_position(library: Policies, b: int, h: int, i: int, j: int) -> None:
    kept = drop(library, (11, 4), 0.3, b, h, (i, j))
    expected = _philox.keep((11, 4), 0.3, b, h, range(i, i + 48), range(j, j + 96))
    np.testing.assert_array_equal(kept, expected)


@pytest.mark.parametrize(
    "state",
    [
        np.array([7, 3], np.int64),
        np.array([-2, -(2**63)], np.int64),
        np.array([2**64 - 3, 2**40], np.uint64),
        np.array([2**32 - 1, 6], np.uint32),
        np.array([1, 2, 3, 4], np.uint32),
        np.array([2**32 - 1, 2**31, 2**32 - 2, 2**30], np.uint32),
    ],
    ids=str,
)
def test_a_random_state_of_any_layout(library: Policies, state: np.ndarray) -> None:
    expected = _philox.keep(state, 0.4, 2, 3, range(48), range(96))
    np.testing.assert_array_equal(drop(library, state, 0.4, 2, 3), expected)


@pytest.mark.parametrize("drops", [1, 2, 255, 256, 32768, 65534, 65535, 65536])
def test_the_draws_next_to_the_threshold(library: Policies, drops: int) -> None:
    """A draw is one half of a word, whatever the other half is."""
    params = DROPOUT.pack(0, 0, 0, drops, 1.0, 0, -1)
    for draw in {0, drops - 1, drops & 0xFFFF, 65535}:
        for place, other in itertools.product(range(8), (0, 65535)):
            draws = np.full(8, other, "<u2")
            draws[place] = draw
            kept = np.zeros(8, bool)
            library.call("of_words", params, draws.view("<u4").astype(np.uint32), kept)
            np.testing.assert_array_equal(kept, draws >= drops)


def test_dropout_is_or_is_not(library: Policies) -> None:
    """Nothing is kept of a certain drop, almost all of the least likely one."""
    assert not drop(library, (5, 6), 1.0).any()
    assert drop(library, (5, 6), 1 / 65536).mean() > 0.99


# Sinks


ELEMENTS = {
    "Float16": np.float16, "Bfloat16": ml_dtypes.bfloat16,
    "Float32": np.float32, "Float64": np.float64,
}  # fmt: skip


def join(
    library: Policies, name: str, params: bytes, head: int, inverse: Any, lse: Any
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return 1 / l and LSE with the sink, and its logit."""
    inverse, lse = (np.array(x, np.float32) for x in (inverse, lse))
    logit = library.call(f"{name}_join", params, head, inverse.size, inverse, lse, result=c_float)
    return inverse, lse, logit


@pytest.mark.parametrize("element", ELEMENTS)
def test_a_sink_joins_the_sum(library: Policies, rng: np.random.Generator, element: str) -> None:
    """Off by the exponent, whose error is that of a difference times itself, and few roundings."""
    logits = rng.uniform(-90, 90, (9, 2)).astype(ELEMENTS[element])[::-2, 1]
    lse = np.concatenate([rng.uniform(-100, 100, 500), logits.astype(np.float32)])
    lse = lse.astype(np.float32)
    inverse = np.exp(-rng.uniform(-20, 20, lse.size)).astype(np.float32)
    for head in range(logits.size):
        params = SINK.pack(address(logits), strides(logits)[0])
        got, total, logit = join(library, f"Sink{element}", params, head, inverse, lse)
        assert logit == np.float32(logits[head])
        expected = np.logaddexp(lse.astype(np.float64), logit)
        # 2^-22 of the logarithm and as much of the exponential, on a GPU.
        np.testing.assert_allclose(total, expected, rtol=2 * U, atol=8 * U)
        exact = inverse * np.exp(lse - expected)
        error = (12 + 3 * np.abs(lse - np.float64(logit))) * U * exact
        lost = 2.0**-125 * (1 + inverse)  # where numbers are subnormal
        np.testing.assert_array_less(np.abs(got - exact), error + lost)


def test_a_sink_that_is_none_or_all(library: Policies) -> None:
    """A row without keys has 1 / l = 0 and LSE -inf; its LSE becomes the logit."""
    inf, nan = np.inf, np.nan
    for logit, inverse, lse, expected in (
        (-inf, [0.5, 0.0], [3.0, -inf], ([0.5, 0.0], [3.0, -inf])),
        (2.5, [0.0, 0.25], [-inf, 90.0], ([0.0, 0.25], [2.5, 90.0])),
        (90.0, [0.25, 0.5], [-100.0, nan], ([0.0, nan], [90.0, nan])),
        (nan, [0.5, 0.0], [3.0, -inf], ([nan, 0.0], [nan, nan])),
        (inf, [0.5, 0.0, nan], [3.0, -inf, nan], ([nan, 0.0, nan], [nan, inf, nan])),
        (3e38, [0.5, 0.5], [3.0, -3e38], ([0.0, 0.0], [3e38, 3e38])),
    ):
        x = np.array([logit], np.float32)
        got = join(library, "SinkFloat32", SINK.pack(address(x), 1), 0, inverse, lse)
        for values, wanted in zip(got, expected, strict=False):
            np.testing.assert_array_equal(values, np.float32(wanted))


def test_no_sink_changes_nothing(library: Policies) -> None:
    inverse, lse, logit = join(library, "NoSink", bytes(8), 0, [0.5, 0.0], [3.0, -np.inf])
    assert inverse.tolist() == [0.5, 0]
    assert lse.tolist() == [3, -np.inf]
    assert logit == -np.inf
    assert not library.size("NoSink_present") & 1
    assert library.size("SinkFloat16_present") & 1


# Sequences


Spans = list[tuple[int, int, int]]


def spans(
    library: Policies,
    name: str,
    params: bytes,
    batch: int,
    lengths: tuple[int, int],
    extra: int = 0,
) -> tuple[Spans, Spans]:
    """Return (first, length, extent) of queries and of keys; `extra` entries past the batch."""
    found = np.full((2 * batch + extra, 3), -1, np.int64)
    library.call(f"{name}_spans", params, batch, batch + extra, *lengths, found)
    every = [tuple(span) for span in found.tolist()]
    return every[: batch + extra], every[batch + extra :]


def lengths_or_none(x: np.ndarray | None) -> bytes:
    return bytes(INTEGERS.size) if x is None else integers(x)


def clip(n: int, low: int, high: int) -> int:
    return min(max(n, low), high)


def hostile(rng: np.random.Generator, dtype: np.dtype, total: int, count: int) -> np.ndarray:
    """Return what no caller should pass: any order, negative, beyond the total, extreme."""
    info = np.iinfo(dtype)
    pool = [0, 1, total // 2, total - 1, total, total + 1, -1, -total, info.min, info.max,
            info.max - 1, 2**31, 2**32 + 3, 2**63, 2**63 + 1, -(2**31) - 1]  # fmt: skip
    pool = [n for n in pool if info.min <= n <= info.max]
    return np.array([pool[i] for i in rng.integers(0, len(pool), count)], dtype)


def test_the_kinds_of_sequences(library: Policies) -> None:
    """Whether they lie in one entry of the arrays, and whether their lengths are read."""
    names = ("Dense", "Used", "Packed")
    kinds = {name: library.call(f"{name}_kind", result=c_uint) for name in names}
    assert kinds == {"Dense": 0, "Used": 1, "Packed": 3}


def test_dense_sequences_have_all_rows(library: Policies) -> None:
    queries, keys = spans(library, "Dense", bytes(8), 2, (5, 9))
    assert queries == [(0, 5, 5)] * 2
    assert keys == [(0, 9, 9)] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths_in_use(library: Policies, rng: np.random.Generator, dtype: np.dtype) -> None:
    q, k = (hostile(rng, dtype, total, 20) for total in (5, 90))
    for used_q, used_k in itertools.product((None, q), (None, k)):
        params = lengths_or_none(used_q) + lengths_or_none(used_k)
        found = spans(library, "Used", params, 20, (5, 90))
        for got, used, length in zip(found, (used_q, used_k), (5, 90), strict=True):
            expected = [length] * 20 if used is None else [clip(int(n), 0, length) for n in used]
            assert got == [(0, n, length) for n in expected]


def packed(cu: np.ndarray, used: np.ndarray | None, total: int) -> Iterator[tuple[int, int, int]]:
    """Say where sequences lie, as the contract has it."""
    for b in range(cu.size - 1):
        first = clip(int(cu[b]), 0, total)
        extent = clip(int(cu[b + 1]) - first, 0, total - first)
        yield first, extent if used is None else clip(int(used[b]), 0, extent), extent


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_sequences_of_hostile_metadata(
    library: Policies, rng: np.random.Generator, dtype: np.dtype
) -> None:
    """Nothing leads out of the arrays, and every row is some sequence's or no sequence's."""
    totals = (40, 90)
    for batch in (1, 2, 5, 9):
        for use in (False, True):
            cu = [hostile(rng, dtype, total, batch + 1) for total in totals]
            used = [hostile(rng, dtype, total, batch) if use else None for total in totals]
            params = b"".join([*map(integers, cu), *map(lengths_or_none, used)])
            queries, keys = spans(library, "Packed", params, batch, totals, extra=2)
            assert queries[:batch] == list(packed(cu[0], used[0], totals[0]))
            assert keys == list(packed(cu[1], used[1], totals[1]))
            before, after = queries[batch:]
            ends = [clip(int(n), 0, totals[0]) for n in (cu[0][0], cu[0][-1])]
            assert before == (0, 0, ends[0])
            assert after == (max(ends), 0, totals[0] - max(ends))
            covered = np.zeros(totals[0], bool)
            for first, length, extent in queries:
                assert first >= 0
                assert 0 <= length <= extent
                assert first + extent <= totals[0]
                covered[first : first + extent] = True
            assert covered.all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_sequences_part_the_rows(
    library: Policies, rng: np.random.Generator, dtype: np.dtype
) -> None:
    """Also those of no sequence, before the first and after the last, once each."""
    total = 60
    for batch in (1, 3, 8):
        for low, high in ((0, total), (7, 50), (7, total), (0, 50), (20, 20)):
            inside = np.sort(rng.integers(low, high + 1, batch - 1))
            cu = np.array([low, *inside, high], dtype)
            params = integers(cu) + integers(cu) + bytes(2 * INTEGERS.size)
            queries, keys = spans(library, "Packed", params, batch, (total, total), extra=2)
            assert queries[batch:] == [(0, 0, low), (high, 0, total - high)]
            assert queries[:batch] == keys
            counts = np.zeros(total, int)
            for first, _, extent in queries:
                counts[first : first + extent] += 1
            assert (counts == 1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whose_rows_are(library: Policies, rng: np.random.Generator, dtype: np.dtype) -> None:
    """Whether bounds fall, and sequences have rows, also more of them than a warp has lanes."""
    total = 40
    for batch, ordered in itertools.product((1, 2, 5, 70), (False, True)):
        cu = hostile(rng, dtype, total, batch + 1)
        if ordered:
            cu = np.sort(cu)
        bounds = np.array([clip(int(n), 0, total) for n in cu])
        params = integers(cu) + integers(cu) + bytes(2 * INTEGERS.size)
        owned = np.zeros(total, bool)
        for first, _, extent in packed(cu, None, total):
            owned[first : first + extent] = True
        for begin, end in ((0, total), (0, 0), (7, 8), (39, 40), (10, 30)):
            place = (c_longlong(begin), c_longlong(end))
            found = library.call("Packed_rows", params, batch, total, *place, result=c_uint)
            assert found & 1 == (np.diff(bounds) < 0).any()
            assert bool(found & 2) == owned[begin:end].any()


def test_packed_arrays_without_sequences(library: Policies) -> None:
    for start in (0, 4, 20):
        cu = np.array([start])
        params = integers(cu) + integers(cu) + bytes(2 * INTEGERS.size)
        queries, _ = spans(library, "Packed", params, 0, (9, 9), extra=2)
        at = min(start, 9)
        assert queries == [(0, 0, at), (at, 0, 9 - at)]
