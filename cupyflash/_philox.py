"""Dropout as a pure function of (seed, offset, b, h, i, j): Philox4x32-10 in vectorised NumPy.

One Philox call serves eight scores, two rows by four columns: one thread's accumulator fragment.

    key      seed + offset * 0x9E3779B97F4A7C15  (mod 2^64)
    counter  (8 * (j >> 5) + (j & 7),  8 * (i >> 4) + (i & 7),  h,  b)
    element  e = 4 * ((i >> 3) & 1) + ((j >> 3) & 3):  the 16 bits of word e >> 1, low half first
    keep     iff those 16 bits, as an integer, are at least T = round_half_even(65536 * p)

b is the batch entry or the sequence, h the query head, i and j the positions within the sequence:
layout, packing, tiles and splits cannot be seen in the mask.
"""

import math
import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from .errors import InvalidArgument, InvalidType, shown

__all__ = ["dropout_mask", "keep", "philox4x32", "rescale", "seed_offset", "threshold"]

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
GOLDEN = 0x9E3779B97F4A7C15
ROUNDS = 10
LOW = 0xFFFFFFFF


def philox4x32(counter: Sequence[Any], key: tuple[int, int]) -> list[np.ndarray]:
    """Return the four words of Philox4x32-10.

    Parameters
    ----------
    counter : sequence of four integers or integer arrays
        The counter's 32-bit words; arrays broadcast against each other.
    key : tuple of two ints
        The key's low and high word.

    Returns
    -------
    list of four uint32 arrays
    """
    c0: Any
    c2: Any
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) & np.uint64(LOW) for word in counter)
    for turn in range(ROUNDS):
        k0, k1 = ((word + turn * step) & LOW for word, step in zip(key, WEYL, strict=True))
        product0, product2 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1 = (product2 >> 32) ^ c1 ^ k0, product2 & LOW
        c2, c3 = (product0 >> 32) ^ c3 ^ k1, product0 & LOW
    return [word.astype(np.uint32) for word in np.broadcast_arrays(c0, c1, c2, c3)]


def seed_offset(rng_state: Any) -> tuple[int, int]:
    """Read a random state as (seed, offset), both taken mod 2^64.

    Parameters
    ----------
    rng_state : pair of ints, or ndarray
        An array is int64, uint64 or uint32 of shape (2,), or uint32 of shape (4,): the low and high
        words of the seed, then of the offset.
    """
    if not isinstance(rng_state, np.ndarray):
        try:
            if isinstance(rng_state, Mapping | Set) or any(isinstance(n, bool) for n in rng_state):
                raise TypeError
            seed, offset = (operator.index(number) for number in rng_state)
        except (TypeError, ValueError):
            raise InvalidType(
                f"`rng_state` must be two integers (seed, offset), got {shown(rng_state)}"
            ) from None
        if not all(-(2**63) <= number < 2**64 for number in (seed, offset)):
            raise InvalidArgument(f"`rng_state` must fit 64 bits, got {shown((seed, offset))}")
    elif rng_state.dtype == np.uint32 and rng_state.shape == (4,):
        low, high, offset_low, offset_high = rng_state.tolist()
        seed, offset = low | high << 32, offset_low | offset_high << 32
    elif rng_state.dtype in (np.int64, np.uint64, np.uint32) and rng_state.shape == (2,):
        seed, offset = rng_state.tolist()
    else:
        raise InvalidType(
            "`rng_state` must be int64 or uint64 of shape (2,), or uint32 of shape (2,) or (4,), "
            f"got {rng_state.dtype} of shape {rng_state.shape}"
        )
    return seed % 2**64, offset % 2**64


def threshold(p: float, name: str = "dropout_p") -> int:
    """Return T, the number of the 65536 values of a 16-bit draw that drop a score."""
    try:
        chance = math.nan if isinstance(p, str | bytes | bool) else float(p)
    except (TypeError, ValueError, OverflowError):
        chance = math.nan
    if not 0.0 <= chance <= 1.0:
        raise InvalidArgument(f"`{name}` must be from 0 to 1, got {shown(p)}")
    return round(65536 * chance)


def rescale(p: float) -> float:
    """Return the factor of the kept scores, 65536 / (65536 - T), or 0 where none is kept."""
    kept = 65536 - threshold(p)
    return 65536 / kept if kept else 0.0


def keep(rng_state: Any, p: float, b: int, h: int, i_range: range, j_range: range) -> np.ndarray:
    """Return which scores of one tile dropout keeps.

    Parameters
    ----------
    rng_state : pair of ints, or ndarray
        See `seed_offset`.
    p : float
        Probability that a score is dropped.
    b, h : int
        Batch entry (or sequence) and query head.
    i_range, j_range : range
        Query and key positions of the tile, of step 1.

    Returns
    -------
    bool array (len(i_range), len(j_range))
    """
    seed, offset = seed_offset(rng_state)
    key = (seed + offset * GOLDEN) % 2**64
    # Whole fragments of 16 rows by 32 columns around the tile: their counters are plain ranges.
    first_i, end_i = i_range.start >> 4, -(-i_range.stop // 16)
    first_j, end_j = j_range.start >> 5, -(-j_range.stop // 32)
    rows = np.arange(8 * first_i, 8 * end_i)[:, None]
    columns = np.arange(8 * first_j, 8 * end_j)
    words = np.stack(philox4x32((columns, rows, h, b), (key & LOW, key >> 32)), axis=-1)
    draws = words.astype("<u4", copy=False).view("<u2")
    # (i block, i & 7, j block, j & 7, bit 3 of i, bits 3 and 4 of j) into the order of positions
    draws = draws.reshape(end_i - first_i, 8, end_j - first_j, 8, 2, 4).transpose(0, 4, 1, 2, 5, 3)
    draws = draws.reshape(16 * (end_i - first_i), 32 * (end_j - first_j))
    skip_i, skip_j = i_range.start - 16 * first_i, j_range.start - 32 * first_j
    tile = draws[skip_i : skip_i + len(i_range), skip_j : skip_j + len(j_range)]
    return tile >= threshold(p)


def dropout_mask(rng_state: Any, p: float, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Return the dropout mask that attention uses: True where a score is kept.

    Parameters
    ----------
    rng_state : pair of ints, or ndarray
        (seed, offset), or a NumPy array of them.
    p : float
        Probability that a score is dropped, rounded to a multiple of 1/65536.
    shape : tuple of four ints
        (batch, query heads, len_q, len_k).

    Returns
    -------
    bool array of that shape
    """
    seed_offset(rng_state)
    threshold(p, "p")
    try:
        batch, heads, len_q, len_k = map(operator.index, shape)
        mask = np.empty((batch, heads, len_q, len_k), bool)
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"`shape` must be four sizes (batch, heads_q, len_q, len_k), got {shown(shape)}"
        ) from None
    for b in range(batch):
        for h in range(heads):
            mask[b, h] = keep(rng_state, p, b, h, range(len_q), range(len_k))
    return mask
