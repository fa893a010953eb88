"""The online softmax of the FlashAttention paper, tile by tile, on NumPy.

    S  = modifiers(scale Q K^T)         one tile of queries x keys, never the whole matrix
    m' = max(m, rowmax S)               P  = exp(S - m')
    l' = exp(m - m') l + rowsum P       O' = (exp(m - m') l O + P V) / l'

The outer loop runs over tiles of keys, loaded and transposed once, the inner one over tiles of
queries. O is a weighted mean of V after every tile, so that it overflows nowhere.
"""

import math
from typing import NamedTuple

import numpy as np

from . import _tiles
from ._tiles import Call, Heads, Scratch, Tile, kept, load, scaled, score, seen_keys, transpose

__all__ = ["BLOCK_K", "BLOCK_Q", "Item", "attend"]

BLOCK_Q = 256
BLOCK_K = 1024  # a tile of fp32 scores is 1 MiB: half of a second-level cache of today
SMALL_PRODUCT = 10**6  # multiplications


class Item(NamedTuple):
    """One piece of work: queries `i` of some heads."""

    heads: Heads
    i: range


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
    tiles = [(block, seen) for block in blocks if (seen := seen_keys(call, heads[0], block))]
    begin = min((seen.start for _, seen in tiles), default=0)
    end = max((seen.stop for _, seen in tiles), default=0)
    for first in range(begin, end, BLOCK_K):
        last = min(first + BLOCK_K, end)
        keys = heads[0], heads[1], slice(None), slice(first, last)
        k = scaled(load(call.k[keys], call.dtype, uses), call.k_descale, heads)
        v = scaled(load(call.v[keys], call.dtype, uses), call.v_descale, heads)
        k_t = k.swapaxes(-1, -2)
        if uses >= _tiles.AMORTIZED and last - first > _tiles.FEW_KEYS:
            k_t = transpose(k)
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
    o = state.o * call.rescale
    call.out[rows] = o.astype(call.out.dtype)
    if call.lse is not None:
        call.lse[rows] = (state.row_max + np.log(state.row_sum))[..., 0]


def _start(call: Call, item: Item, rows: tuple[slice, ...]) -> State:
    """Return the state before the first key."""
    q = scaled(call.q[rows].astype(call.dtype), call.q_descale, item.heads)
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
    score(call, tile, s)
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
        for at, keep in kept(call, tile):
            np.copyto(p[at], 0, where=~keep)
    o *= old_sum / total
    o += _mean(p, v, total)


def _row_sum(p: np.ndarray) -> np.ndarray:
    if p.shape[-1] <= _tiles.FEW_KEYS:
        return p.sum(axis=-1, keepdims=True)
    return p @ np.ones((p.shape[-1], 1), p.dtype)


def _mean(p: np.ndarray, v: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return P V / l."""
    if p.shape[-1] > _tiles.FEW_KEYS:
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
    chunk = 64 if keys <= _tiles.FEW_KEYS else 128
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
