"""Dropout: the generator's known answers, the mask's definition, and its use in attention."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyflash import _philox, reference
from cupyflash.errors import InvalidArgument, InvalidType

WORD = 2**32 - 1
KNOWN = {  # (counter, key): answer; the published test vectors of Philox4x32-10
    ((0, 0, 0, 0), (0, 0)): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ((WORD,) * 4, (WORD,) * 2): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
    ): (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
}


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 on Python integers."""
    x, k = list(counter), list(key)
    for _ in range(10):
        left, right = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [right >> 32 ^ x[1] ^ k[0], right & WORD, left >> 32 ^ x[3] ^ k[1], left & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return x


def kept(seed: int, offset: int, p: float, b: int, h: int, i: int, j: int) -> bool:
    """Whether one score is kept, by the letter of the definition."""
    key = (seed + offset * 0x9E3779B97F4A7C15) % 2**64
    counter = [8 * (j >> 5) + (j & 7), 8 * (i >> 4) + (i & 7), h, b]
    x = philox([word & WORD for word in counter], [key & WORD, key >> 32])
    e = 4 * ((i >> 3) & 1) + ((j >> 3) & 3)
    return (x[e >> 1] >> 16 * (e & 1)) & 0xFFFF >= round(65536 * p)


@pytest.mark.parametrize(("question", "answer"), KNOWN.items(), ids=range(len(KNOWN)))
def test_known_answers(question: Any, answer: tuple[int, ...]) -> None:
    counter, key = question
    assert tuple(int(word) for word in _philox.philox4x32(counter, key)) == answer
    assert tuple(philox(counter, key)) == answer


@pytest.mark.parametrize(
    ("rng_state", "b", "h", "i", "j"),
    [
        ((7, 0), 0, 0, 0, 0),
        ((2**64 - 1, 2**64 - 1), 3, 5, 17, 33),
        ((7, 3), 1, 2, 65530, 131064),
        ((0, 1), 70000, 66000, 2**31 - 5, 2**31 - 9),
        ((1, 2), 0, 0, 2**33 - 16, 2**33 + 15),  # counters are 32-bit words
    ],
)
def test_the_definition_of_the_mask(
    rng_state: tuple[int, int], b: int, h: int, i: int, j: int
) -> None:
    rows, keys = range(i, i + 21), range(j, j + 45)
    tile = _philox.keep(rng_state, 0.3, b, h, rows, keys)
    expected = [[kept(*rng_state, 0.3, b, h, row, key) for key in keys] for row in rows]
    np.testing.assert_array_equal(tile, expected)


def test_tiles_are_parts_of_the_mask() -> None:
    mask = _philox.dropout_mask((9, 1), 0.5, (2, 3, 70, 90))
    for rows, keys in [
        (range(70), range(90)),
        (range(3, 50), range(31, 33)),
        (range(16, 17), range(64, 90)),
        (range(9, 9), range(4)),
    ]:
        tile = _philox.keep((9, 1), 0.5, 1, 2, rows, keys)
        np.testing.assert_array_equal(
            tile, mask[1, 2, rows.start : rows.stop, keys.start : keys.stop]
        )
    assert _philox.dropout_mask((9, 1), 0.5, (2, 0, 3, 4)).shape == (2, 0, 3, 4)
    assert _philox.dropout_mask((9, 1), 0.5, (1, 1, 3, 0)).shape == (1, 1, 3, 0)
    smaller = _philox.dropout_mask((9, 1), 0.5, (1, 2, 33, 50))
    np.testing.assert_array_equal(smaller, mask[:1, :2, :33, :50])


def test_masks_of_heads_batches_seeds_and_offsets_differ() -> None:
    masks = [*_philox.dropout_mask((1, 0), 0.5, (3, 3, 32, 32)).reshape(9, -1)]
    masks += [
        _philox.dropout_mask(state, 0.5, (1, 1, 32, 32)).ravel() for state in [(2, 0), (1, 1)]
    ]
    for n, mask in enumerate(masks):
        assert all(0.3 < (mask == other).mean() < 0.7 for other in masks[:n])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate_within_five_sigma(p: float) -> None:
    mask = _philox.dropout_mask((123, 4), p, (1, 4, 512, 512))
    probability = 1 - round(65536 * p) / 65536
    sigma = (probability * (1 - probability) / mask.size) ** 0.5
    assert abs(mask.mean() - probability) < 5 * sigma
    for axis in (2, 3):  # neighbours are independent
        a, b = mask.swapaxes(axis, 3)[..., 1:], mask.swapaxes(axis, 3)[..., :-1]
        assert abs((a & b).mean() - probability**2) < 5 * (probability / a.size) ** 0.5


def test_threshold_and_rescale() -> None:
    assert [_philox.threshold(p) for p in (0, 0.5, 1, 1 / 65536, 0.3)] == [
        0,
        32768,
        65536,
        1,
        19661,
    ]
    assert [_philox.threshold(n / 131072) for n in (1, 3, 5)] == [0, 2, 2]  # half to even
    assert _philox.threshold(np.float32(0.25)) == 16384
    assert [_philox.rescale(p) for p in (0, 0.5, 0.75, 1)] == [1, 2, 4, 0]
    for p in (-0.1, 1.0001, float("nan"), float("inf")):
        with pytest.raises(InvalidArgument, match="`dropout_p` must be from 0 to 1"):
            _philox.threshold(p)


def test_forms_of_the_state() -> None:
    seed, offset = 0x0123456789ABCDEF, 0xFEDCBA9876543210
    words = [0x89ABCDEF, 0x01234567, 0x76543210, 0xFEDCBA98]
    same = [
        (seed, offset),
        [np.uint64(seed), offset - 2**64],
        np.array([seed, offset], np.uint64),
        np.array([seed, offset], np.uint64).view(np.int64),
        np.array(words, np.uint32),
    ]
    for state in same:
        assert _philox.seed_offset(state) == (seed, offset)
    assert _philox.seed_offset(np.array([5, 6], np.uint32)) == (5, 6)
    wrong = [
        None,
        7,
        (1,),
        (1, 2, 3),
        (1.0, 2),
        "ab",
        np.zeros(2),
        np.zeros(3, int),
        np.zeros(4, int),
    ]
    for state in wrong:
        with pytest.raises(InvalidType, match="`rng_state`"):
            _philox.seed_offset(state)
    for state in [(2**64, 0), (0, -(2**63) - 1)]:
        with pytest.raises(InvalidArgument, match="`rng_state`"):
            _philox.seed_offset(state)


# In attention


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


Q, K, V = normal(1, 2, 40, 4, 8), normal(2, 2, 50, 2, 8), normal(3, 2, 50, 2, 6)
STATE = (77, 3)


def test_weights_are_dropped_and_rescaled_and_the_lse_is_not() -> None:
    identity = np.eye(50)[None, :, None].repeat(2, 0).repeat(2, 2)
    weights, lse = reference.attention(Q, K, identity)
    dropped, lse_dropped = reference.attention(Q, K, identity, dropout_p=0.25, rng_state=STATE)
    mask = _philox.dropout_mask(STATE, 0.25, (2, 4, 40, 50)).swapaxes(1, 2)
    np.testing.assert_allclose(dropped, weights * mask / 0.75, rtol=1e-14)
    assert (lse == lse_dropped).all()
    again, _ = reference.attention(Q, K, identity, dropout_p=0.25, rng_state=STATE)
    other, _ = reference.attention(Q, K, identity, dropout_p=0.25, rng_state=(77, 4))
    assert (again == dropped).all()
    assert (other != dropped).any()


@pytest.mark.parametrize("p", [0.0, 2**-18, 1.0])
def test_nothing_and_everything_dropped(p: float) -> None:
    out, lse = reference.attention(Q, K, V, dropout_p=p, rng_state=STATE)
    undropped, lse_undropped = reference.attention(Q, K, V)
    np.testing.assert_array_equal(out, undropped if p < 1 else 0)
    np.testing.assert_array_equal(lse, lse_undropped)
    grads = reference.attention_backward(undropped, Q, K, V, dropout_p=p, rng_state=STATE)
    expected = reference.attention_backward(undropped, Q, K, V)
    for grad, of_undropped in zip(grads[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(grad, of_undropped if p < 1 else 0)


def test_packing_and_layout_cannot_be_seen() -> None:
    options: dict[str, Any] = {"dropout_p": 0.5, "rng_state": STATE, "causal": True}
    used_q, used_k = [40, 13], [21, 50]
    padded, _ = reference.attention(Q, K, V, seqused_q=used_q, seqused_k=used_k, **options)
    q = np.concatenate([Q[b, :n] for b, n in enumerate(used_q)])
    k, v = (np.concatenate([x[b, :n] for b, n in enumerate(used_k)]) for x in (K, V))
    packed, _ = reference.attention_varlen(q, k, v, [0, 40, 53], [0, 21, 71], **options)
    np.testing.assert_array_equal(packed[:40], padded[0])
    np.testing.assert_array_equal(packed[40:], padded[1, :13])
    swapped = (x.swapaxes(1, 2) for x in (Q, K, V))
    out, _ = reference.attention(*swapped, layout="bhsd", **options)
    np.testing.assert_array_equal(out.swapaxes(1, 2), reference.attention(Q, K, V, **options)[0])


def test_plain_rounds_weights_before_their_rescale() -> None:
    bfloat16 = ml_dtypes.bfloat16
    q, k = np.zeros((1, 1, 1, 2), bfloat16), np.zeros((1, 50, 1, 2), bfloat16)
    v = np.eye(50, dtype=np.float32).astype(bfloat16)[None, :, None]
    out, _ = reference.plain(q, k, v, dropout_p=0.25, rng_state=STATE)
    weight = np.float32(1 / 50).astype(bfloat16).astype(np.float32)
    kept = (weight * np.float32(4 / 3)).astype(bfloat16)
    assert kept != np.float32(4 / 150).astype(bfloat16)
    mask = _philox.dropout_mask(STATE, 0.25, (1, 1, 1, 50))[0, 0, 0]
    np.testing.assert_array_equal(out[0, 0, 0], np.where(mask, kept, 0).astype(bfloat16))
