"""The tiled online softmax of the FlashAttention paper, on NumPy.

    S  = modifiers(scale Q K^T)         one tile of queries x keys, never the whole matrix
    m' = max(m, rowmax S)               P  = exp(S - m')
    l' = exp(m - m') l + rowsum P       O' = (exp(m - m') l O + P V) / l'

O is a weighted mean of V after every tile, so that it overflows nowhere. Threads take work items
from one queue while BLAS is held to one thread; an item is some queries of one head, or of several
heads and batch entries where these are short.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import _philox
from ._blas import one_blas_thread
from .masks import Band

__all__ = ["attention"]

BLOCK_Q = 256
BLOCK_K = 1024  # a tile of fp32 scores is 1 MiB: half of a second-level cache of today
CHUNK = 128  # keys that P V sums before it rounds to O: a longer sum loses digits in fp32
PRODUCTS_PER_THREAD = 1 << 24  # about 0.5 ms, where to start a thread takes 0.1 ms
MAX_THREADS = 64  # OpenBLAS as NumPy builds it has buffers for so many callers

Heads = tuple[slice, slice, slice]  # batch entries; heads of k; query heads within a head of k


class Item(NamedTuple):
    """One piece of work: queries `i` of some heads, with the lengths in use."""

    heads: Heads
    i: range
    len_q: int
    len_k: int


@dataclass(frozen=True)
class Call:
    """The operands of a call as views; a query head is (head of k, member of its group)."""

    q: np.ndarray  # [batch, heads_k, group, len_q, head_dim]
    k: np.ndarray  # [batch, heads_k, 1, len_k, head_dim]
    v: np.ndarray  # [batch, heads_k, 1, len_k, head_dim_v]
    out: np.ndarray  # [batch, heads_k, group, len_q, head_dim_v]
    lse: np.ndarray | None  # [batch, heads_k, group, len_q]
    band: Band
    scale: float
    softcap: float
    slopes: np.ndarray | None  # [batch, heads_k, group, 1, 1]
    bias: np.ndarray | None  # [batch, heads_k, group, len_q, len_k], stride 0 where broadcast
    mask: np.ndarray | None  # likewise
    sink: np.ndarray | None  # [batch, heads_k, group, 1, 1]
    dropout_p: float
    rng_state: Any
    dtype: np.dtype  # of all arithmetic


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray | None,
    *,
    band: Band,
    scale: float,
    softcap: float = 0.0,
    alibi_slopes: np.ndarray | None = None,
    attn_bias: np.ndarray | None = None,
    attn_mask: np.ndarray | None = None,
    seqused_q: np.ndarray | None = None,
    seqused_k: np.ndarray | None = None,
    learnable_sink: np.ndarray | None = None,
    dropout_p: float = 0.0,
    rng_state: Any = None,
) -> None:
    """Write attention of validated arrays (B, S, H, D), of any strides, to `out` and `lse`.

    `lse` is (B, H, Sq); `attn_bias` and `attn_mask` are broadcast to (B, H, Sq, Sk).
    """
    batch, len_q, heads, _ = q.shape
    len_k, heads_k = k.shape[1:3]
    if batch == 0 or len_q == 0 or heads == 0:
        return

    def grouped(x: Any, axis: int = 1) -> Any:
        """View the axis of the query heads as (heads_k, group)."""
        if x is None:
            return None
        shape = (*x.shape[:axis], heads_k, heads // heads_k, *x.shape[axis + 1 :])
        return np.reshape(x, shape, copy=False)

    def per_head(x: np.ndarray | None) -> Any:
        """View (H,) or (B, H) as a factor of the scores."""
        return grouped(None if x is None else np.broadcast_to(x, (batch, heads))[..., None, None])

    call = Call(
        q=grouped(q, 2).transpose(0, 2, 3, 1, 4),
        k=k.transpose(0, 2, 1, 3)[:, :, None],
        v=v.transpose(0, 2, 1, 3)[:, :, None],
        out=grouped(out, 2).transpose(0, 2, 3, 1, 4),
        lse=grouped(lse),
        band=band,
        scale=scale,
        softcap=softcap,
        slopes=per_head(alibi_slopes),
        bias=grouped(attn_bias),
        mask=grouped(attn_mask),
        sink=per_head(learnable_sink),
        dropout_p=dropout_p,
        rng_state=rng_state,
        dtype=np.dtype(np.float64 if q.dtype == np.float64 else np.float32),
    )
    lengths = list(
        zip(_lengths(seqused_q, len_q, batch), _lengths(seqused_k, len_k, batch), strict=True)
    )
    _blank(call, lengths)
    with one_blas_thread as threads:
        _run(call, lengths, threads)


def _lengths(used: np.ndarray | None, length: int, batch: int) -> list[int]:
    """Return the length in use of every batch entry."""
    if used is None:
        return [length] * batch
    return [min(max(n, 0), length) for n in used.tolist()]


def _blank(call: Call, lengths: list[tuple[int, int]]) -> None:
    """Fill the rows beyond the length in use of their batch entry."""
    for b, (len_q, _) in enumerate(lengths):
        if len_q < call.q.shape[3]:
            call.out[b, ..., len_q:, :] = 0
            if call.lse is not None:
                call.lse[b, ..., len_q:] = -math.inf


def _run(call: Call, lengths: list[tuple[int, int]], threads: int) -> None:
    """Do all items of a call, in this thread alone where a second one would not pay."""
    _, heads_k, group, _, head_dim = call.q.shape
    scores = heads_k * group * sum(len_q * len_k for len_q, len_k in lengths)
    products = scores * (head_dim + call.v.shape[-1])
    threads = max(1, min(threads, MAX_THREADS, products // PRODUCTS_PER_THREAD))
    items = deque(_items(call, lengths, threads))

    def work() -> None:
        # A small ufunc buffer: with a larger one NumPy copies the broadcast operand of every tile.
        with np.errstate(all="ignore"):
            np.setbufsize(16)
            scratch = Scratch(call.dtype)
            while True:
                try:
                    item = items.popleft()
                except IndexError:
                    return
                _attend(call, item, scratch)

    if threads == 1:
        return work()
    with ThreadPoolExecutor(threads, "cupyflash") as pool:
        for future in [pool.submit(work) for _ in range(threads)]:
            future.result()


def _items(call: Call, lengths: list[tuple[int, int]], threads: int) -> Iterator[Item]:
    """Cut a call into items of about one tile of scores, or less where threads would idle."""
    _, heads_k, group, _, _ = call.q.shape
    begin = 0
    for (len_q, len_k), entries in itertools.groupby(lengths):
        end = begin + len(list(entries))
        heads = (end - begin) * heads_k * group
        rows = max(1, min(BLOCK_Q, len_q, max(64, heads * len_q // threads)))
        tile = rows * max(1, min(BLOCK_K, len_k))
        share = min(BLOCK_Q * BLOCK_K // tile, heads // threads)
        for first in reversed(range(0, len_q, rows)):  # the longest rows of a causal mask first
            for box in _boxes(range(begin, end), heads_k, group, max(1, share)):
                yield Item(box, range(first, min(first + rows, len_q)), len_q, len_k)
        begin = end


def _boxes(batch: range, heads_k: int, group: int, heads: int) -> Iterator[Heads]:
    """Cut batch entries x heads_k x group into boxes of at most `heads` query heads."""
    steps = max(1, heads // (heads_k * group)), max(1, heads // group), min(heads, group)
    for b in range(batch.start, batch.stop, steps[0]):
        for h in range(0, heads_k, steps[1]):
            for g in range(0, group, steps[2]):
                yield (
                    slice(b, min(b + steps[0], batch.stop)),
                    slice(h, min(h + steps[1], heads_k)),
                    slice(g, min(g + steps[2], group)),
                )


class Scratch:
    """The tile of scores of one thread: memory that stays from tile to tile."""

    def __init__(self, dtype: np.dtype) -> None:
        self._memory = np.empty(0, dtype)

    def tile(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return an uninitialised C-contiguous array."""
        size = math.prod(shape)
        if self._memory.size < size:
            self._memory = np.empty(size, self._memory.dtype)
        return self._memory[:size].reshape(shape)


def _attend(call: Call, item: Item, scratch: Scratch) -> None:
    """Compute the rows of one item: the loop over the tiles of keys that they see."""
    heads, i, len_q, len_k = item
    rows = (*heads, slice(i.start, i.stop))
    q, scale = _load(call.q[rows], call.dtype), call.dtype.type(call.scale)
    if exact := abs(math.frexp(call.scale)[0]) == 0.5:  # a power of two
        q = q * scale
    o = np.zeros((*q.shape[:-1], call.v.shape[-1]), call.dtype)
    row_max = np.full((*q.shape[:-1], 1), -math.inf, call.dtype)
    if call.sink is not None:
        row_max[...] = call.sink[heads]
    row_sum = (row_max != -math.inf).astype(call.dtype)  # exp(sink - row_max)

    begin, end = call.band.keys(i.start, i.stop, len_q, len_k)
    for first in range(begin, end, BLOCK_K):
        j = range(first, min(first + BLOCK_K, end))
        k, v = (
            _load(x[heads[0], heads[1], :, j.start : j.stop], call.dtype) for x in (call.k, call.v)
        )
        # S = scale Q K^T
        s = np.matmul(q, k.swapaxes(-1, -2), out=scratch.tile((*q.shape[:-1], len(j))))
        if not exact:
            s *= scale
        _modify(call, item, j, s)
        _hide(call, item, j, s)
        # P = exp(S - m). A row that has seen no key has m = -inf, and -inf - -inf must not be.
        old_max, row_max = row_max, np.maximum(row_max, s.max(axis=-1, keepdims=True))
        shift = np.where(row_max == -math.inf, 0, row_max)
        s -= shift
        p = np.exp(s, out=s)
        # l = exp(m_old - m) l_old + rowsum P
        old_sum = row_sum * np.exp(old_max - shift)
        row_sum = old_sum + p @ np.ones((len(j), 1), call.dtype)
        # O = (exp(m_old - m) l_old O_old + P V) / l
        norm = 1 / np.where(row_sum == 0, 1, row_sum)
        p *= norm
        _drop(call, item, j, p)
        o *= old_sum * norm
        for part in (slice(c, c + CHUNK) for c in range(0, len(j), CHUNK)):
            o += p[..., part] @ v[..., part, :]

    o *= call.dtype.type(_philox.rescale(call.dropout_p))
    call.out[rows] = o.astype(call.out.dtype)
    if call.lse is not None:
        call.lse[rows] = (row_max + np.log(row_sum))[..., 0]


def _load(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a tile in the type of the arithmetic, with rows that BLAS reads in place."""
    row, column = x.strides[-2:]
    if x.dtype == dtype and column == x.itemsize and row >= column * x.shape[-1]:
        return x
    return x.astype(dtype, order="C")


def _modify(call: Call, item: Item, j: range, s: np.ndarray) -> None:
    """Apply softcap, ALiBi and bias to a tile of scores."""
    if call.softcap:
        s /= s.dtype.type(call.softcap)
        np.tanh(s, out=s)
        s *= s.dtype.type(call.softcap)
    if call.slopes is not None:
        distance = abs(_diagonal(call, item) - np.arange(j.start, j.stop))
        s -= call.slopes[item.heads].astype(s.dtype) * distance.astype(s.dtype)
    if call.bias is not None:
        s += _scores_of(call.bias, item, j).astype(s.dtype)


def _hide(call: Call, item: Item, j: range, s: np.ndarray) -> None:
    """Replace the hidden scores of a tile, whatever they hold, by -inf."""
    i, len_q, len_k = item[1:]
    band = call.band
    if not band.whole(i.start, i.stop, j.start, j.stop, len_q, len_k):
        left, right, _ = band.operands(len_q, len_k)
        diagonal, keys = _diagonal(call, item), np.arange(j.start, j.stop)
        if band.left is not None:
            np.copyto(s, -math.inf, where=keys < diagonal - left)
        if band.right is not None:
            np.copyto(s, -math.inf, where=keys > diagonal + right)
    if call.mask is not None:
        np.copyto(s, -math.inf, where=~_scores_of(call.mask, item, j))


def _drop(call: Call, item: Item, j: range, p: np.ndarray) -> None:
    """Zero the weights that dropout does not keep."""
    if _philox.threshold(call.dropout_p) == 0:
        return
    group = call.q.shape[2]
    batch, heads_k, members = item.heads
    for b, h, g in np.ndindex(p.shape[:3]):
        position = batch.start + b, (heads_k.start + h) * group + members.start + g
        keep = _philox.keep(call.rng_state, call.dropout_p, *position, item.i, j)
        np.copyto(p[b, h, g], 0, where=~keep)


def _diagonal(call: Call, item: Item) -> np.ndarray:
    """Return i + d, as a column."""
    d = call.band.diagonal(item.len_q, item.len_k)
    return np.arange(item.i.start + d, item.i.stop + d)[:, None]


def _scores_of(x: np.ndarray, item: Item, j: range) -> np.ndarray:
    """Return the tile of a bias or mask, of size 1 along the axes that are broadcast."""
    tile = x[(*item.heads, slice(item.i.start, item.i.stop), slice(j.start, j.stop))]
    return tile[tuple(slice(1) if step == 0 else slice(None) for step in tile.strides)]
