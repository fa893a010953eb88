"""The online softmax of the FlashAttention paper, tile by tile, on NumPy.

    S  = modifiers(scale Q K^T)         one tile of queries x keys, never the whole matrix
    m' = max(m, rowmax S)               P  = exp(S - m')
    l' = exp(m - m') l + rowsum P       O' = (exp(m - m') l O + P V) / l'

The outer loop runs over tiles of keys, loaded and transposed once, the inner one over tiles of
queries. O is a weighted mean of V after every tile, so that it overflows nowhere.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from . import _philox
from .masks import Band, Mask

__all__ = ["BLOCK_K", "BLOCK_Q", "Call", "Heads", "Item", "Scratch", "attend"]

BLOCK_Q = 256
BLOCK_K = 1024  # a tile of fp32 scores is 1 MiB: half of a second-level cache of today
# In a tile of few keys a single rounding shows, so it is computed as the formula is written; in a
# wider one roundings average out, and the faster of two ways is taken.
FEW_KEYS = 512
PAD = 16  # a power of two from row to row would put whole columns into one set of a cache
SMALL_PRODUCT = 10**6  # multiplications
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


class Item(NamedTuple):
    """One piece of work: queries `i` of some heads."""

    heads: Heads
    i: range


class Tile(NamedTuple):
    """Queries `i` x keys `j` of some heads."""

    heads: Heads
    i: range
    j: range


class Scratch:
    """The tile of scores of one thread: memory that stays from tile to tile."""

    def __init__(self, dtype: np.dtype) -> None:
        self._memory = np.empty(0, dtype)

    def tile(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return an uninitialised array, the rows of a wide one `PAD` elements apart."""
        *rows, keys = shape
        width = keys if keys <= FEW_KEYS else keys + PAD
        size = math.prod(rows) * width
        if self._memory.size < size:
            self._memory = np.empty(size, self._memory.dtype)
        return self._memory[:size].reshape(*rows, width)[..., :keys]


class State(NamedTuple):
    """The running state of some rows: views that `_update` writes to."""

    q: np.ndarray  # [batch, heads_k, group, rows, head_dim]
    o: np.ndarray  # [batch, heads_k, group, rows, head_dim_v]
    row_max: np.ndarray  # m [batch, heads_k, group, rows, 1]
    row_sum: np.ndarray  # l [batch, heads_k, group, rows, 1]

    def rows(self, begin: int, end: int) -> "State":
        """Return the state of a part of the rows."""
        return State(*(x[..., begin:end, :] for x in self))


def attend(call: Call, item: Item, scratch: Scratch) -> None:
    """Compute and write the rows of one item: the loops over the tiles that the masks leave."""
    heads, i = item
    rows = (*heads, slice(i.start, i.stop))
    state = _start(call, item, rows)
    uses = math.prod(state.q.shape[2:4])  # rows that share a row of k
    blocks = [range(row, min(row + BLOCK_Q, i.stop)) for row in range(i.start, i.stop, BLOCK_Q)]
    tiles = [(block, seen) for block in blocks if (seen := _keys(call, heads[0], block))]
    begin = min((seen.start for _, seen in tiles), default=0)
    end = max((seen.stop for _, seen in tiles), default=0)
    for first in range(begin, end, BLOCK_K):
        last = min(first + BLOCK_K, end)
        keys = heads[0], heads[1], slice(None), slice(first, last)
        k = _scaled(_load(call.k[keys], call.dtype, uses), call.k_descale, heads)
        v = _scaled(_load(call.v[keys], call.dtype, uses), call.v_descale, heads)
        k_t = k.swapaxes(-1, -2)
        if uses >= AMORTIZED and last - first > FEW_KEYS:
            k_t = _transpose(k)
        for i_tile, seen in tiles:
            j = range(max(seen.start, first), min(seen.stop, last))
            if j:
                _update(
                    call,
                    Tile(heads, i_tile, j),
                    state.rows(i_tile.start - i.start, i_tile.stop - i.start),
                    k_t[..., j.start - first : j.stop - first],
                    v[..., j.start - first : j.stop - first, :],
                    scratch,
                )

    if call.sink is not None:
        _add_sink(call.sink[heads].astype(call.dtype), state)
    o = state.o * call.dtype.type(_philox.rescale(call.dropout_p))
    call.out[rows] = o.astype(call.out.dtype)
    if call.lse is not None:
        call.lse[rows] = (state.row_max + np.log(state.row_sum))[..., 0]


def _keys(call: Call, sequences: slice, i: range) -> range:
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


def _start(call: Call, item: Item, rows: tuple[slice, ...]) -> State:
    """Return the state before the first key."""
    q = _scaled(call.q[rows].astype(call.dtype), call.q_descale, item.heads)
    if call.scales_q:
        q *= call.dtype.type(call.scale)
    o = np.zeros((*q.shape[:-1], call.v.shape[-1]), call.dtype)
    row_max = np.full((*q.shape[:-1], 1), -math.inf, call.dtype)
    return State(q, o, row_max, np.zeros_like(row_max))


def _add_sink(sink: np.ndarray, state: State) -> None:
    """Let the sink join the sums of all rows, as one more key whose value is 0.

    A row that saw no key takes the sink as its LSE and keeps its 0, whatever the sink is.
    """
    _, o, row_max, row_sum = state
    sees = row_max != -math.inf
    new_max = np.maximum(row_max, sink)
    shift = np.where(new_max == -math.inf, 0, new_max)
    old_sum = row_sum * np.exp(row_max - shift)
    total = old_sum + np.exp(sink - shift)
    np.multiply(o, old_sum / total, out=o, where=sees)
    row_max[...] = new_max
    row_sum[...] = np.where(sees, total, sink != -math.inf)


def _update(
    call: Call, tile: Tile, state: State, k_t: np.ndarray, v: np.ndarray, scratch: Scratch
) -> None:
    """Fold one tile into the state of its rows: one step of the online softmax."""
    q, o, row_max, row_sum = state
    # S = scale Q K^T
    s = np.matmul(q, k_t, out=scratch.tile((*q.shape[:-1], len(tile.j))))
    if not call.scales_q:
        s *= call.dtype.type(call.scale)
    _modify(call, tile, s)
    _hide(call, tile, s)
    # m, P = exp(S - m). A row that has seen no key has m = -inf, and -inf - -inf must not be.
    old_max = row_max.copy()
    np.maximum(row_max, s.max(axis=-1, keepdims=True), out=row_max)
    shift = np.where(row_max == -math.inf, 0, row_max)
    s -= shift
    p = np.exp(s, out=s)
    # l = exp(m_old - m) l_old + rowsum P
    old_sum = row_sum * np.exp(old_max - shift)
    np.add(old_sum, _row_sum(p), out=row_sum)
    # O = (exp(m_old - m) l_old O_old + P V) / l, where l = 0 stands for no key yet
    total = np.where(row_sum == 0, 1, row_sum)
    if call.drops:
        _drop(call, tile, p)
    o *= old_sum / total
    o += _mean(p, v, total)


def _row_sum(p: np.ndarray) -> np.ndarray:
    if p.shape[-1] <= FEW_KEYS:
        return p.sum(axis=-1, keepdims=True)
    return p @ np.ones((p.shape[-1], 1), p.dtype)


def _mean(p: np.ndarray, v: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return P V / l."""
    if p.shape[-1] > FEW_KEYS:
        o = _product(p, v)
        o /= total
        if np.isfinite(o).all():
            return o
    # Also where a sum of huge V has overflowed, which no weighted mean of them does.
    p /= total
    return _product(p, v)


def _product(p: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return P V, summed over chunks of keys: one long sum would lose digits.

    A stack of products that are small enough is multiplied by OpenBLAS without packing them first.
    """
    *heads, rows, keys = p.shape
    chunk = 64 if keys <= FEW_KEYS else 128
    if keys <= chunk:
        return p @ v
    step = 64 if rows % 64 == 0 and 64 * chunk * v.shape[-1] <= SMALL_PRODUCT else rows
    whole = keys - keys % chunk
    chunks = whole // chunk
    parts = p[..., :whole].reshape(*heads, rows // step, step, chunks, chunk).swapaxes(-3, -2)
    values = v[..., :whole, :].reshape(*v.shape[:-2], 1, chunks, chunk, v.shape[-1])
    o = (parts @ values).sum(axis=-3).reshape(*heads, rows, v.shape[-1])
    if whole < keys:
        o += p[..., whole:] @ v[..., whole:, :]
    return o


def _load(x: np.ndarray, dtype: np.dtype, uses: int) -> np.ndarray:
    """Return a tile of keys in the type of the arithmetic; rows that BLAS takes stay in place."""
    row, column = x.strides[-2:]
    in_place = column == x.itemsize and row >= column * x.shape[-1]
    if x.dtype == dtype and in_place and uses < AMORTIZED:
        return x
    return x.astype(dtype, order="C")


def _scaled(x: np.ndarray, descale: np.ndarray | None, heads: Heads) -> np.ndarray:
    """Return x times what fp8 inputs are multiplied by."""
    return x if descale is None else x * descale[heads[:2]]


def _transpose(k: np.ndarray) -> np.ndarray:
    """Return K^T with rows `PAD` elements apart, copied in blocks of a first-level cache."""
    *heads, keys, head_dim = k.shape
    k_t = np.empty((*heads, head_dim, keys + PAD), k.dtype)[..., :keys]
    for first in range(0, keys, 128):
        k_t[..., first : first + 128] = k[..., first : first + 128, :].swapaxes(-1, -2)
    return k_t


def _modify(call: Call, tile: Tile, s: np.ndarray) -> None:
    """Apply softcap, ALiBi and bias to a tile of scores."""
    if call.softcap:
        s /= s.dtype.type(call.softcap)
        np.tanh(s, out=s)
        s *= s.dtype.type(call.softcap)
    if call.slopes is not None:
        distance = abs(_diagonal(call, tile) - np.arange(tile.j.start, tile.j.stop))
        s -= call.slopes[tile.heads].astype(s.dtype) * distance.astype(s.dtype)
    if call.bias is not None:
        s += _scores_of(call.bias, tile).astype(s.dtype)


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
        np.copyto(s, -math.inf, where=~_scores_of(call.mask, tile))


def _drop(call: Call, tile: Tile, p: np.ndarray) -> None:
    """Zero the weights that dropout does not keep."""
    group = call.q.shape[2]
    batch, heads_k, members = tile.heads
    first, state = call.first + batch.start, call.rng_state
    for b, h, g in np.ndindex(p.shape[:3]):
        head = (heads_k.start + h) * group + members.start + g
        keep = _philox.keep(state, call.dropout_p, first + b, head, tile.i, tile.j)
        np.copyto(p[b, h, g], 0, where=~keep)


def _diagonal(call: Call, tile: Tile) -> np.ndarray:
    """Return i + d, as a column."""
    d = call.band.diagonal(*call.lengths)
    return np.arange(tile.i.start + d, tile.i.stop + d)[:, None]


def _scores_of(x: np.ndarray, tile: Tile) -> np.ndarray:
    """Return the tile of a bias or mask, of size 1 along the axes that are broadcast."""
    i, j = tile.i, tile.j
    x = x[(*tile.heads, slice(i.start, i.stop), slice(j.start, j.stop))]
    return x[tuple(slice(1) if step == 0 else slice(None) for step in x.strides)]
