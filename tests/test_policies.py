"""The mask and score policies of cuda/, compiled for the host, against NumPy."""

import itertools
import re
from ctypes import c_uint
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device_policies import COMPILER, Policies, address, integers, pairs, policies, strides

from cupyflash import _jit, _modifiers
from cupyflash._modifiers import (
    ALIBI,
    BAND,
    PREFIX_LM,
    SEGMENT_IDS,
    SEGMENTS,
    SIZES,
)
from cupyflash.masks import Band, PrefixLM, Segments

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

U = 2.0**-24  # the unit roundoff of fp32
INTEGERS = tuple(np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8))
LENGTHS = ((1, 1), (7, 7), (5, 11), (11, 5), (8, 1), (1, 8))
BLOCKS = (1, 3, 4)
ALIGNMENTS = ("bottom_right", "top_left")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return policies(tmp_path_factory.getbasetemp())


# Sizes


MASK_SIZES = {  # name in policies.cpp: bytes of an object, and of Params
    "Window": (Band.cuda_bytes, SIZES["Band"]),
    "Causal": (Band.cuda_bytes, SIZES["Band"]),
    "PrefixLM": (PrefixLM.cuda_bytes, SIZES["PrefixLM"]),
    **dict.fromkeys(
        (f"Segments{width}" for width in (1, 2, 4, 8)), (Segments.cuda_bytes, SIZES["Segments"])
    ),
    "DenseMask": (_modifiers.DENSE_MASK_BYTES, SIZES["DenseMask"]),
}
PARAMS = {
    **dict.fromkeys(("Identity", "NoSink", "KeepAll", "Dense"), 8),
    **{f"Bias{x}{read}": SIZES["Bias"] for x in _modifiers.ELEMENTS.values() for read in (0, 1)},
    **{f"Sink{element}": SIZES["Sink"] for element in _modifiers.ELEMENTS.values()},
    **{name: SIZES[name] for name in ("Softcap", "Alibi", "Dropout", "Used", "Packed")},
    "ChainOfOne": SIZES["Alibi"],
    "CapThenBias": SIZES["Softcap"] + SIZES["Bias"],
    "ChainOfThree": SIZES["Softcap"] + SIZES["Alibi"] + SIZES["Bias"],
}


def test_sizes_are_those_that_the_host_computes(library: Policies) -> None:
    four = [MASK_SIZES[name] for name in ("Window", "PrefixLM", "Segments8", "DenseMask")]
    every = MASK_SIZES | {
        "AllOfOne": MASK_SIZES["PrefixLM"],
        "AllOfTwo": tuple(np.sum(four[:2], axis=0)),
        "AllOfFour": tuple(np.sum(four, axis=0)),
    }
    for name, (size, params) in every.items():
        assert library.size(f"{name}_bytes") == size, name
        assert library.size(f"{name}_params") == params, name
    for name, params in PARAMS.items():
        assert library.size(f"{name}_params") == params, name


def test_only_the_identity_is_called_one(library: Policies) -> None:
    names = ("Identity", "ChainOfNothing", "Softcap", "Alibi", "BiasFloat641", "ChainOfThree")
    found = [bool(library.size(f"{name}_identity") & 1) for name in names]
    assert found == [True, True, False, False, False, False]


# Masks


def assert_answers(
    library: Policies, name: str, params: bytes, dense: np.ndarray, *, exact: bool, batch: int = 0
) -> None:
    """Assert that keep is `dense`, and that the other answers are true of it.

    Ranges may be too wide and `whole` too careful; exact ones are neither.
    """
    lengths = dense.shape
    kept = library.keep(name, params, lengths, entry=(batch, 0))
    np.testing.assert_array_equal(kept, dense, err_msg=f"keep of {name}, {lengths}")
    if 0 not in lengths and library.call(f"{name}_intervals", result=c_uint):
        begin, end = library.blocks(name, params, lengths, 1, batch)[:, 0, :2].T[..., None]
        seen = (np.arange(lengths[1]) >= begin) & (np.arange(lengths[1]) < end)
        np.testing.assert_array_equal(seen, dense, err_msg=f"intervals of {name}, {lengths}")
    for block in BLOCKS:
        answers = library.blocks(name, params, lengths, block, batch)
        for i, j in np.ndindex(answers.shape[:2]):
            first, end, first_q, end_q, whole = answers[i, j].tolist()
            rows, columns = (slice(n * block, (n + 1) * block) for n in (i, j))
            about = f"{name}, {lengths}, {block} from {rows.start, columns.start}"
            assert_range(dense[rows].any(axis=0), first, end, exact, f"keys of {about}")
            assert_range(dense[:, columns].any(axis=1), first_q, end_q, exact, f"queries, {about}")
            if exact:
                assert whole == dense[rows, columns].all(), f"whole of {about}"
            elif whole:
                assert dense[rows, columns].all(), f"whole of {about}"


def assert_range(seen: np.ndarray, first: int, end: int, exact: bool, about: str) -> None:
    """Assert that a range lies within the axis and holds what is seen, no more if it is exact."""
    assert first >= 0, about
    assert end <= seen.size, about
    places = np.flatnonzero(seen)
    if places.size:
        bounds = places[0], places[-1] + 1
        assert (first, end) == bounds if exact else first <= bounds[0] and bounds[1] <= end, about
    elif exact:
        assert end <= first, about


def band_params(band: Band, len_q: int, len_k: int) -> bytes:
    return BAND.pack(*band.operands(len_q, len_k), -1)


NAMES = {
    (False, False): "Full", (False, True): "Causal", (True, False): "From", (True, True): "Window",
}  # fmt: skip


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_band(library: Policies, lengths: tuple[int, int], alignment: str) -> None:
    sides = (None, 0, 1, 4, -1, -3, 2**31 - 1)
    for left, right in itertools.product(sides, sides):
        if (left or 0) + (right or 0) < 0:
            continue  # sees nothing, and its ranges need not say so
        band = Band(left, right, alignment)
        name = NAMES[left is not None, right is not None]
        assert_answers(library, name, band_params(band, *lengths), band.dense(*lengths), exact=True)


def prefix_params(prefix: np.ndarray, alignment: str) -> bytes:
    return integers(prefix) + PREFIX_LM.pack(alignment == "bottom_right", -1)


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_prefix_lm(library: Policies, lengths: tuple[int, int], alignment: str) -> None:
    """One array of lengths: each entry has its own, whatever it is worth."""
    len_q, len_k = lengths
    prefixes = np.array([0, 1, 3, len_k, len_k + 1, -1, -(2**62), 2**62, 2**32 + 1])
    params = prefix_params(prefixes, alignment)
    i, j = np.ogrid[:len_q, :len_k]
    d = len_k - len_q if alignment == "bottom_right" else 0
    for b, prefix in enumerate(prefixes):
        dense = (j < prefix) | (j <= i + d)
        assert_answers(library, "PrefixLM", params, dense, exact=True, batch=b)
        assert_answers(library, "AllOfOne", params, dense, exact=True, batch=b)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_prefix_lm_of_any_integers(library: Policies, dtype: np.dtype) -> None:
    prefixes = np.repeat(np.array([9, 2, 100, 0], dtype), 2)[::2]
    for b, prefix in enumerate(prefixes.tolist()):
        kept = library.keep("PrefixLM", prefix_params(prefixes, "top_left"), (3, 9), entry=(b, 0))
        assert kept[0].sum() == min(max(prefix, 1), 9)


def segment_params(q: np.ndarray, k: np.ndarray, extents: tuple[int, int] = (0, 0)) -> bytes:
    """Segments of ids (batch, length)."""
    ids = (SEGMENT_IDS.pack(address(x), *strides(x)) for x in (q, k))
    return b"".join(ids) + SEGMENTS.pack(*extents)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_segments_of_any_integers(
    library: Policies, rng: np.random.Generator, dtype: np.dtype
) -> None:
    """Also ids that differ in their high bits only, or in their sign."""
    least, greatest = np.iinfo(dtype).min, np.iinfo(dtype).max
    ids = np.array([0, 1, least, greatest, greatest // 2 + 1, greatest - 15], dtype)
    q, k = (ids[rng.integers(0, ids.size, (2, n))] for n in (7, 11))
    for b in range(2):
        name, params = f"Segments{dtype.itemsize}", segment_params(q, k)
        assert_answers(library, name, params, q[b][:, None] == k[b], exact=False, batch=b)


def test_segments_of_strided_and_broadcast_ids(library: Policies, rng: np.random.Generator) -> None:
    storage = rng.integers(0, 2, (3, 40)).astype(np.int16)
    views = (storage[:, 30:8:-2], storage[::-1, 3:14], np.broadcast_to(storage[1, :11], (3, 11)))
    for q, k in itertools.product(views, views):
        for b in range(3):
            dense = q[b][:, None] == k[b]
            assert_answers(library, "Segments2", segment_params(q, k), dense, exact=False, batch=b)


def test_only_masks_that_go_by_ids_look(library: Policies) -> None:
    names = ("Causal", "PrefixLM", "DenseMask", "AllOfTwo", "Segments1", "AllOfFour")
    looks = [bool(library.size(f"{name}_looks") & 1) for name in names]
    assert looks == [False] * 4 + [True] * 2


def assert_looks(
    library: Policies, name: str, params: bytes, dense: np.ndarray, rows: tuple[int, int],
    *, exact: bool, block: int = 4, batch: int = 0,
) -> None:  # fmt: skip
    """Assert that what a mask says after a look at some rows is true of them, or exactly so."""
    keys, intervals, whole = library.look(name, params, dense.shape, rows, block, batch)
    pairs, about = dense[slice(*rows)], f"{name}, {dense.shape}, {rows}"
    assert_range(pairs.any(axis=0), keys.start, keys.stop, exact, about)
    j = np.arange(dense.shape[1])
    for k, said in zip(range(0, dense.shape[1], block), whole, strict=True):
        kept = pairs[:, k : k + block].all()
        assert said == kept if exact and intervals else kept or not said, about
    if intervals and name.startswith("Segments"):
        assert (pairs == ((j >= keys.start) & (j < keys.stop))).all(), about
    if exact and name.startswith("Segments"):
        alike = (pairs == pairs[0]).all() and pairs[0].any()
        assert not alike or intervals, about


# Ids of documents in one piece each; of other orders; what they are called.
DOCUMENTS = {
    "rising": lambda rng, n: np.sort(rng.integers(0, 5, n)),
    "around 0": lambda rng, n: np.sort(rng.integers(-3, 3, n)),
    "falling": lambda rng, n: 9 - np.sort(rng.integers(0, 5, n)),
    "in any order": lambda rng, n: rng.permutation(6)[np.sort(rng.integers(0, 6, n))],
    "one": lambda rng, n: np.full(n, -7),
    "each its own": lambda rng, n: np.arange(n) - 4,
    "again": lambda rng, n: np.sort(rng.integers(0, 6, n)) % 2,
    "scattered": lambda rng, n: rng.integers(-2, 3, n),
    "far apart": lambda rng, n: rng.integers(0, 3, n) * 32,
}  # fmt: skip
IN_PIECES = tuple(DOCUMENTS)[:6]


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_look_finds_the_keys_of_documents(
    library: Policies, rng: np.random.Generator, kind: str
) -> None:
    """Exactly those from the first to the last that is seen, if a document is in one piece."""
    for width, _ in itertools.product((1, 2, 4, 8), range(6)):
        n = int(rng.integers(1, rng.choice([20, 300])))
        ids = DOCUMENTS[kind](rng, n).astype(f"i{width}")[None]
        queries = ids[:, int(rng.integers(0, n)) :]
        dense = queries[0][:, None] == ids[0]
        for rows in itertools.pairwise(sorted({0, *rng.integers(0, len(dense), 3).tolist()})):
            exact = kind in IN_PIECES
            params = segment_params(queries, ids)
            assert_looks(library, f"Segments{width}", params, dense, rows, exact=exact)


def test_a_look_takes_ids_for_equal_only_if_all_their_bits_are(library: Policies) -> None:
    ids = np.array([[5, 5, 5 + 2**32, 5 - 2**63, 5, 5]])
    for rows in ((0, 1), (0, 2), (0, 3), (2, 3), (3, 5), (0, 6)):
        dense = ids[0][:, None] == ids[0]
        params = segment_params(ids, ids)
        assert_looks(library, "Segments8", params, dense, rows, exact=False, block=1)
    assert library.look("Segments8", params, (6, 6), (2, 3), 1)[:2] == (range(2, 3), True)
    assert not library.look("Segments8", params, (6, 6), (0, 2), 1)[1]


@pytest.mark.parametrize("extents", [(3, 4), (1, 1), (3, 0), (0, 4)], ids=str)
def test_a_look_goes_on_where_arrays_of_ids_end(
    library: Policies, rng: np.random.Generator, extents: tuple[int, int]
) -> None:
    """Their last id is that of all positions beyond; none of those is read."""
    lengths = (6, 9)
    for _ in range(20):
        q, k = (
            inner(rng, np.sort(rng.integers(0, 3, (1, extent or n))), 7)
            for extent, n in zip(extents, lengths, strict=True)
        )
        dense = clamped(q[0][:, None] == k[0], *lengths)
        for rows in ((0, 2), (2, 6), (4, 5), (0, 6)):
            params = segment_params(q, k, extents)
            assert_looks(library, "Segments8", params, dense, rows, exact=True)


def test_a_look_joins_what_the_parts_of_a_mask_say(
    library: Policies, rng: np.random.Generator
) -> None:
    for _ in range(40):
        n = int(rng.integers(2, 40))
        ids = np.sort(rng.integers(0, 4, (2, n))).astype(np.int32)
        params = band_params(Band(right=0), n, n) + segment_params(ids, ids)
        b, first = int(rng.integers(0, 2)), int(rng.integers(0, n))
        rows = first, min(n, first + int(rng.integers(1, 8)))
        dense = (ids[b][:, None] == ids[b]) & Band(right=0).dense(n, n)
        assert_looks(library, "CausalDocuments", params, dense, rows, exact=True, batch=b)
        _, intervals, _ = library.look("CausalDocuments", params, (n, n), rows, 4, b)
        assert intervals == (ids[b, rows[0]] == ids[b, rows[1] - 1])

        more = np.sort(rng.integers(0, 3, (2, n))).astype(np.int8)
        params = segment_params(ids, ids) + params[: BAND.size] + segment_params(more, more)
        both = dense & (more[b][:, None] == more[b])
        assert_looks(library, "TwoDocuments", params, both, rows, exact=False, batch=b)
        keys, intervals, _ = library.look("TwoDocuments", params, (n, n), rows, 4, b)
        alike = all(x[b, rows[0]] == x[b, rows[1] - 1] for x in (ids, more))
        assert intervals == alike
        seen = np.flatnonzero(both[slice(*rows)].any(axis=0))
        assert not alike or (keys.start, keys.stop) == (seen[0], seen[-1] + 1)


def inner(rng: np.random.Generator, x: np.ndarray, outside: Any) -> np.ndarray:
    """Return x in the midst of other values."""
    storage = np.full([n + 4 for n in x.shape], outside, x.dtype)
    view = storage[tuple(slice(2, n + 2) for n in x.shape)]
    view[...] = x
    return view


def layouts(rng: np.random.Generator, draw: Any) -> list[np.ndarray]:
    """Return arrays that broadcast or are viewed as (2, 3, 5, 7), of a function of their shape."""
    shape = (2, 3, 5, 7)
    found = [
        np.broadcast_to(
            draw([n if kept else 1 for n, kept in zip(shape, axes, strict=True)]), shape
        )
        for axes in itertools.product((True, False), repeat=4)
    ]
    whole = draw(shape)
    found += [
        draw(shape[::-1]).transpose(),
        whole[::-1, :, ::-1, ::-1],
        draw((2, 3, 5, 14))[..., ::2],
        draw((4, 3, 10, 7))[::2, :, 1::2],
    ]
    return found


def test_a_boolean_mask_of_any_strides(library: Policies, rng: np.random.Generator) -> None:
    def draw(shape: Any) -> np.ndarray:
        seen = np.array(rng.integers(0, 2, shape, np.uint8) * rng.integers(1, 256, shape, np.uint8))
        return inner(rng, seen, 1)

    for seen in layouts(rng, draw):
        for b, h in np.ndindex(2, 3):
            kept = library.keep("DenseMask", pairs(seen), (5, 7), entry=(b, h))
            np.testing.assert_array_equal(kept, seen[b, h] != 0)
        assert_answers(library, "DenseMask", pairs(seen), seen[0, 0] != 0, exact=False)


def clamped(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Return a matrix whose last row and column go on."""
    return np.pad(x, ((0, rows - x.shape[0]), (0, columns - x.shape[1])), mode="edge")


@pytest.mark.parametrize(
    "extents", [(0, 0), (3, 0), (0, 4), (3, 4), (4, 6), (1, 1), (9, 9)], ids=str
)
def test_nothing_is_read_beyond_lengths_and_arrays(
    library: Policies, rng: np.random.Generator, extents: tuple[int, int]
) -> None:
    """Tiles reach beyond the lengths, sequences of unknown length beyond the arrays."""
    lengths, shape = (5, 7), (9, 12)
    rows, columns = (min(n, e or n) for n, e in zip(lengths, extents, strict=True))
    values = rng.standard_normal((1, 1, rows, columns)).astype(np.float32)
    bias = inner(rng, values, np.nan)
    got = library.apply("BiasFloat320", pairs(bias, extents), np.zeros(shape), lengths)
    np.testing.assert_array_equal(got, clamped(bias[0, 0], *shape))
    got = library.apply("BiasFloat321", pairs(bias, extents), np.zeros(shape), lengths)
    expected = np.pad(clamped(bias[0, 0], rows, columns), ((0, 9 - rows), (0, 0)), mode="edge")
    np.testing.assert_array_equal(got[:, :columns], expected)
    np.testing.assert_array_equal(got[:, columns:], 0)

    seen = inner(rng, rng.integers(0, 2, (1, 1, rows, columns), np.uint8), 1)
    for outside in (0, 1):
        storage = inner(rng, seen, outside)
        kept = library.keep("DenseMask", pairs(storage, extents), lengths, shape)
        np.testing.assert_array_equal(kept, clamped(seen[0, 0] != 0, *shape))

    q, k = (inner(rng, rng.integers(0, 2, (1, n)), 7) for n in (rows, columns))
    kept = library.keep("Segments8", segment_params(q, k, extents), lengths, shape)
    np.testing.assert_array_equal(kept, clamped(q[0][:, None] == k[0], *shape))


def test_all_is_the_intersection(library: Policies, rng: np.random.Generator) -> None:
    for _ in range(60):
        len_q, len_k = lengths = tuple(rng.integers(1, 12, 2).tolist())
        band = Band(*rng.integers(0, 9, 2).tolist(), str(rng.choice(ALIGNMENTS)))
        prefix = PrefixLM(rng.integers(0, len_k + 2, 2), str(rng.choice(ALIGNMENTS)))
        segments = Segments(*(np.sort(rng.integers(0, 2, (2, n))) for n in lengths))
        seen = (rng.random((2, 1, len_q, len_k)) < 0.8).astype(np.uint8)
        params = band_params(band, *lengths) + prefix_params(prefix.prefix, prefix.alignment)
        for b in range(2):
            both = band.dense(*lengths) & prefix.dense(*lengths, b)
            assert_answers(library, "AllOfTwo", params, both, exact=False, batch=b)
            every = both & segments.dense(*lengths, b) & (seen[b, 0] != 0)
            more = params + segment_params(segments.q, segments.k) + pairs(seen)
            assert_answers(library, "AllOfFour", more, every, exact=False, batch=b)


def test_all_skips_and_trusts_what_every_part_does(library: Policies) -> None:
    """Ranges are no wider than the narrowest part's, and whole is what all parts call whole."""
    lengths = (12, 12)
    band, prefix = Band(2, 3), PrefixLM(np.array([4]))
    params = band_params(band, *lengths) + prefix_params(prefix.prefix, prefix.alignment)
    own = (library.blocks("Window", params, lengths, 3),
           library.blocks("PrefixLM", params[BAND.size :], lengths, 3))  # fmt: skip
    joined = library.blocks("AllOfTwo", params, lengths, 3)
    np.testing.assert_array_equal(joined[..., [0, 2]], np.maximum(*own)[..., [0, 2]])
    np.testing.assert_array_equal(joined[..., [1, 3, 4]], np.minimum(*own)[..., [1, 3, 4]])
    assert joined[..., 4].any()
    assert not joined[..., 4].all()


# Scores


def test_identity_changes_no_bit(library: Policies) -> None:
    scores = np.array([[0.0, -0.0, 1e-42, np.inf, -np.inf, 3.5]], np.float32)
    for name in ("Identity", "ChainOfNothing"):
        got = library.apply(name, bytes(16), scores, (1, 6))
        assert got.tobytes() == scores.tobytes()


def softcap_params(cap: float, scale: float = 1.0) -> bytes:
    return _modifiers.softcap(cap, scale)


# Of tanh(x) / x = P / Q with 2 x = score * inverse, y = 4 x * x and 4 FMAs of positive terms each
# for P and Q: 4u + 4u; x is off by 2u and y by 5u, which count by half at most (y is no argument of
# more than a square root); the reciprocal 2u on a GPU, the two products 2u; P / Q itself 1u, and
# what is cut off at the end less than 1u.
SOFTCAP_ERROR = (4 + 4 + 2.5 + 2 + 2 + 1 + 1) * U
CAPS = (2.0**-126, 1e-20, 0.37, 1.0, 30.0, 50.0, 1e4, 1e30, 8.6e37, 1.7e38)


@pytest.mark.parametrize("cap", CAPS)
def test_softcap(library: Policies, rng: np.random.Generator, cap: float) -> None:
    """Relative to the result, so that small scores are as exact as large ones."""
    cap = float(np.float32(cap))
    x = np.concatenate([
        rng.uniform(-12, 12, 20000),
        np.exp(rng.uniform(-40, 4, 20000)) * rng.choice([-1, 1], 20000),
        np.linspace(8.9, 9.2, 1000), 2.0 ** np.arange(-30, 7),
    ])  # fmt: skip
    x = x[np.abs(x * cap) < float(np.finfo(np.float32).max)]
    scores = (x * cap).astype(np.float32)[None]
    scores = scores[np.abs(scores) >= 2.0**-126][None]
    got = library.apply("Softcap", softcap_params(cap), scores, scores.shape)
    expected = cap * np.tanh(scores.astype(np.float64) / cap)
    np.testing.assert_allclose(got, expected, rtol=SOFTCAP_ERROR, atol=0)
    mirrored = library.apply("Softcap", softcap_params(cap), -scores, scores.shape)
    np.testing.assert_array_equal(mirrored, -got)


def test_the_coefficients_of_softcap() -> None:
    """P / Q in fp64 is tanh(x) / x to 2^-25 up to the end, where tanh is 1 to 2^-24."""
    text = _jit.sources()["scores/softcap.cuh"]
    p, q = (
        np.array(
            re.search(rf"{name}\[5\] = {{(.*?)}}", text)[1].replace("f", "").split(","), np.float32
        )
        for name in "PQ"
    )
    end = float(re.search(r"END = (.*?)f;", text)[1])
    x = np.linspace(1e-6, end, 100001)
    y = 4 * x * x
    ratio = np.polyval(p[::-1].astype(float), y) / np.polyval(q[::-1].astype(float), y)
    np.testing.assert_allclose(ratio * x, np.tanh(x), rtol=2.0**-25, atol=0)
    assert 1 - np.tanh(end) < 2.0**-24


@pytest.mark.parametrize("cap", CAPS)
def test_softcap_of_special_scores(library: Policies, cap: float) -> None:
    """Infinite and huge scores are at the cap, zeros keep their sign, NaN stays."""
    scores = np.array([[0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38]], np.float32)
    got = library.apply("Softcap", softcap_params(cap), scores, scores.shape)[0]
    assert got[:2].tobytes() == scores[0, :2].tobytes()
    assert np.isnan(got[4])
    if cap < 1e37:  # else not all of them are far beyond it
        at_cap = got[[2, 3, 5, 6]] / np.float64(np.float32(cap))
        np.testing.assert_allclose(at_cap, [1, -1, 1, -1], rtol=SOFTCAP_ERROR)
    assert np.isfinite(got[[2, 3, 5, 6]]).all()


def alibi_params(slopes: np.ndarray, alignment: str) -> bytes:
    return ALIBI.pack(address(slopes), *strides(slopes), alignment == "bottom_right", -1)


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_alibi(
    library: Policies, rng: np.random.Generator, lengths: tuple[int, int], alignment: str
) -> None:
    storage = np.array(rng.standard_normal((3, 8)), np.float32)
    len_q, len_k = lengths
    scores = rng.standard_normal(lengths).astype(np.float32)
    i, j = np.ogrid[:len_q, :len_k]
    distance = np.abs(i + (len_k - len_q if alignment == "bottom_right" else 0) - j)
    for slopes in (storage, storage[::-1, ::2], np.broadcast_to(storage[1], (3, 8))):
        for b, h in np.ndindex(slopes.shape):
            params = alibi_params(slopes, alignment)
            expected = scores - slopes[b, h] * distance.astype(np.float32)
            for name in ("Alibi", "ChainOfOne"):
                got = library.apply(name, params, scores, lengths, (b, h))
                np.testing.assert_array_equal(got, expected)


def test_alibi_of_far_positions(library: Policies) -> None:
    """Differences of positions are rounded once, but for columns beside each other."""
    slopes = np.array([[0.5]], np.float32)
    for q, k, len_q, len_k in (
        (2**30, 2**30 - 5, 2**31 - 1, 2**31 - 1),
        (0, 2**26 + 1, 1, 2**27),
        (2**25, 2**25 + 1, 2**26, 2**26),
        (2**31 - 2, 0, 2**31 - 1, 9),
    ):
        for alignment in ALIGNMENTS:
            d = len_k - len_q if alignment == "bottom_right" else 0
            params = alibi_params(slopes, alignment)
            got = library.apply("Alibi", params, np.zeros((1, 1)), (len_q, len_k), start=(q, k))
            assert got == np.float32(-0.5) * np.float32(abs(q + d - k))
            got = library.apply("Alibi", params, np.zeros((1, 16)), (len_q, len_k), start=(q, k))
            expected = -0.5 * np.abs(q + d - k - np.arange(16.0))
            np.testing.assert_allclose(got[0], expected, rtol=U, atol=0.5 * U * abs(q + d - k))


ELEMENTS = {
    "Float16": np.float16, "Bfloat16": ml_dtypes.bfloat16,
    "Float32": np.float32, "Float64": np.float64,
}  # fmt: skip


@pytest.mark.parametrize("element", ELEMENTS)
def test_bias_of_any_type_and_strides(
    library: Policies, rng: np.random.Generator, element: str
) -> None:
    """The bias is rounded to fp32, then added."""
    scores = rng.standard_normal((5, 7)).astype(np.float32)

    def draw(shape: Any) -> np.ndarray:
        values = rng.standard_normal(shape) * np.exp(rng.uniform(-9, 9, shape))
        return inner(rng, values.astype(ELEMENTS[element]), np.nan)

    for bias in layouts(rng, draw):
        read = int(bias.strides[3] == bias.itemsize)
        for b, h, way in np.ndindex(2, 3, read + 1):
            got = library.apply(f"Bias{element}{way}", pairs(bias), scores, (5, 7), (b, h))
            np.testing.assert_array_equal(got, scores + bias[b, h].astype(np.float32))


@pytest.mark.parametrize("element", ["Float16", "Bfloat16", "Float32"])
@pytest.mark.parametrize("length", [1, 4, 5, 6])
def test_pairs_of_a_bias_are_read_as_one(
    library: Policies, rng: np.random.Generator, element: str, length: int
) -> None:
    """Up to the pair of the last key, whatever is beyond."""
    bias = rng.standard_normal((2, 3, 5, 6)).astype(ELEMENTS[element])
    shape = (7, 20)
    pair = -(-length // 2) * 2
    for extents in ((0, 0), (5, 6)):
        for b, h in np.ndindex(2, 3):
            params = pairs(bias, extents)
            got = library.apply(f"Bias{element}2", params, np.zeros(shape), (5, length), (b, h))
            expected = clamped(bias[b, h].astype(np.float32), 7, 6)
            np.testing.assert_array_equal(got[:, :pair], expected[:, :pair])
            np.testing.assert_array_equal(got[:, pair:], 0)


@pytest.mark.parametrize("element", ["Float16", "Bfloat16"])
def test_every_number_of_16_bits_is_widened(library: Policies, element: str) -> None:
    bias = np.arange(2**16, dtype=np.uint16).view(ELEMENTS[element])[None, None, None]
    for read in (0, 1, 2):
        got = library.apply(f"Bias{element}{read}", pairs(bias), np.zeros((1, 2**16)), (1, 2**16))
        np.testing.assert_array_equal(got[0], bias[0, 0, 0].astype(np.float32))


def test_the_extremes_of_a_bias_stay(library: Policies) -> None:
    """Its least number is no infinity: it hides nothing."""
    least = float(np.finfo(np.float32).min)
    for element in ("Float32", "Float64"):
        bias = np.array([[[[least, -np.inf, np.inf, np.nan, 1 + 2.0**-24]]]], ELEMENTS[element])
        got = library.apply(f"Bias{element}1", pairs(bias), np.zeros((1, 5)), (1, 5))[0]
        np.testing.assert_array_equal(got, bias[0, 0, 0].astype(np.float32))


# Quick arithmetic


NATURAL, BASE_2 = 1.0, float(np.float32(np.log2(np.e)))
DOES_NOT_APPLY, DOES_NOT_HOLD, HOLDS = range(3)


def test_the_series_of_softcap() -> None:
    """In fp64 it is tanh(x) / x to 5.6e-7, up to the end and no further than needed."""
    x = np.linspace(1e-6, _modifiers.NEAR_END, 100001)
    series = np.polyval(_modifiers.NEAR[::-1], x * x)
    np.testing.assert_allclose(series * x, np.tanh(x), rtol=5.6e-7, atol=0)


# The series and its rounding: the first coefficient, the last sum and the product with the score
# u each, what comes before them counts by a tenth, 5u; scale and unit u each.
SERIES_ERROR = 5.6e-7 + (3 + 0.5 + 2) * U


@pytest.mark.parametrize("unit", [NATURAL, BASE_2])
@pytest.mark.parametrize(
    ("cap", "scale"), [(1.0, 1.0), (30.0, 0.088), (50.0, -0.3), (1e3, 1.0), (1e-3, 1e-2)]
)
def test_a_quick_softcap(
    library: Policies, rng: np.random.Generator, cap: float, scale: float, unit: float
) -> None:
    """Up to half of the cap and 128 it is the series, and one score beyond is noticed."""
    end = min(cap / 2, 128) / abs(scale)
    scores = (rng.uniform(-0.999, 0.999, (16, 32)) * end).astype(np.float32)
    params = softcap_params(cap, scale)
    said, got = library.quick("Softcap", params, scores, (16, 32), scale=scale, unit=unit)
    expected = cap * np.tanh(scale * scores.astype(np.float64) / cap) * unit
    assert said == HOLDS
    np.testing.assert_allclose(got, expected, rtol=SERIES_ERROR, atol=0)
    for beyond in (1.001 * end, -1.001 * end, 1e30, -np.inf):
        scores[rng.integers(16), rng.integers(32)] = beyond
        said, _ = library.quick("Softcap", params, scores, (16, 32), scale=scale, unit=unit)
        assert said == DOES_NOT_HOLD
        scores[np.abs(scores) > end] = 0


@pytest.mark.parametrize(
    ("cap", "scale"), [(1e-30, 1.0), (1e30, 1e-3), (1.0, 0.0), (2.0**-126, 1e30), (30.0, 1e-300)]
)
def test_a_softcap_whose_series_is_out_of_range_is_never_quick(
    library: Policies, cap: float, scale: float
) -> None:
    said, _ = library.quick("Softcap", softcap_params(cap, scale), np.zeros((16, 32)), (16, 32))
    assert said == DOES_NOT_APPLY


@pytest.mark.parametrize("unit", [NATURAL, BASE_2])
@pytest.mark.parametrize("slope", [0.5, -3.0, 0.0])
def test_a_quick_alibi(
    library: Policies, rng: np.random.Generator, slope: float, unit: float
) -> None:
    """On either side of the diagonal, never across it."""
    slopes = np.array([[slope]], np.float32)
    lengths, scale = (300, 400), 0.3
    scores = rng.standard_normal((16, 32)).astype(np.float32)
    applied = []
    for alignment, q, k in itertools.product(ALIGNMENTS, range(0, 288, 16), range(0, 384, 32)):
        params = alibi_params(slopes, alignment)
        said, got = library.quick("Alibi", params, scores, lengths, (q, k), scale=scale, unit=unit)
        i, j = np.ogrid[q : q + 16, k : k + 32]
        ahead = i + (100 if alignment == "bottom_right" else 0) - j
        assert said == (HOLDS if (ahead >= 0).all() or (ahead <= 0).all() else DOES_NOT_APPLY)
        if said == HOLDS:
            product, fall = scores * np.float64(np.float32(scale)) * unit, slope * unit * abs(ahead)
            # Scale, unit and product u each; the slope u, its products with the first distance and
            # with a column, of 31 at most, u each, the two sums u each.
            bound = U * (3 * abs(product) + 5 * abs(slope) * unit * (abs(ahead) + 31))
            assert (abs(got - (product - fall)) <= bound).all()
            applied.append(bool((ahead >= 0).all()))
    assert set(applied) == {False, True}


@pytest.mark.parametrize("slope", [1e29, -1e37, np.inf, np.nan])
def test_an_alibi_whose_parts_may_overflow_is_never_quick(library: Policies, slope: float) -> None:
    params = alibi_params(np.array([[slope]], np.float32), "top_left")
    said, _ = library.quick("Alibi", params, np.zeros((16, 32)), (300, 400), (200, 0))
    assert said == DOES_NOT_APPLY


@pytest.mark.parametrize("unit", [NATURAL, BASE_2])
@pytest.mark.parametrize("element", ["Float16", "Bfloat16"])
def test_a_quick_bias(
    library: Policies, rng: np.random.Generator, element: str, unit: float
) -> None:
    """Nothing beyond the last pair is read; infinities and NaN stay."""
    bias = rng.standard_normal((1, 1, 20, 70)).astype(ELEMENTS[element])
    bias[..., 3, 2:5] = np.inf, -np.inf, np.nan
    scores = rng.standard_normal((16, 32)).astype(np.float32)
    name, params = f"Bias{element}2", pairs(bias)
    for q, k in ((0, 0), (4, 38), (16, 64)):
        said, got = library.quick(name, params, scores, (20, 70), (q, k), scale=0.3, unit=unit)
        assert said == HOLDS
        added = np.zeros((16, 32))
        rows, columns = np.minimum(np.arange(q, q + 16), 19), np.arange(k, min(k + 32, 70))
        added[:, : columns.size] = bias[0, 0][np.ix_(rows, columns)].astype(np.float64)
        product = scores * np.float64(np.float32(0.3)) * unit
        bound = U * (3 * abs(product) + 2 * abs(added) * unit)
        expected = product + added * unit
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(got[~finite], expected[~finite])
        assert (abs(got[finite] - expected[finite]) <= bound[finite]).all()


def test_a_quick_chain(library: Policies, rng: np.random.Generator) -> None:
    """A cap of the scaled scores, then ALiBi, then the bias."""
    cap, slope, scale = 4.0, 0.25, 0.5
    slopes = np.array([[slope]], np.float32)
    bias = rng.standard_normal((1, 1, 50, 40)).astype(ml_dtypes.bfloat16)
    scores = rng.uniform(-3.9, 3.9, (16, 32)).astype(np.float32)
    params = softcap_params(cap, scale) + alibi_params(slopes, "top_left") + pairs(bias)
    said, got = library.quick(
        "QuickChain", params, scores, (50, 40), (32, 0), scale=scale, unit=BASE_2
    )
    capped = cap * np.tanh(scale * scores.astype(np.float64) / cap) * BASE_2
    i, j = np.ogrid[32:48, :32]
    fall, added = slope * BASE_2 * (i - j), bias[0, 0, 32:48, :32].astype(np.float64) * BASE_2
    bound = SERIES_ERROR * abs(capped) + U * (6 * (fall + slope * BASE_2 * 31) + 2 * abs(added))
    assert said == HOLDS
    assert (abs(got - (capped - fall + added)) <= bound + U * abs(capped)).all()
    across, _ = library.quick("QuickChain", params, scores, (50, 40), (0, 0), scale=scale)
    scores[5, 7] = 4.1
    beyond, _ = library.quick("QuickChain", params, scores, (50, 40), (32, 0), scale=scale)
    assert (across, beyond) == (DOES_NOT_APPLY, DOES_NOT_HOLD)


def test_chains_go_in_order(library: Policies, rng: np.random.Generator) -> None:
    cap = softcap_params(2.0)
    scores = rng.uniform(-9, 9, (5, 7)).astype(np.float32)
    bias = rng.uniform(-9, 9, (1, 1, 5, 7)).astype(np.float32)
    slopes = np.array([[0.75]], np.float32)

    def apply(name: str, params: bytes, x: np.ndarray) -> np.ndarray:
        return library.apply(name, params, x, (5, 7))

    capped, biased = apply("Softcap", cap, scores), scores + bias[0, 0]
    cap_first = apply("CapThenBias", cap + pairs(bias), scores)
    np.testing.assert_array_equal(cap_first, capped + bias[0, 0])
    cap_last = apply("BiasThenCap", pairs(bias) + cap, scores)
    np.testing.assert_array_equal(cap_last, apply("Softcap", cap, biased))
    assert np.abs(cap_first - cap_last).max() > 1

    narrow = bias.astype(ml_dtypes.bfloat16)
    alibi = alibi_params(slopes, "bottom_right")
    three = apply("ChainOfThree", cap + alibi + pairs(narrow), scores)
    expected = apply("Alibi", alibi, capped) + narrow[0, 0].astype(np.float32)
    np.testing.assert_array_equal(three, expected)
