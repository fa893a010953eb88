"""Attention of NumPy arrays: cut into items of work that threads take from one queue.

BLAS is held to one thread meanwhile. An item is a range of queries of one head, or of several heads
and sequences where these are short; `_online` computes it. Sequences that follow one another with
equal lengths make a run, whose rows are one strided view: so dense and packed arrays are the same.
"""

import contextlib
import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from . import _online
from ._blas import one_blas_thread
from ._online import Call, Heads, Item, Scratch
from .masks import Band, Mask

__all__ = ["attention"]

ITEM_Q = 2048  # queries of an item: so many share one load of a tile of keys
SHORT = 64  # queries or keys that an item counts at least: its heads are bounded in memory
PRODUCTS_PER_THREAD = 1 << 24  # about 0.5 ms, where to start a thread takes 0.1 ms
MAX_THREADS = 64  # OpenBLAS as NumPy builds it has buffers for so many callers


class Rows(NamedTuple):
    """The rows in use of one sequence, in the array of all (packed) or of its batch entry."""

    first: int
    length: int

    def moved(self, rows: int) -> "Rows":
        """Return as many rows further on."""
        return Rows(self.first + rows, self.length)


class Run(NamedTuple):
    """Sequences one after the other whose rows in use are equally many."""

    begin: int
    end: int
    q: Rows  # of the first sequence
    k: Rows
    step_q: int  # rows from a sequence to the next; 0 where each has a batch entry of its own
    step_k: int

    @property
    def scores(self) -> int:
        """The pairs of a query and a key, of one head."""
        return (self.end - self.begin) * self.q.length * self.k.length


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
    spans_q = _spans(q, cu_seqlens_q, seqused_q)
    spans_k = _spans(k, cu_seqlens_k, seqused_k)
    batch = len(spans_q)
    if heads == 0:
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

    def per_score(x: np.ndarray | None) -> Any:
        """View a bias or mask of every sequence and head."""
        return grouped(None if x is None else np.broadcast_to(x, (batch, heads, *x.shape[2:])))

    call = Call(
        q=grouped(q, 2).transpose(0, 2, 3, 1, 4),
        k=k.transpose(0, 2, 1, 3)[:, :, None],
        v=v.transpose(0, 2, 1, 3)[:, :, None],
        out=grouped(out, 2).transpose(0, 2, 3, 1, 4),
        lse=grouped(lse),
        first=0,
        band=band,
        masks=tuple(masks),
        scale=scale,
        softcap=softcap,
        slopes=per_head(alibi_slopes),
        bias=per_score(attn_bias),
        mask=per_score(attn_mask),
        sink=per_head(learnable_sink),
        dropout_p=dropout_p,
        rng_state=rng_state,
        q_descale=per_head_k(q_descale),
        k_descale=per_head_k(k_descale),
        v_descale=per_head_k(v_descale),
        dtype=np.dtype(np.float64 if q.dtype == np.float64 else np.float32),
    )
    _blank(call, spans_q, packed)
    with one_blas_thread as threads:
        _run(call, list(_runs(spans_q, spans_k, packed)), packed, threads)


def _spans(x: np.ndarray, cu_seqlens: np.ndarray | None, used: np.ndarray | None) -> list[Rows]:
    """Return the rows in use of every sequence; no value of the metadata reaches outside `x`."""
    batch, total = x.shape[:2]
    if cu_seqlens is None:
        spans = [Rows(0, total)] * batch
    else:
        spans = [
            Rows(first := min(max(a, 0), total), min(max(b - first, 0), total - first))
            for a, b in itertools.pairwise(cu_seqlens.tolist())
        ]
    if used is None:
        return spans
    return [Rows(a, min(max(n, 0), m)) for (a, m), n in zip(spans, used.tolist(), strict=True)]


def _blank(call: Call, spans: list[Rows], packed: bool) -> None:
    """Fill the rows that are of no sequence in use."""
    total = call.q.shape[3]
    blank: list[tuple[int, Any]] = [(b, slice(n, None)) for b, (_, n) in enumerate(spans)]
    if packed:
        unused = np.ones(total, bool)
        for first, length in spans:
            unused[first : first + length] = False
        blank = [(0, unused)]
    for b, rows in blank:
        if packed or rows.start < total:
            call.out[b, :, :, rows] = 0
            if call.lse is not None:
                call.lse[b, :, :, rows] = -math.inf


def _runs(spans_q: list[Rows], spans_k: list[Rows], packed: bool) -> Iterator[Run]:
    """Join the sequences that one view can hold, and leave out those without queries."""
    run: Run | None = None
    for b, (q, k) in enumerate(zip(spans_q, spans_k, strict=True)):
        if run is not None:
            if packed and run.end == run.begin + 1:  # the second sequence says how far they are
                run = run._replace(step_q=q.first - run.q.first, step_k=k.first - run.k.first)
            n = b - run.begin
            if (q, k) == (run.q.moved(n * run.step_q), run.k.moved(n * run.step_k)):
                run = run._replace(end=b + 1)
                continue
            yield run
        run = Run(b, b + 1, q, k, 0, 0) if q.length else None
    if run is not None:
        yield run


def _view(call: Call, run: Run, packed: bool) -> Call:
    """Return the call on the sequences of a run alone, all of whose rows are in use."""
    begin, end = run.begin, run.end

    def rows(x: Any, at: Rows, step: int) -> Any:
        """Return the rows (axis 3) in use, by sequence."""
        if x is None or not packed:
            return x if x is None else x[begin:end, :, :, : at.length]
        if end - begin == 1:
            return x[:, :, :, at.first : at.first + at.length]
        x = x[:, :, :, at.first :]
        shape = (end - begin, *x.shape[1:3], at.length, *x.shape[4:])
        bits = x.view(f"V{x.itemsize}")  # NumPy's interface has no name for some kinds of fp8
        return as_strided(bits, shape, (step * x.strides[3], *x.strides[1:])).view(x.dtype)

    def part(x: Any) -> Any:
        return None if x is None else x[begin:end]

    def scores(x: Any) -> Any:
        """Return a bias or mask of all pairs; beyond its end, which no length says, it repeats."""
        if x is None:
            return None
        x = x[begin:end]
        for axis, length in ((3, run.q.length), (4, run.k.length)):
            if 1 < x.shape[axis] < length:
                x = x.take(np.minimum(np.arange(length), x.shape[axis] - 1), axis)
        x = x[:, :, :, : run.q.length, : run.k.length]
        return np.broadcast_to(x, (*x.shape[:3], run.q.length, run.k.length))

    return dataclasses.replace(
        call,
        first=begin,
        q=rows(call.q, run.q, run.step_q),
        k=rows(call.k, run.k, run.step_k),
        v=rows(call.v, run.k, run.step_k),
        out=rows(call.out, run.q, run.step_q),
        lse=rows(call.lse, run.q, run.step_q),
        slopes=part(call.slopes),
        bias=scores(call.bias),
        mask=scores(call.mask),
        sink=part(call.sink),
        q_descale=part(call.q_descale),
        k_descale=part(call.k_descale),
        v_descale=part(call.v_descale),
    )


def _run(call: Call, runs: list[Run], packed: bool, threads: int) -> None:
    """Do all items of a call, in this thread alone where a second one would not pay."""
    _, heads_k, group, _, head_dim = call.q.shape
    scores = heads_k * group * sum(run.scores for run in runs)
    products = scores * (head_dim + call.v.shape[-1])
    threads = max(1, min(threads, MAX_THREADS, products // PRODUCTS_PER_THREAD))
    items = deque(_items(call, runs, threads))

    def work() -> None:
        # A small ufunc buffer: with a larger one NumPy copies the broadcast operand of every tile.
        with np.errstate(all="ignore"):
            np.setbufsize(16)
            scratch = Scratch(call.dtype)
            while True:
                try:
                    run, item = items.popleft()
                except IndexError:
                    return
                _online.attend(_view(call, run, packed), item, scratch)

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


def _items(call: Call, runs: list[Run], threads: int) -> Iterator[tuple[Run, Item]]:
    """Cut a call into items of about one tile of scores, or less where threads would idle."""
    _, heads_k, group, _, _ = call.q.shape
    heads = heads_k * group * sum(run.end - run.begin for run in runs)
    all_rows = heads_k * group * sum((run.end - run.begin) * run.q.length for run in runs)
    even = all_rows // (1 if threads == 1 else 4 * threads) // SHORT * SHORT + SHORT
    for run in sorted(runs, key=lambda run: -run.q.length * run.k.length):  # the longest first
        len_q, len_k = run.q.length, run.k.length
        rows = min(ITEM_Q, len_q, even)
        tile = max(SHORT, rows) * max(SHORT, min(_online.BLOCK_K, len_k))
        share = max(1, min(_online.BLOCK_Q * _online.BLOCK_K // tile, heads // threads))
        for first in reversed(range(0, len_q, rows)):  # the longest rows of a causal mask first
            for box in _boxes(run.end - run.begin, heads_k, group, share):
                yield run, Item(box, range(first, min(first + rows, len_q)))


def _boxes(batch: int, heads_k: int, group: int, heads: int) -> Iterator[Heads]:
    """Cut sequences x heads_k x group into boxes of at most `heads` query heads."""
    steps = max(1, heads // (heads_k * group)), max(1, heads // group), min(heads, group)
    for b in range(0, batch, steps[0]):
        for h in range(0, heads_k, steps[1]):
            for g in range(0, group, steps[2]):
                yield (
                    slice(b, min(b + steps[0], batch)),
                    slice(h, min(h + steps[1], heads_k)),
                    slice(g, min(g + steps[2], group)),
                )
