"""A tile of scores on NumPy, queries x keys of some heads: what both passes make of it.

    s = mask(bias(ALiBi(softcap(scale Q K^T))))

Memory of every kind is read here: the arrays of a call are views with one axis for the heads of k
and one for the query heads within each.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from . import _philox
from .masks import Band, Mask

__all__ = [
    "Call", "Heads", "Scratch", "Tile", "kept", "load", "scaled", "score", "scores_of", "seen_keys",
    "transpose",
]  # fmt: skip

# In a tile of few keys a single rounding shows, so it is computed as the formula is written; in a
# wider one roundings average out, and the faster of two ways is taken.
FEW_KEYS = 512
PAD = 16  # a power of two from row to row would put whole columns into one set of a cache
AMORTIZED = 64  # uses of a row of k from which on it pays to copy it for BLAS

Heads = tuple[slice, slice, slice]  # batch entries; heads of k; query heads within a head of k


@dataclass(frozen=True)
class Call:
    """Sequences of equal lengths, as views; a query head is (head of k, member of its group)."""

    q: np.ndarray  # [batch, heads_k, group, len_q, head_dim]
    k: np.ndarray  # [batch, heads_k, 1, len_k, head_dim]
    v: np.ndarray  # [batch, heads_k, 1, len_k, head_dim_v]
    out: np.ndarray  # [batch, heads_k, group, len_q, head_dim_v]
    lse: np.ndarray | None  # [batch, heads_k, group, len_q]
    first: int  # the number of the first of the sequences
    band: Band
    masks: tuple[Mask, ...]  # beside the band
    scale: float
    softcap: float
    slopes: np.ndarray | None  # [batch, heads_k, group, 1, 1]
    bias: np.ndarray | None  # [batch, heads_k, group, len_q, len_k], stride 0 where broadcast
    mask: np.ndarray | None  # likewise
    sink: np.ndarray | None  # [batch, heads_k, group, 1, 1]
    dropout_p: float
    rng_state: Any
    q_descale: np.ndarray | None  # [batch, heads_k, 1, 1, 1]
    k_descale: np.ndarray | None
    v_descale: np.ndarray | None
    dtype: np.dtype  # of all arithmetic

    # The fields by what their axes are.
    QUERIES: ClassVar[tuple[str, ...]] = ("q", "out", "lse")
    KEYS: ClassVar[tuple[str, ...]] = ("k", "v")
    SCORES: ClassVar[tuple[str, ...]] = ("bias", "mask")
    ENTRIES: ClassVar[tuple[str, ...]] = ("slopes", "sink", "q_descale", "k_descale", "v_descale")

    @property
    def lengths(self) -> tuple[int, int]:
        """How many queries and keys a sequence has."""
        return self.q.shape[3], self.k.shape[3]

    @cached_property
    def scales_q(self) -> bool:
        """Whether `scale` is a power of two, by which q is multiplied without rounding."""
        return abs(math.frexp(self.scale)[0]) == 0.5

    @cached_property
    def drops(self) -> bool:
        """Whether dropout drops anything."""
        return _philox.threshold(self.dropout_p) > 0

    @cached_property
    def rescale(self) -> Any:
        """The factor of the weights that dropout keeps."""
        return self.dtype.type(_philox.rescale(self.dropout_p))


class Tile(NamedTuple):
    """Queries `i` x keys `j` of some heads."""

    heads: Heads
    i: range
    j: range


class Scratch:
    """Tiles of scores of one thread: memory that stays from tile to tile."""

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype
        self._memory: dict[int, np.ndarray] = {}

    def tile(self, shape: tuple[int, ...], slot: int = 0) -> np.ndarray:
        """Return an uninitialised array, the rows of a wide one `PAD` elements apart.

        It lives until the slot is taken again.
        """
        *rows, keys = shape
        width = keys if keys <= FEW_KEYS else keys + PAD
        size = math.prod(rows) * width
        memory = self._memory.get(slot)
        if memory is None or memory.size < size:
            memory = self._memory[slot] = np.empty(size, self._dtype)
        return memory[:size].reshape(*rows, width)[..., :keys]


def seen_keys(call: Call, sequences: slice, i: range) -> range:
    """Return the range of keys that some of the queries see, in one of the sequences at least."""
    begin, end = call.band.keys(i.start, i.stop, *call.lengths)
    for mask in call.masks:
        spans = [
            mask.keys(i.start, i.stop, *call.lengths, call.first + b)
            for b in range(sequences.start, sequences.stop)
        ]
        begin = max(begin, min(span[0] for span in spans))
        end = min(end, max(span[1] for span in spans))
    return range(begin, end)


def load(x: np.ndarray, dtype: np.dtype, uses: int) -> np.ndarray:
    """Return a tile of keys in the type of the arithmetic; rows that BLAS takes stay in place."""
    row, column = x.strides[-2:]
    in_place = column == x.itemsize and row >= column * x.shape[-1]
    if x.dtype == dtype and in_place and uses < AMORTIZED:
        return x
    return x.astype(dtype, order="C")


def scaled(x: np.ndarray, descale: np.ndarray | None, heads: Heads) -> np.ndarray:
    """Return x times what fp8 inputs are multiplied by."""
    return x if descale is None else x * descale[heads[:2]]


def transpose(k: np.ndarray) -> np.ndarray:
    """Return K^T with rows `PAD` elements apart, copied in blocks of a first-level cache."""
    *heads, keys, head_dim = k.shape
    k_t = np.empty((*heads, head_dim, keys + PAD), k.dtype)[..., :keys]
    for first in range(0, keys, 128):
        k_t[..., first : first + 128] = k[..., first : first + 128, :].swapaxes(-1, -2)
    return k_t


def score(call: Call, tile: Tile, s: np.ndarray, slope: np.ndarray | None = None) -> None:
    """Turn a tile of products Q K^T into scores; those that are hidden are -inf.

    `slope` receives what a score changes by with its product times scale: of softcap only.
    """
    if not call.scales_q:
        s *= s.dtype.type(call.scale)
    if call.softcap:
        s /= s.dtype.type(call.softcap)
        np.tanh(s, out=s)
        if slope is not None:
            np.multiply(s, s, out=slope)
            np.subtract(1, slope, out=slope)
        s *= s.dtype.type(call.softcap)
    if call.slopes is not None:
        distance = abs(_diagonal(call, tile) - np.arange(tile.j.start, tile.j.stop))
        s -= call.slopes[tile.heads].astype(s.dtype) * distance.astype(s.dtype)
    if call.bias is not None:
        s += scores_of(call.bias, tile).astype(s.dtype)
    _hide(call, tile, s)


def _hide(call: Call, tile: Tile, s: np.ndarray) -> None:
    """Replace the hidden scores of a tile, whatever they hold, by -inf."""
    band, (heads, i, j) = call.band, tile
    if not band.whole(i.start, i.stop, j.start, j.stop, *call.lengths):
        left, right, _ = band.operands(*call.lengths)
        diagonal, keys = _diagonal(call, tile), np.arange(j.start, j.stop)
        if band.left is not None:  # the keys that the last query does not see
            edge = max(0, int(diagonal[-1, 0]) - left - j.start)
            np.copyto(s[..., :edge], -math.inf, where=keys[:edge] < diagonal - left)
        if band.right is not None:  # the keys that the first query does not see
            edge = max(0, int(diagonal[0, 0]) + right + 1 - j.start)
            np.copyto(s[..., edge:], -math.inf, where=keys[edge:] > diagonal + right)
    for mask in call.masks:
        for x, b in zip(s, range(heads[0].start, heads[0].stop), strict=True):
            at = (*call.lengths, call.first + b)
            if not mask.whole(i.start, i.stop, j.start, j.stop, *at):
                queries, keys = np.arange(i.start, i.stop)[:, None], np.arange(j.start, j.stop)
                np.copyto(x, -math.inf, where=~mask.keep(queries, keys, *at))
    if call.mask is not None:
        np.copyto(s, -math.inf, where=~scores_of(call.mask, tile))


def kept(call: Call, tile: Tile) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Yield each head of a tile, counted from its first, and which scores dropout keeps there."""
    group = call.q.shape[2]
    batch, heads_k, members = tile.heads
    first, state = call.first + batch.start, call.rng_state
    for at in np.ndindex(*(part.stop - part.start for part in tile.heads)):
        b, h, g = at
        head = (heads_k.start + h) * group + members.start + g
        yield at, _philox.keep(state, call.dropout_p, first + b, head, tile.i, tile.j)


def _diagonal(call: Call, tile: Tile) -> np.ndarray:
    """Return i + d, as a column."""
    d = call.band.diagonal(*call.lengths)
    return np.arange(tile.i.start + d, tile.i.stop + d)[:, None]


def scores_of(x: np.ndarray, tile: Tile) -> np.ndarray:
    """Return the tile of a bias or mask, of size 1 along the axes that are broadcast."""
    i, j = tile.i, tile.j
    x = x[(*tile.heads, slice(i.start, i.stop), slice(j.start, j.stop))]
    return x[tuple(slice(1) if step == 0 else slice(None) for step in x.strides)]
