"""What a case may have beyond its band: score modifiers, masks, a sink, dropout.

Each says what `cupyflash.attention` is called with, and what the oracle is told of some rows of one
head, where positions are those of a smaller problem.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .. import _philox
from ..errors import InvalidArgument

if TYPE_CHECKING:
    from .case import Case

Place = Callable[[np.ndarray], Any]  # puts an operand where the call's arrays are

RNG_STATE = (2026, 0)
KEPT = 0.9  # of the pairs of a dense mask
DOCUMENTS = (128, 2048)  # the shortest and the longest of a row


@dataclass(frozen=True)
class Rows:
    """Some queries of one head, and all keys of their sequence."""

    b: int
    h: int
    begin: int
    end: int
    len_q: int
    len_k: int


@dataclass(frozen=True)
class Modifier:
    """Nothing: a case as it is."""

    value: float = 0.0

    def arguments(self, case: Case, place: Place) -> dict[str, Any]:
        """Return the arguments of `cupyflash.attention`."""
        return {}

    def of_rows(self, case: Case, rows: Rows) -> dict[str, Any]:
        """Return the oracle's options for some rows; `attn_mask` comes on top of the band."""
        return {}

    def pairs(self, case: Case) -> float | None:
        """Return the pairs of one head, None where they are those of the band."""
        return None


class Softcap(Modifier):
    """``softcap * tanh(score / softcap)``."""

    def arguments(self, case: Case, place: Place) -> dict[str, Any]:
        """Return the arguments of `cupyflash.attention`."""
        return {"softcap": self.value}

    def of_rows(self, case: Case, rows: Rows) -> dict[str, Any]:
        """Return the oracle's options for some rows."""
        return {"softcap": self.value}


class Alibi(Modifier):
    """The geometric slopes of the ALiBi paper."""

    @staticmethod
    def slopes(case: Case) -> np.ndarray:
        """Return a slope per head."""
        return np.exp2(-8 * np.arange(1, case.heads_q + 1) / case.heads_q).astype(np.float32)

    def arguments(self, case: Case, place: Place) -> dict[str, Any]:
        """Return the arguments of `cupyflash.attention`."""
        return {"alibi_slopes": place(self.slopes(case))}

    def of_rows(self, case: Case, rows: Rows) -> dict[str, Any]:
        """Return the oracle's options for some rows."""
        i = np.arange(rows.begin, rows.end)[:, None] + case.band.diagonal(rows.len_q, rows.len_k)
        return {"attn_bias": -self.slopes(case)[rows.h] * np.abs(i - np.arange(rows.len_k))}


class Bias(Modifier):
    """One bfloat16 bias (1, 1, len_q, len_k) for all heads and batch entries."""

    @staticmethod
    def array(case: Case) -> np.ndarray:
        """Return the bias."""
        return scores(case.len_q, case.len_k)[None, None]

    def arguments(self, case: Case, place: Place) -> dict[str, Any]:
        """Return the arguments of `cupyflash.attention`."""
        return {"attn_bias": place(self.array(case))}

    def of_rows(self, case: Case, rows: Rows) -> dict[str, Any]:
        """Return the oracle's options for some rows."""
        return {"attn_bias": self.array(case)[:, :, rows.begin : rows.end]}


class DenseMask(Modifier):
    """One bool mask (1, 1, len_q, len_k) with holes anywhere; the diagonal stays."""

    @staticmethod
    def array(case: Case) -> np.ndarray:
        """Return the mask."""
        return holes(case.len_q, case.len_k)[None, None]

    def arguments(self, case: Case, place: Place) -> dict[str, Any]:
        """Return the arguments of `cupyflash.attention`."""
        return {"attn_mask": place(self.array(case))}

    def of_rows(self, case: Case, rows: Rows) -> dict[str, Any]:
        """Return the oracle's options for some rows."""
        return {"attn_mask": self.array(case)[0, 0, rows.begin : rows.end]}


class Sink(Modifier):
    """A logit per head."""

    @staticmethod
    def logits(case: Case) -> np.ndarray:
        """Return the logits."""
        return np.random.default_rng(9).standard_normal(case.heads_q, np.float32)

    def arguments(self, case: Case, place: Place) -> dict[str, Any]:
        """Return the arguments of `cupyflash.attention`."""
        return {"learnable_sink": place(self.logits(case))}

    def of_rows(self, case: Case, rows: Rows) -> dict[str, Any]:
        """Return the oracle's options for some rows."""
        return {"learnable_sink": self.logits(case)[rows.h : rows.h + 1]}


class Dropout(Modifier):
    """Dropped weights; peers draw numbers of their own."""

    def arguments(self, case: Case, place: Place) -> dict[str, Any]:
        """Return the arguments of `cupyflash.attention`."""
        return {"dropout_p": self.value, "rng_state": RNG_STATE}

    def of_rows(self, case: Case, rows: Rows) -> dict[str, Any]:
        """Return the oracle's options for rows from the first on of the first head."""
        if rows.b or rows.h or rows.begin:
            raise ValueError("the oracle draws by positions that begin at 0")
        return {"dropout_p": self.value, "rng_state": RNG_STATE}

    @property
    def variance(self) -> float:
        """Of a kept weight's factor, which is 1 on average."""
        return _philox.rescale(self.value) - 1


class Documents(Modifier):
    """Documents side by side in each batch entry, which do not see each other."""

    @staticmethod
    def lengths(case: Case, b: int) -> tuple[int, ...]:
        """Return the lengths of one batch entry's documents."""
        return log_uniform(*DOCUMENTS, case.len_q, seed=b)

    def ids(self, case: Case) -> np.ndarray:
        """Return the document of each position, (batch, length)."""
        rows = (self.lengths(case, b) for b in range(case.batch))
        return np.stack([np.repeat(np.arange(len(row)), row) for row in rows]).astype(np.int32)

    def arguments(self, case: Case, place: Place) -> dict[str, Any]:
        """Return the arguments of `cupyflash.attention`."""
        return {"segment_ids": place(self.ids(case))}

    def of_rows(self, case: Case, rows: Rows) -> dict[str, Any]:
        """Return the oracle's options for some rows."""
        ids = self.ids(case)[rows.b]
        return {"attn_mask": ids[rows.begin : rows.end, None] == ids}

    def pairs(self, case: Case) -> float:
        """Return the pairs of one head, on average over the batch."""
        rows = (self.lengths(case, b) for b in range(case.batch))
        return sum(squares(row, case.mask) for row in rows) / case.batch


class Prefix(Modifier):
    """A prefix that everyone sees, and causal attention after it."""

    def arguments(self, case: Case, place: Place) -> dict[str, Any]:
        """Return the arguments of `cupyflash.attention`."""
        from ..masks import PrefixLM

        return {"mask": PrefixLM(place(np.full(case.batch, self.value, np.int32)))}

    def of_rows(self, case: Case, rows: Rows) -> dict[str, Any]:
        """Return the oracle's options for some rows."""
        i = np.arange(rows.begin, rows.end)[:, None] + rows.len_k - rows.len_q
        j = np.arange(rows.len_k)
        return {"attn_mask": (j < self.value) | (j <= i)}

    def pairs(self, case: Case) -> float:
        """Return the pairs of one head, counting a square causal mask as half of all."""
        return (case.len_q * case.len_k + self.value**2) / 2


class Deterministic(Modifier):
    """Gradients that are summed in a fixed order."""

    def arguments(self, case: Case, place: Place) -> dict[str, Any]:
        """Return the arguments of `cupyflash.attention`."""
        return {"deterministic": True}


MODIFIERS: dict[str, type[Modifier]] = {
    "": Modifier,
    "softcap": Softcap,
    "alibi": Alibi,
    "bias": Bias,
    "mask": DenseMask,
    "sink": Sink,
    "dropout": Dropout,
    "documents": Documents,
    "prefix": Prefix,
    "deterministic": Deterministic,
}
VALUED = ("softcap", "dropout", "prefix")  # written as name:value


def modifier(text: str) -> Modifier:
    """Return the modifier of a text like ``alibi`` or ``softcap:30``."""
    name, _, value = text.partition(":")
    try:
        if (name in VALUED) != bool(value):
            raise KeyError
        return MODIFIERS[name](float(value or 0))
    except (KeyError, ValueError):
        known = (f"{name}:VALUE" if name in VALUED else name for name in MODIFIERS if name)
        raise InvalidArgument(
            f"`modifier` must be one of {', '.join(known)}, got {text!r}"
        ) from None


# --- the operands ---


@functools.lru_cache(maxsize=2)
def scores(len_q: int, len_k: int) -> np.ndarray:
    """Return standard normal numbers."""
    drawn = np.random.default_rng(7).standard_normal((len_q, len_k), np.float32)
    return drawn.astype(ml_dtypes.bfloat16)


@functools.lru_cache(maxsize=2)
def holes(len_q: int, len_k: int) -> np.ndarray:
    """Return a random bool array whose diagonal, the last keys of the last queries, is True."""
    mask = np.random.default_rng(8).random((len_q, len_k), np.float32) < KEPT
    return mask | np.eye(len_q, len_k, len_k - len_q, bool)


def log_uniform(shortest: int, longest: int, total: int, seed: int) -> tuple[int, ...]:
    """Return lengths whose logarithms are uniform, the last cut so that they add up to a total."""
    rng, lengths, left = np.random.default_rng(seed), [], total
    while left > 0:
        drawn = round(shortest * (longest / shortest) ** rng.random())
        lengths.append(min(drawn, left))
        left -= lengths[-1]
    return tuple(lengths)


def squares(lengths: tuple[int, ...], mask: str) -> float:
    """Count the pairs of sequences that each see themselves; a causal mask counts as half."""
    return sum(n * n for n in lengths) / (2 if mask == "causal" else 1)
