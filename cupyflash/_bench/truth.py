"""Results first: a few rows of an output against the fp64 oracle, before anything is timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .. import _accuracy, reference
from .case import DTYPES, Case
from .modifiers import Dropout, Rows
from .runner import Arrays, to_host

CHECKED_ROWS = 64
DRAWN_ROWS = 1024  # of the first head, where the oracle draws the dropout
TOLERATED = 0.75, 1.33  # the variance of dropout by other numbers, over what it should be

Index = tuple[slice, ...]


@dataclass
class Truth:
    """The fp64 oracle on a few rows of the first and the last head, made once per case."""

    case: Case
    arrays: Arrays

    @cached_property
    def parts(self) -> list[tuple[Index, _accuracy.Expected]]:
        """The slices of an output that are looked at, and what they should hold."""
        found = []
        for rows in self.places():
            index, q, k, v = self.sliced(rows)
            options = self.options(rows)
            found.append((index, _accuracy.expected(q, k, v, **options)))
        return found

    def compare(self, out: Any, *, own_numbers: bool = False) -> tuple[float | None, str]:
        """Return the largest error of the checked rows, and what is wrong with them, or nothing.

        Parameters
        ----------
        out : array of any framework, shaped like the case's output
            Of which the checked rows alone are copied to the host.
        own_numbers
            Whether it was dropped by other random numbers than ours: there is no error then, and
            what is looked at is the variance.
        """
        case = self.case
        if tuple(out.shape) != case.out_shape:
            return None, f"wrong: output of shape {tuple(out.shape)}"
        if own_numbers:
            return None, self.spread(out)
        dtype = reference.output_dtype(DTYPES[case.dtype])
        verdicts = [
            expected.verdict(to_host(out[index]).astype(dtype).reshape(expected.out.shape), None)
            for index, expected in self.parts
        ]
        wrong = next((verdict.message for verdict in verdicts if not verdict.ok), "")
        return max(verdict.error for verdict in verdicts), f"wrong: {wrong}" if wrong else ""

    def spread(self, out: Any) -> str:
        """Return what is wrong with the variance that dropout gives an output, or nothing."""
        modified = self.case.modified
        assert isinstance(modified, Dropout)
        seen = expected = 0.0
        for rows in self.edges():
            if rows.end < rows.len_q:
                continue  # the first rows see so few keys that their variance is chance
            index, q, k, v = self.sliced(rows)
            mask = self.visible(rows)
            ref, _ = reference.attention(q, k, v, attn_mask=mask)
            seen += np.square(to_host(out[index]).reshape(ref.shape) - ref).sum()
            rms = reference.rms(q, k, v, attn_mask=mask)
            expected += modified.variance * np.square(rms).sum()
        least, most = TOLERATED
        ratio = seen / expected
        return "" if least < ratio < most else f"wrong: {ratio:.2f} of the variance of its dropout"

    def places(self) -> Iterator[Rows]:
        """Yield the rows that are checked."""
        if not isinstance(self.case.modified, Dropout):
            yield from self.edges()
        else:
            case = self.case
            yield Rows(0, 0, 0, min(DRAWN_ROWS, case.len_q), case.len_q, case.len_k)

    def edges(self) -> Iterator[Rows]:
        """Yield the first and the last rows, of packed sequences also those of the longest."""
        case = self.case
        pairs = {(0, 0), (case.batch - 1, case.heads_q - 1)}
        if case.lengths:
            pairs.add((case.lengths.index(case.len_q), 0))
        for b, h in sorted(pairs):
            len_q, len_k = (case.lengths[b],) * 2 if case.lengths else (case.len_q, case.len_k)
            count = min(CHECKED_ROWS, len_q)
            for begin, end in sorted({(0, count), (len_q - count, len_q)}):
                yield Rows(b, h, begin, end, len_q, len_k)

    def sliced(self, rows: Rows) -> tuple[Index, np.ndarray, np.ndarray, np.ndarray]:
        """Return where some rows are in an output, and their q, k and v as a smaller problem."""
        case, (q, k, v) = self.case, self.arrays
        kv = rows.h // (case.heads_q // case.heads_k)
        head, head_k = slice(rows.h, rows.h + 1), slice(kv, kv + 1)
        if case.lengths:
            first = sum(case.lengths[: rows.b])
            index: Index = (slice(first + rows.begin, first + rows.end), head)
            keys: Index = (slice(first, first + rows.len_k), head_k)
            return index, q[index][None], k[keys][None], v[keys][None]
        entry = slice(rows.b, rows.b + 1)
        index, keys = (entry, slice(rows.begin, rows.end), head), (entry, slice(None), head_k)
        return index, q[index], k[keys], v[keys]

    def options(self, rows: Rows) -> dict[str, Any]:
        """Return the oracle's options for the smaller problem of some rows."""
        found = self.case.modified.of_rows(self.case, rows)
        return {**found, "attn_mask": found.get("attn_mask", True) & self.visible(rows)}

    def visible(self, rows: Rows) -> np.ndarray:
        """Return which keys the band lets some rows see, as the mask of a smaller problem."""
        band = self.case.band
        i = np.arange(rows.begin, rows.end)[:, None] + band.diagonal(rows.len_q, rows.len_k)
        j = np.arange(rows.len_k)[None, :]
        low = np.ones_like(i + j, bool) if band.left is None else j >= i - band.left
        high = np.ones_like(i + j, bool) if band.right is None else j <= i + band.right
        return low & high
