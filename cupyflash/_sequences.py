"""The sequences of a call on NumPy arrays, padded or packed, as views that tiles are cut from.

Sequences that follow one another with equal lengths make a run, whose rows are one strided view: so
dense and packed arrays are the same.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ._tiles import Call, Heads

__all__ = ["Grouped", "Rows", "Run", "boxes", "runs", "spans", "unused", "view"]

AnyCall = TypeVar("AnyCall", bound=Call)


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


class Grouped(NamedTuple):
    """Views of a call's arrays by heads of k and the query heads within each."""

    batch: int
    heads: int
    heads_k: int

    def heads_of(self, x: Any, axis: int = 1) -> Any:
        """View the axis of the query heads as (heads_k, group)."""
        if x is None:
            return None
        shape = (*x.shape[:axis], self.heads_k, self.heads // self.heads_k, *x.shape[axis + 1 :])
        return np.reshape(x, shape, copy=False)

    def queries(self, x: np.ndarray) -> np.ndarray:
        """View (B, Sq, H, D) as (B, Hk, group, Sq, D)."""
        return self.heads_of(x, 2).transpose(0, 2, 3, 1, 4)

    def keys(self, x: np.ndarray) -> np.ndarray:
        """View (B, Sk, Hk, D) as (B, Hk, 1, Sk, D)."""
        return x.transpose(0, 2, 1, 3)[:, :, None]

    def per_head(self, x: np.ndarray | None) -> Any:
        """View (H,) or (B, H) as a factor of the scores."""
        if x is None:
            return None
        return self.heads_of(np.broadcast_to(x, (self.batch, self.heads))[..., None, None])

    def per_head_k(self, x: np.ndarray | None) -> np.ndarray | None:
        """View (B, Hk) as a factor of q, k or v."""
        return None if x is None else x[:, :, None, None, None]

    def per_score(self, x: np.ndarray | None) -> Any:
        """View a bias or mask of every sequence and head."""
        if x is None:
            return None
        return self.heads_of(np.broadcast_to(x, (self.batch, self.heads, *x.shape[2:])))


def spans(x: np.ndarray, cu_seqlens: np.ndarray | None, used: np.ndarray | None) -> list[Rows]:
    """Return the rows in use of every sequence; no value of the metadata reaches outside `x`."""
    batch, total = x.shape[:2]
    if cu_seqlens is None:
        rows = [Rows(0, total)] * batch
    else:
        rows = [
            Rows(first := min(max(a, 0), total), min(max(b - first, 0), total - first))
            for a, b in itertools.pairwise(cu_seqlens.tolist())
        ]
    if used is None:
        return rows
    return [Rows(a, min(max(n, 0), m)) for (a, m), n in zip(rows, used.tolist(), strict=True)]


def unused(total: int, rows: list[Rows], packed: bool) -> Iterator[tuple[int, Any]]:
    """Yield an entry of the batch and its rows that are of no sequence in use, or none."""
    if packed:
        blank = np.ones(total, bool)
        for first, length in rows:
            blank[first : first + length] = False
        yield 0, blank
        return
    for b, (_, length) in enumerate(rows):
        if length < total:
            yield b, slice(length, None)


def runs(spans_q: list[Rows], spans_k: list[Rows], packed: bool) -> Iterator[Run]:
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


def view(call: AnyCall, run: Run, packed: bool) -> AnyCall:
    """Return the call on the sequences of a run alone, all of whose rows are in use."""
    begin, end = run.begin, run.end

    def rows(x: np.ndarray, at: Rows, step: int) -> np.ndarray:
        """Return the rows (axis 3) in use, by sequence."""
        if not packed:
            return x[begin:end, :, :, : at.length]
        if end - begin == 1:
            return x[:, :, :, at.first : at.first + at.length]
        x = x[:, :, :, at.first :]
        shape = (end - begin, *x.shape[1:3], at.length, *x.shape[4:])
        bits = x.view(f"V{x.itemsize}")  # NumPy's interface has no name for some kinds of fp8
        return as_strided(bits, shape, (step * x.strides[3], *x.strides[1:])).view(x.dtype)

    def scores(x: np.ndarray) -> np.ndarray:
        """Return a bias or mask of all pairs; beyond its end, which no length says, it repeats."""
        x = x[begin:end]
        for axis, length in ((3, run.q.length), (4, run.k.length)):
            if 1 < x.shape[axis] < length:
                x = x.take(np.minimum(np.arange(length), x.shape[axis] - 1), axis)
        x = x[:, :, :, : run.q.length, : run.k.length]
        return np.broadcast_to(x, (*x.shape[:3], run.q.length, run.k.length))

    kinds = (
        (call.QUERIES, lambda x: rows(x, run.q, run.step_q)),
        (call.KEYS, lambda x: rows(x, run.k, run.step_k)),
        (call.SCORES, scores),
        (call.ENTRIES, lambda x: x[begin:end]),
    )
    changes: dict[str, Any] = {
        name: cut(x)
        for names, cut in kinds
        for name in names
        if (x := getattr(call, name)) is not None
    }
    return dataclasses.replace(call, first=begin, **changes)


def boxes(batch: int, heads_k: int, group: int, heads: int) -> Iterator[Heads]:
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
