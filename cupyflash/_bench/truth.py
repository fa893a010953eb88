"""Results first: a few rows of an output against the fp64 oracle, before anything is timed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import _accuracy
from .case import DTYPES, Case
from .runner import Arrays

CHECKED_ROWS = 64


@dataclass
class Truth:
    """The fp64 oracle on a few rows of the first and the last head, made once per case."""

    case: Case
    arrays: Arrays

    def compare(self, out: np.ndarray) -> tuple[float, str]:
        """Return the largest error of the checked rows, and what is wrong with them, or nothing."""
        case, (q, k, v) = self.case, self.arrays
        if out.shape != (case.batch, case.len_q, case.heads_q, case.head_dim_v):
            return float("nan"), f"output of shape {out.shape}"
        error, wrong = 0.0, ""
        for b, h in {(0, 0), (case.batch - 1, case.heads_q - 1)}:
            kv = h // (case.heads_q // case.heads_k)
            for begin, end in self.row_ranges():
                mask = self.seen(begin, end)
                part = out[b : b + 1, begin:end, h : h + 1].astype(DTYPES[case.dtype])
                verdict = _accuracy.verdict(
                    part,
                    None,
                    q[b : b + 1, begin:end, h : h + 1],
                    k[b : b + 1, :, kv : kv + 1],
                    v[b : b + 1, :, kv : kv + 1],
                    attn_mask=mask,
                )
                error = max(error, verdict.error)
                wrong = wrong or ("" if verdict.ok else f"wrong: {verdict.message}")
        return error, wrong

    def row_ranges(self) -> set[tuple[int, int]]:
        """Return the first and the last rows."""
        count = min(CHECKED_ROWS, self.case.len_q)
        return {(0, count), (self.case.len_q - count, self.case.len_q)}

    def seen(self, begin: int, end: int) -> np.ndarray:
        """Return which keys the rows [begin, end) see, as the mask of a smaller problem."""
        case, band = self.case, self.case.band
        i = np.arange(begin, end)[:, None] + band.diagonal(case.len_q, case.len_k)
        j = np.arange(case.len_k)[None, :]
        low = np.ones_like(i + j, bool) if band.left is None else j >= i - band.left
        high = np.ones_like(i + j, bool) if band.right is None else j <= i + band.right
        return low & high
