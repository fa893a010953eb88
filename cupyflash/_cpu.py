"""Attention of NumPy arrays: cut into items of work that threads take from one queue.

BLAS is held to one thread meanwhile. An item is a range of queries of one head, or of several heads
and sequences where these are short; `_online` computes it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from . import _online
from ._online import Item
from ._sequences import Grouped, Rows, Run, boxes, runs, spans, unused, view
from ._threads import spread, threads_for
from ._tiles import Call, Scratch
from .masks import Band, Mask

__all__ = ["attention"]

ITEM_Q = 2048  # queries of an item: so many share one load of a tile of keys
SHORT = 64  # queries or keys that an item counts at least: its heads are bounded in memory


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray | None,
    *,
    band: Band,
    scale: float,
    masks: Sequence[Mask] = (),
    softcap: float = 0.0,
    alibi_slopes: np.ndarray | None = None,
    attn_bias: np.ndarray | None = None,
    attn_mask: np.ndarray | None = None,
    cu_seqlens_q: np.ndarray | None = None,
    cu_seqlens_k: np.ndarray | None = None,
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

    `lse` is (B, H, Sq), the descales are (B, Hk). `attn_bias` and `attn_mask` have four axes that
    broadcast to (B, H, Sq, Sk). With `cu_seqlens_q` and `cu_seqlens_k`, of any values, the arrays
    are (1, total, H, D), `lse` is (1, H, total_q), and B is the number of sequences.
    """
    heads, heads_k = q.shape[2], k.shape[2]
    packed = cu_seqlens_q is not None
    spans_q = spans(q, cu_seqlens_q, seqused_q)
    spans_k = spans(k, cu_seqlens_k, seqused_k)
    if heads == 0:
        return
    grouped = Grouped(len(spans_q), heads, heads_k)
    call = Call(
        q=grouped.queries(q),
        k=grouped.keys(k),
        v=grouped.keys(v),
        out=grouped.queries(out),
        lse=grouped.heads_of(lse),
        first=0,
        band=band,
        masks=tuple(masks),
        scale=scale,
        softcap=softcap,
        slopes=grouped.per_head(alibi_slopes),
        bias=grouped.per_score(attn_bias),
        mask=grouped.per_score(attn_mask),
        sink=grouped.per_head(learnable_sink),
        dropout_p=dropout_p,
        rng_state=rng_state,
        q_descale=grouped.per_head_k(q_descale),
        k_descale=grouped.per_head_k(k_descale),
        v_descale=grouped.per_head_k(v_descale),
        dtype=np.dtype(np.float64 if q.dtype == np.float64 else np.float32),
    )
    _blank(call, spans_q, packed)
    _run(call, list(runs(spans_q, spans_k, packed)), packed)


def _blank(call: Call, rows: list[Rows], packed: bool) -> None:
    """Fill the rows that are of no sequence in use."""
    for b, blank in unused(call.q.shape[3], rows, packed):
        call.out[b, :, :, blank] = 0
        if call.lse is not None:
            call.lse[b, :, :, blank] = -math.inf


def _run(call: Call, parts: list[Run], packed: bool) -> None:
    """Do all items of a call."""
    _, heads_k, group, _, head_dim = call.q.shape
    scores = heads_k * group * sum(run.scores for run in parts)

    def start() -> Callable[[tuple[Run, Item]], None]:
        scratch = Scratch(call.dtype)
        return lambda at: _online.attend(view(call, at[0], packed), at[1], scratch)

    with threads_for(scores * (head_dim + call.v.shape[-1])) as threads:
        spread(_items(call, parts, threads), start, threads)


def _items(call: Call, parts: list[Run], threads: int) -> Iterator[tuple[Run, Item]]:
    """Cut a call into items of about one tile of scores, or less where threads would idle."""
    _, heads_k, group, _, _ = call.q.shape
    heads = heads_k * group * sum(run.end - run.begin for run in parts)
    all_rows = heads_k * group * sum((run.end - run.begin) * run.q.length for run in parts)
    even = all_rows // (1 if threads == 1 else 4 * threads) // SHORT * SHORT + SHORT
    for run in sorted(parts, key=lambda run: -run.q.length * run.k.length):  # the longest first
        len_q, len_k = run.q.length, run.k.length
        rows = min(ITEM_Q, len_q, even)
        tile = max(SHORT, rows) * max(SHORT, min(_online.BLOCK_K, len_k))
        share = max(1, min(_online.BLOCK_Q * _online.BLOCK_K // tile, heads // threads))
        for first in reversed(range(0, len_q, rows)):  # the longest rows of a causal mask first
            for box in boxes(run.end - run.begin, heads_k, group, share):
                yield run, Item(box, range(first, min(first + rows, len_q)))
