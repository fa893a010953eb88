"""The gradients of the FlashAttention paper, tile by tile, on NumPy.

    delta = rowsum(dO O) - dlse        of every row, once
    P  = exp(S - lse)                  the scores again, as in the forward pass
    dP = Z (dO V^T)                    Z: 0 or the rescale of dropout
    dS = P (dP - delta)                dbias is its sum
    dT = dS (1 - tanh^2)               of softcap, else dS
    dV += (P Z)^T dO     dK += scale dT^T Q     dQ += scale dT K

An item of work is a block of keys and all queries that share its head of k, the last queries first.
It owns dK and dV of its keys. To dQ of a strip of queries the blocks of keys add one after the
other in ascending order, each in its turn. So the order of every sum is given by the shapes alone.
Items hardly wait, since all walk in one direction, and never for one that is not begun, since they
are begun in the order of the blocks.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from . import _tiles
from ._threads import Turns
from ._tiles import Call, Heads, Scratch, Tile, kept, load, score, seen_keys, transpose

__all__ = ["BLOCK_K", "BLOCK_Q", "BackwardCall", "Queries", "add_block", "add_summed"]

BLOCK_Q = 256
BLOCK_K = 512  # two tiles of fp32 scores are 1 MiB: a second-level cache of today
CHUNK = 128  # queries that a product sums over
P, DS, SLOPE, KEPT, PRODUCT = range(5)  # slots of the scratch


@dataclass(frozen=True)
class BackwardCall(Call):
    """A call with its gradients, as views likewise; all of these are 0 at first."""

    dout: np.ndarray  # [batch, heads_k, group, len_q, head_dim_v]
    dlse: np.ndarray | None  # [batch, heads_k, group, len_q]
    dq: np.ndarray  # [batch, heads_k, group, len_q, head_dim]
    dk: np.ndarray  # [batch, heads_k, 1, len_k, head_dim]
    dv: np.ndarray  # [batch, heads_k, 1, len_k, head_dim_v]
    # Sums of dS where a bias is broadcast: over the keys, or over the queries.
    query_sums: np.ndarray | None  # [batch, heads_k, group, len_q]
    key_sums: np.ndarray | None  # [batch, heads_k, group, len_k]
    sink_sums: np.ndarray | None  # [batch, heads_k, group, 1, 1]: dsink of each entry, in fp64

    QUERIES: ClassVar[tuple[str, ...]] = (*Call.QUERIES, "dout", "dlse", "dq", "query_sums")
    KEYS: ClassVar[tuple[str, ...]] = (*Call.KEYS, "dk", "dv", "key_sums")
    ENTRIES: ClassVar[tuple[str, ...]] = (*Call.ENTRIES, "sink_sums")


class Strip(NamedTuple):
    """Queries `i` of some members of each group: the rows of one tile."""

    members: slice
    i: range
    seen: range  # keys, by some of the queries
    blocks: range  # of those keys

    @property
    def rows(self) -> tuple[slice, ...]:
        """Where the strip is in arrays of all queries."""
        return slice(None), slice(None), self.members, slice(self.i.start, self.i.stop)


class Rows(NamedTuple):
    """A strip in the type of the arithmetic, its members one after the other."""

    q: np.ndarray  # [batch, heads_k, rows, head_dim], scaled if that is exact
    dout: np.ndarray  # [batch, heads_k, rows, head_dim_v], times the rescale of dropout
    lse: np.ndarray  # [batch, heads_k, rows, 1], 0 where it is -inf
    delta: np.ndarray


class Queries:
    """The queries of some heads: what the items of all blocks of their keys share."""

    def __init__(self, call: BackwardCall, heads: Heads) -> None:
        self.call, self.heads = call, heads
        self.strips = list(self._strips())
        self.turns = [strip.blocks.start for strip in self.strips]
        self.visits: dict[int, list[int]] = defaultdict(list)  # strips by block of keys
        for at in reversed(range(len(self.strips))):
            for block in self.strips[at].blocks:
                self.visits[block].append(at)
        self.top_q = self.top_dout = 0.0
        self._delta = self._deltas()
        assert call.lse is not None
        lse = call.lse[heads].astype(call.dtype)[..., None]
        if call.sink is not None and call.sink_sums is not None:
            call.sink_sums[heads] = _sink_sums(call.sink[heads], lse, self._delta)
        lse[lse == -math.inf] = 0  # of rows that see no key: -inf - -inf must not be
        self._lse = lse
        self.top_rows = max(_top(lse), _top(self._delta))
        dq = call.dq[heads]
        self._dq = dq if dq.dtype == call.dtype else np.zeros(dq.shape, call.dtype)

    def _strips(self) -> Iterator[Strip]:
        group, len_q = self.call.q.shape[2:4]
        members = max(1, min(group, BLOCK_Q // len_q))
        for g in range(0, group, members):
            for first in range(0, len_q, BLOCK_Q):
                i = range(first, min(first + BLOCK_Q, len_q))
                seen = seen_keys(self.call, self.heads[0], i)
                blocks = range(seen.start // BLOCK_K, -(-seen.stop // BLOCK_K)) if seen else seen
                yield Strip(slice(g, min(g + members, group)), i, seen, blocks)

    def _deltas(self) -> np.ndarray:
        """Return delta, as columns; on the way see how large q and dO are."""
        call, heads = self.call, self.heads
        delta = np.zeros((*call.out[heads].shape[:-1], 1), call.dtype)
        for first in range(0, delta.shape[3], BLOCK_Q):
            rows = (*heads, slice(first, first + BLOCK_Q))
            arrays = call.q, call.out, call.dout
            q, out, dout = (x[rows].astype(call.dtype, copy=False) for x in arrays)
            # Not where out is 0: a row that sees no key may have anything in dO.
            products = np.multiply(out, dout, out=np.zeros_like(out), where=out != 0)
            products.sum(axis=-1, keepdims=True, out=delta[:, :, :, rows[3]])
            self.top_q, self.top_dout = max(self.top_q, _top(q)), max(self.top_dout, _top(dout))
        if call.dlse is not None:
            delta -= call.dlse[heads][..., None]
        return delta

    def read(self, strip: Strip) -> Rows:
        """Return the rows of a strip."""
        call = self.call
        q, dout = (
            x[self.heads][strip.rows].astype(call.dtype, order="C") for x in (call.q, call.dout)
        )
        if call.scales_q:
            q *= call.dtype.type(call.scale)
        if call.drops:
            dout *= call.rescale
        parts = q, dout, self._lse[strip.rows], self._delta[strip.rows]
        return Rows(*(x.reshape(*x.shape[:2], math.prod(x.shape[2:4]), x.shape[4]) for x in parts))

    def add(self, strip: Strip, dq: np.ndarray, sums: np.ndarray | None, last: bool) -> None:
        """Add to dQ and to the sums of the queries; write dQ after the last addition."""
        call, rows = self.call, strip.rows
        total = self._dq[rows]
        total += dq.reshape(total.shape)
        if call.query_sums is not None:
            call.query_sums[self.heads][rows] += sums
        if last:
            call.dq[self.heads][rows] = total * call.dtype.type(call.scale)


def _sink_sums(sink: np.ndarray, lse: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """Return the sum over the queries of exp(sink - lse) (-delta)."""
    sink, lse = sink.astype(np.float64), lse.astype(np.float64)
    # The lse of a row that sees no key is the sink, be that infinite.
    weight = np.where(lse == sink, sink != -math.inf, np.exp(sink - lse))
    return -(weight * delta).sum(axis=3, keepdims=True)


def _top(x: np.ndarray) -> float:
    """Return max |x|, or inf where something is no finite number."""
    top = max(float(x.max(initial=0)), -float(x.min(initial=0)))
    return top if top < math.inf else math.inf  # nan is not


class Block(NamedTuple):
    """Keys `j` of some heads as BLAS takes them, and their gradients without the scale."""

    j: range
    k: np.ndarray  # [batch, heads_k, keys, head_dim]
    v: np.ndarray
    k_t: np.ndarray  # [batch, heads_k, head_dim, keys]
    v_t: np.ndarray
    dk: np.ndarray  # like k and v
    dv: np.ndarray

    @classmethod
    def load(cls, call: Call, heads: Heads, j: range) -> "Block":
        """Read the keys."""
        rows = (*heads[:2], 0, slice(j.start, j.stop))
        uses = math.prod(call.q.shape[2:4])
        k, v = (load(x[rows], call.dtype, uses) for x in (call.k, call.v))
        wide = uses >= _tiles.AMORTIZED and len(j) >= _tiles.FEW_KEYS
        k_t, v_t = (transpose(x) if wide else x.swapaxes(-1, -2) for x in (k, v))
        return cls(j, k, v, k_t, v_t, np.zeros_like(k), np.zeros_like(v))

    def part(self, seen: range) -> "Block":
        """Return those of the keys that are in a range."""
        j = range(max(seen.start, self.j.start), min(seen.stop, self.j.stop))
        at = slice(j.start - self.j.start, j.stop - self.j.start)
        k, v, k_t, v_t, dk, dv = self[1:]
        k, v, dk, dv = (x[..., at, :] for x in (k, v, dk, dv))
        return Block(j, k, v, k_t[..., at], v_t[..., at], dk, dv)


def add_block(
    queries: Queries, n: int, turns: Turns, scratch: Scratch, dbias: np.ndarray | None
) -> None:
    """Do one item: write dK and dV of block `n` of the keys, add to dQ and to the sums of a bias.

    `dbias` [batch, heads_k, group, len_q, keys] is of these heads and the block, with size 1 where
    the bias is broadcast over entries or heads. It is added to; one of another type than the
    arithmetic's is written, and must not be broadcast.
    """
    call, heads = queries.call, queries.heads
    j = range(n * BLOCK_K, min((n + 1) * BLOCK_K, call.lengths[1]))
    visits = queries.visits.get(n)
    if visits is None:
        return
    block = Block.load(call, heads, j)
    tame = _tame(queries, block)
    for at in visits:
        strip = queries.strips[at]
        part = block.part(strip.seen)
        tile = Tile((*heads[:2], strip.members), strip.i, part.j)
        rows = queries.read(strip)
        weights, ds, slope, seen = _recompute(call, tile, rows, part, scratch, tame)
        # dV += (P Z)^T dO
        _add_product(part.dv, weights, rows.dout, seen, scratch)
        by_head = ds.reshape(*ds.shape[:2], -1, len(tile.i), len(tile.j))
        if dbias is not None:
            members = strip.members if dbias.shape[2] > 1 else slice(None)
            columns = slice(part.j.start - j.start, part.j.stop - j.start)
            add_summed(dbias[:, :, members, strip.rows[3], columns], by_head)
        if call.key_sums is not None:
            call.key_sums[(*tile.heads, slice(tile.j.start, tile.j.stop))] += by_head.sum(axis=3)
        sums = by_head.sum(axis=4) if call.query_sums is not None else None
        if slope is not None:
            ds *= slope
            _clear(ds, seen)
        # dK += dT^T Q, dQ += dT K
        _add_product(part.dk, ds, rows.q, seen, scratch)
        dq = _product(ds, part.k, seen, scratch)
        if not turns.wait(queries.turns, at, n):
            return
        queries.add(strip, dq, sums, last=n == strip.blocks[-1])
        turns.end(queries.turns, at)
    keys = (*heads[:2], 0, slice(j.start, j.stop))
    dk = block.dk if call.scales_q else block.dk * call.dtype.type(call.scale)
    call.dk[keys], call.dv[keys] = dk, block.dv


def _recompute(
    call: BackwardCall, tile: Tile, rows: Rows, block: Block, scratch: Scratch, tame: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Return P Z without the rescale, dS, dT / dS and which pairs are visible.

    The last is None for all where products are tame. Else P and dS are 0 elsewhere.
    """
    (*heads, height, _), width = rows.q.shape, len(tile.j)
    shape = (*heads, height, width)

    def by_head(x: np.ndarray) -> np.ndarray:
        return x.reshape(*heads, -1, len(tile.i), width)

    # S = modifiers(scale Q K^T), P = exp(S - lse)
    s = np.matmul(rows.q, block.k_t, out=scratch.tile(shape, P))
    slope = scratch.tile(shape, SLOPE) if call.softcap else None
    score(call, tile, by_head(s), None if slope is None else by_head(slope))
    seen = None if tame else s != -math.inf
    s -= rows.lse
    p = np.exp(s, out=s)
    _clear(p, seen)
    # dS = P (Z (dO V^T) - delta)
    ds = np.matmul(rows.dout, block.v_t, out=scratch.tile(shape, DS))
    if call.drops:
        z = scratch.tile(shape, KEPT)
        for at, keep in kept(call, tile):
            by_head(z)[at] = keep
        ds *= z
    ds -= rows.delta
    ds *= p
    _clear(ds, seen)
    if call.drops:
        p *= z
    return p, ds, slope, seen


def _tame(queries: Queries, block: Block) -> bool:
    """Return whether everything is finite that a weight of 0 may meet."""
    call = queries.call
    scores = queries.top_q * _top(block.k) * block.k.shape[-1] * max(1.0, abs(call.scale))
    dp = queries.top_dout * _top(block.v) * block.v.shape[-1] * max(1.0, float(call.rescale))
    return max(scores, dp, queries.top_rows) < float(np.finfo(call.dtype).max) / 4


def _clear(x: np.ndarray, seen: np.ndarray | None) -> None:
    """Let the pairs that are not visible be 0."""
    if seen is not None:
        np.copyto(x, 0, where=~seen)


def _add_product(
    total: np.ndarray,
    weights: np.ndarray,
    values: np.ndarray,
    seen: np.ndarray | None,
    scratch: Scratch,
) -> None:
    """Add weights^T @ values, chunk by chunk of the queries: one long sum would lose digits."""
    for first in range(0, weights.shape[-2], CHUNK):
        rows = (..., slice(first, first + CHUNK), slice(None))
        visible = None if seen is None else seen[rows].swapaxes(-1, -2)
        total += _product(weights[rows].swapaxes(-1, -2), values[rows], visible, scratch)


def _product(
    weights: np.ndarray, values: np.ndarray, seen: np.ndarray | None, scratch: Scratch
) -> np.ndarray:
    """Return weights @ values, of the visible pairs alone: 0 times nan is nan elsewhere too."""
    if seen is None or (finite := np.isfinite(values)).all():
        out = scratch.tile((*weights.shape[:-1], values.shape[-1]), PRODUCT)
        return np.matmul(weights, values, out=out)
    total = weights @ np.where(finite, values, 0)

    def meets(pairs: np.ndarray, kind: np.ndarray) -> np.ndarray:
        return pairs.astype(weights.dtype) @ kind.astype(weights.dtype) > 0

    above, below = values == math.inf, values == -math.inf
    positive, negative = weights > 0, weights < 0
    total[meets(positive, above) | meets(negative, below)] += math.inf
    total[meets(positive, below) | meets(negative, above)] -= math.inf
    zero = seen & ~positive & ~negative
    total[meets(seen, np.isnan(values)) | meets(zero, above | below)] = math.nan
    return total


def add_summed(total: np.ndarray, ds: np.ndarray, axes: int = 3) -> None:
    """Add dS, summed where the first axes of the total have size 1.

    Either may end before the other along the queries and the keys. A total of another type than dS
    is written, not added to.
    """
    repeated = tuple(axis for axis in range(axes) if total.shape[axis] == 1 < ds.shape[axis])
    if repeated:
        ds = ds.sum(axis=repeated, keepdims=True)
    rows, columns = map(min, ds.shape[3:], total.shape[3:])
    ds, total = ds[:, :, :, :rows, :columns], total[:, :, :, :rows, :columns]
    if total.dtype == ds.dtype:
        total += ds
    else:
        total[...] = ds
