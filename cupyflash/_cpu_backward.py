"""Gradients of NumPy arrays: cut into items of work that threads take from one queue.

An item is a block of keys of one head of k, or of several heads and sequences where these are
short; `_tile_gradients` computes it. How a call is cut, and with it every bit of the result, does
not depend on the number of threads.

A bias of queries and keys that is broadcast over heads or sequences chains these: an item then goes
through all that add to the same block of dbias.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import _tile_gradients
from ._sequences import Grouped, Run, boxes, runs, spans, view
from ._threads import Turns, spread, threads_for
from ._tile_gradients import BackwardCall, Queries, add_block, add_summed
from ._tiles import Heads, Scratch
from .masks import Band, Mask

__all__ = ["attention_backward"]

SHORT = 64  # queries or keys that a tile counts at least: its heads are bounded in memory


def attention_backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    dout: np.ndarray,
    dlse: np.ndarray | None,
    dq: np.ndarray,
    dk: np.ndarray,
    dv: np.ndarray,
    dbias: np.ndarray | None,
    dsink: np.ndarray | None,
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
) -> None:
    """Write the gradients of `_cpu.attention` to dq, dk, dv, dbias and dsink, of any strides.

    The same inputs give the same bits, whatever the number of threads.

    `lse` and `dlse` are (B, H, Sq), of packed sequences (1, H, total_q). `dbias` has four axes,
    each of the size of the scores' or 1: it is the sum of dS over the latter. `dsink` is (H,). The
    other arguments are those of `_cpu.attention`.
    """
    for gradient in (dq, dk, dv, dbias, dsink):
        if gradient is not None:
            gradient[...] = 0
    heads, heads_k = q.shape[2], k.shape[2]
    if heads == 0:
        return
    packed = cu_seqlens_q is not None
    spans_q, spans_k = spans(q, cu_seqlens_q, seqused_q), spans(k, cu_seqlens_k, seqused_k)
    grouped = Grouped(len(spans_q), heads, heads_k)
    dtype = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    of_bias = None if dbias is None else Bias.of(dbias, grouped)
    sums = {"query_sums": lse.shape, "key_sums": (k.shape[0], heads, k.shape[1])}
    call = BackwardCall(
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
        q_descale=None,
        k_descale=None,
        v_descale=None,
        dtype=dtype,
        dout=grouped.queries(dout),
        dlse=grouped.heads_of(dlse),
        dq=grouped.queries(dq),
        dk=grouped.keys(dk),
        dv=grouped.keys(dv),
        sink_sums=None if dsink is None else grouped.per_head(np.zeros(heads)).copy(),
        **{
            name: grouped.heads_of(np.zeros(shape, dtype))
            if of_bias is not None and name == of_bias.sums
            else None
            for name, shape in sums.items()
        },
    )
    parts = list(runs(spans_q, spans_k, packed))
    _run(call, parts, packed, of_bias if of_bias is not None and of_bias.sums is None else None)
    with np.errstate(all="ignore"):
        if of_bias is not None and of_bias.sums is not None:
            _reduce(call, parts, packed, of_bias)
        if dsink is not None and call.sink_sums is not None:
            dsink[...] = call.sink_sums.sum(axis=0).reshape(-1)


class Bias(NamedTuple):
    """The gradient of a bias, by heads of k and the query heads within each."""

    gradient: np.ndarray  # [1 | batch, 1 | heads_k, 1 | group, 1 | len_q, 1 | len_k]
    repeats: bool  # whether entries or heads share it
    sums: str | None  # "query_sums" where keys share it, else "key_sums" where queries do

    @classmethod
    def of(cls, dbias: np.ndarray, grouped: Grouped) -> "Bias":
        """View an array of four axes."""
        batch, heads, len_q, len_k = dbias.shape
        heads_k = grouped.heads_k if heads > 1 else 1
        shape = (batch, heads_k, heads // heads_k, len_q, len_k)
        return cls(
            np.reshape(dbias, shape, copy=False),
            repeats=(batch, heads) != (grouped.batch, grouped.heads),
            sums="query_sums" if len_k == 1 else "key_sums" if len_q == 1 else None,
        )


class Box:
    """Heads of a run of sequences; their queries are read when the first item comes."""

    def __init__(self, run: Run, heads: Heads) -> None:
        self.run, self.heads = run, heads
        self._lock = threading.Lock()
        self._queries: Queries | None = None

    def queries(self, call: BackwardCall, packed: bool) -> Queries:
        """Return what the items of the box share."""
        with self._lock:
            if self._queries is None:
                self._queries = Queries(view(call, self.run, packed), self.heads)
            return self._queries

    def place(self, bias: Bias) -> tuple[slice, slice]:
        """Return where the box is in the gradient of a bias: its entries and heads of k."""
        first, (entries, heads_k, _) = self.run.begin, self.heads
        entries = slice(first + entries.start, first + entries.stop)
        batch, all_heads = bias.gradient.shape[:2]
        return entries if batch > 1 else slice(0, 1), heads_k if all_heads > 1 else slice(0, 1)


class Item(NamedTuple):
    """A block of keys of every box of a chain."""

    chain: list[Box]
    n: int


def _run(call: BackwardCall, parts: list[Run], packed: bool, bias: Bias | None) -> None:
    """Do all items of a call."""
    _, heads_k, group, _, head_dim = call.q.shape
    scores = heads_k * group * sum(run.scores for run in parts)
    turns = Turns()

    def start() -> Callable[[Item], None]:
        scratch = Scratch(call.dtype)

        def do(item: Item) -> None:
            own = total = None
            if bias is not None:
                first = item.n * _tile_gradients.BLOCK_K
                keys = slice(first, first + _tile_gradients.BLOCK_K)
                own = total = bias.gradient[(*item.chain[0].place(bias), ..., keys)]
                if bias.repeats and own.dtype != call.dtype:
                    total = np.zeros(own.shape, call.dtype)
            for box in item.chain:
                add_block(box.queries(call, packed), item.n, turns, scratch, total)
            if own is not None and total is not own:
                own[...] = total

        return do

    with threads_for(scores * (3 * head_dim + 2 * call.v.shape[-1])) as threads:
        spread(_items(call, parts, bias), start, threads, turns.stop)


def _items(call: BackwardCall, parts: list[Run], bias: Bias | None) -> Iterator[Item]:
    """Cut a call into items, the longest first, the blocks of a chain in ascending order."""
    for chain in _chains(call, parts, bias):
        longest = max(box.run.k.length for box in chain)
        # Where there is no key an item still reads its queries, for the gradient of a sink.
        for n in range(max(1, -(-longest // _tile_gradients.BLOCK_K))):
            yield Item(chain, n)


def _chains(call: BackwardCall, parts: list[Run], bias: Bias | None) -> list[list[Box]]:
    """Cut a call into boxes; those that share the gradient of a bias make a chain."""
    parts = sorted(parts, key=lambda run: -run.q.length * run.k.length)
    sizes = [_heads_of_a_tile(call, run) for run in parts]
    if bias is not None and bias.repeats:  # the boxes of all runs have the same heads
        sizes = [min(sizes, default=1)] * len(sizes)
    chains: dict[Any, list[Box]] = {}
    for run, size in zip(parts, sizes, strict=True):
        for entries, heads_k, _ in boxes(run.end - run.begin, call.q.shape[1], 1, size):
            box = Box(run, (entries, heads_k, slice(0, call.q.shape[2])))
            place = len(chains) if bias is None else tuple(x.start for x in box.place(bias))
            chains.setdefault(place, []).append(box)
    return list(chains.values())


def _heads_of_a_tile(call: BackwardCall, run: Run) -> int:
    """Return how many heads of k, of all sequences, make one tile of scores."""
    block_q, block_k = _tile_gradients.BLOCK_Q, _tile_gradients.BLOCK_K
    rows = min(block_q, call.q.shape[2] * run.q.length)
    keys = min(block_k, run.k.length)
    return max(1, block_q * block_k // (max(SHORT, rows) * max(SHORT, keys)))


def _reduce(call: BackwardCall, parts: list[Run], packed: bool, bias: Bias) -> None:
    """Sum what each query or key has of dS over all that share the bias, run after run."""
    total = np.zeros(bias.gradient.shape)
    for run in parts:
        part = view(call, run, packed)
        if part.query_sums is not None:
            sums = part.query_sums[..., None]
        else:
            assert part.key_sums is not None
            sums = part.key_sums[:, :, :, None]
        entries = slice(run.begin, run.end) if len(total) > 1 else slice(0, 1)
        add_summed(total[entries], sums.astype(np.float64), axes=5)
    bias.gradient[...] = total.astype(bias.gradient.dtype)
