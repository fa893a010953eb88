"""Attention of NumPy arrays: cut into items of work that threads take from one queue.

BLAS is held to one thread meanwhile. An item is a range of queries of one head, or of several heads
and batch entries where these are short; `_online` computes it.
"""

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from . import _online
from ._blas import one_blas_thread
from ._online import Call, Heads, Item, Scratch
from .masks import Band

__all__ = ["attention"]

ITEM_Q = 2048  # queries of an item: so many share one load of a tile of keys
SHORT = 64  # queries or keys that an item counts at least: its heads are bounded in memory
PRODUCTS_PER_THREAD = 1 << 24  # about 0.5 ms, where to start a thread takes 0.1 ms
MAX_THREADS = 64  # OpenBLAS as NumPy builds it has buffers for so many callers


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
    q_descale: np.ndarray | None = None,
    k_descale: np.ndarray | None = None,
    v_descale: np.ndarray | None = None,
) -> None:
    """Write attention of validated arrays (B, S, H, D), of any strides, to `out` and `lse`.

    `lse` is (B, H, Sq); `attn_bias` and `attn_mask` are broadcast to (B, H, Sq, Sk), the descales
    to (B, Hk).
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

    def per_head_k(x: np.ndarray | None) -> np.ndarray | None:
        """View (B, Hk) as a factor of q, k or v."""
        return None if x is None else x[:, :, None, None, None]

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
        q_descale=per_head_k(q_descale),
        k_descale=per_head_k(k_descale),
        v_descale=per_head_k(v_descale),
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
                _online.attend(call, item, scratch)

    if threads == 1:
        return work()
    with ThreadPoolExecutor(threads - 1, "cupyflash") as pool:
        helpers = []
        # No thread can be had while the interpreter ends, or beyond a limit: fewer do the work.
        with contextlib.suppress(RuntimeError):
            for _ in range(threads - 1):
                helpers.append(pool.submit(work))
        try:
            work()
            for helper in helpers:
                helper.result()
        finally:
            items.clear()  # the first error, or an interrupt, stops the other threads too


def _items(call: Call, lengths: list[tuple[int, int]], threads: int) -> Iterator[Item]:
    """Cut a call into items of about one tile of scores, or less where threads would idle."""
    _, heads_k, group, _, _ = call.q.shape
    begin = 0
    for (len_q, len_k), entries in itertools.groupby(lengths):
        end = begin + len(list(entries))
        heads = (end - begin) * heads_k * group
        rows = heads * len_q // (1 if threads == 1 else 4 * threads)
        rows = max(1, min(ITEM_Q, len_q, rows // SHORT * SHORT + SHORT))
        tile = max(SHORT, rows) * max(SHORT, min(_online.BLOCK_K, len_k))
        share = max(1, min(_online.BLOCK_Q * _online.BLOCK_K // tile, heads // threads))
        for first in reversed(range(0, len_q, rows)):  # the longest rows of a causal mask first
            for box in _boxes(range(begin, end), heads_k, group, share):
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
