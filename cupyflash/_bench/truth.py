"""Results first: a few rows of an output against the fp64 oracle, before anything is timed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .. import _accuracy, reference
from .case import DTYPES, Case
from .runner import Arrays, to_host

CHECKED_ROWS = 64


@dataclass
class Truth:
    """The fp64 oracle on a few rows of the first and the last head, made once per case."""

    case: Case
    arrays: Arrays

    @cached_property
    def parts(self) -> list[tuple[tuple[slice, ...], _accuracy.Expected]]:
        """The slices of an output that are looked at, and what they should hold."""
        case, (q, k, v) = self.case, self.arrays
        found: list[tuple[tuple[slice, ...], _accuracy.Expected]] = []
        for b, h in sorted({(0, 0), (case.batch - 1, case.heads_q - 1)}):
            kv = h // (case.heads_q // case.heads_k)
            of_k = slice(b, b + 1), slice(None), slice(kv, kv + 1)
            for begin, end in self.row_ranges():
                rows = slice(b, b + 1), slice(begin, end), slice(h, h + 1)
                mask = self.seen(begin, end)
                found.append((rows, _accuracy.expected(q[rows], k[of_k], v[of_k], attn_mask=mask)))
        return found

    def compare(self, out: Any) -> tuple[float, str]:
        """Return the largest error of the checked rows, and what is wrong with them, or nothing.

        Parameters
        ----------
        out : array of any framework (batch, len_q, heads, head_dim_v)
            Of which the checked rows alone are copied to the host.
        """
        case = self.case
        if tuple(out.shape) != (case.batch, case.len_q, case.heads_q, case.head_dim_v):
            return float("nan"), f"output of shape {tuple(out.shape)}"
        dtype = reference.output_dtype(DTYPES[case.dtype])
        verdicts = [
            expected.verdict(to_host(out[rows]).astype(dtype), None)
            for rows, expected in self.parts
        ]
        wrong = next((verdict.message for verdict in verdicts if not verdict.ok), "")
        return max(verdict.error for verdict in verdicts), f"wrong: {wrong}" if wrong else ""

    def row_ranges(self) -> list[tuple[int, int]]:
        """Return the first and the last rows."""
        count = min(CHECKED_ROWS, self.case.len_q)
        return sorted({(0, count), (self.case.len_q - count, self.case.len_q)})

    def seen(self, begin: int, end: int) -> np.ndarray:
        """Return which keys the rows [begin, end) see, as the mask of a smaller problem."""
        case, band = self.case, self.case.band
        i = np.arange(begin, end)[:, None] + band.diagonal(case.len_q, case.len_k)
        j = np.arange(case.len_k)[None, :]
        low = np.ones_like(i + j, bool) if band.left is None else j >= i - band.left
        high = np.ones_like(i + j, bool) if band.right is None else j <= i + band.right
        return low & high
