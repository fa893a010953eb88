"""Masks as policies: which keys a query sees; each is the twin of one header of ``cuda/masks``.

``dense`` is the truth that every path is held to; a tiled path asks ``keys`` and ``whole``.
"""

import numbers
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .errors import InvalidArgument, InvalidType

__all__ = ["ALIGNMENTS", "ALL", "Band"]

ALIGNMENTS = ("bottom_right", "top_left")


def _side(value: Any) -> int | None:
    """Return one side of ``window_size``: None (or -1) is unbounded."""
    if value is None:
        return None
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Integral):
        raise InvalidType(
            f"`window_size` must hold integers or None, got {type(value).__name__}: "
            "use -1 or None for an unbounded side"
        )
    side = int(value)
    if side < -1:
        raise InvalidArgument(
            f"`window_size` must not hold values below -1, got {side}: "
            "use -1 or None for an unbounded side"
        )
    return None if side == -1 else side


@dataclass(frozen=True)
class Band:
    """Full, causal and windowed attention: ``i + d - left <= j <= i + d + right`` is seen.

    Parameters
    ----------
    left, right : int or None
        How far the band reaches to either side of the diagonal, inclusive; None is unbounded.
    alignment : {"bottom_right", "top_left"}
        Whether the diagonal ``d`` is ``len_k - len_q`` or 0.
    """

    left: int | None = None
    right: int | None = None
    alignment: str = "bottom_right"

    header: ClassVar[str] = "masks/band.cuh"
    cuda_bytes: ClassVar[int] = 16  # of an object of the CUDA type

    @classmethod
    def of(
        cls, causal: Any = False, window_size: Any = (-1, -1), alignment: Any = "bottom_right"
    ) -> "Band":
        """Return the intersection of ``causal`` and ``window_size``, both checked."""
        if not isinstance(causal, bool | np.bool_):
            raise InvalidType(
                f"`causal` must be a bool, got {type(causal).__name__}: use True or False"
            )
        if not isinstance(alignment, str) or alignment not in ALIGNMENTS:
            raise InvalidArgument(
                f"`alignment` must be 'bottom_right' or 'top_left', got {alignment!r}: "
                "use 'top_left' for the diagonal of torch's is_causal"
            )
        if window_size is None:
            window_size = (None, None)
        if not isinstance(window_size, tuple | list) or len(window_size) != 2:
            raise InvalidArgument(
                f"`window_size` must be a pair (left, right), got {window_size!r:.60}: "
                "use None for no window"
            )
        left, right = (_side(side) for side in window_size)
        if causal:
            right = 0
        return cls(left, right, alignment)

    @property
    def cuda_type(self) -> str:
        """The type in the translation unit: the bounds are run-time, their presence is not."""
        flags = ("true" if side is not None else "false" for side in (self.left, self.right))
        return f"Band<{', '.join(flags)}>"

    @property
    def label(self) -> str:
        """A short name, as the results files use it: "full", "causal" or "window:left,right"."""
        if self.left is None and self.right is None:
            return "full"
        if self.left is None and self.right == 0:
            return "causal"
        left, right = (-1 if side is None else side for side in (self.left, self.right))
        return f"window:{left},{right}"

    def operands(self, len_q: int, len_k: int) -> tuple[int, int, int]:
        """Return (left, right, bottom_right) as the kernels take them.

        A side beyond every pair of positions is clamped to the longer length, which bounds nothing
        and keeps 32-bit arithmetic in range; an unbounded side is 0 and never read.
        """
        left, right = self._clamped(len_q, len_k)
        return left or 0, right or 0, int(self.alignment == "bottom_right")

    def diagonal(self, len_q: int, len_k: int) -> int:
        """Return d: query i stands at key i + d."""
        return len_k - len_q if self.alignment == "bottom_right" else 0

    def keys(self, q_begin: int, q_end: int, len_q: int, len_k: int) -> tuple[int, int]:
        """Return the range of keys that some query of [q_begin, q_end) sees, empty if none does."""
        if q_begin >= q_end:
            return 0, 0
        d = self.diagonal(len_q, len_k)
        begin = 0 if self.left is None else q_begin + d - self.left
        end = len_k if self.right is None else q_end + d + self.right
        begin = min(max(begin, 0), len_k)
        return begin, min(max(end, begin), len_k)

    def whole(
        self, q_begin: int, q_end: int, k_begin: int, k_end: int, len_q: int, len_k: int
    ) -> bool:
        """Return whether every query of [q_begin, q_end) sees every key of [k_begin, k_end)."""
        d = self.diagonal(len_q, len_k)
        return (
            k_end <= len_k
            and (self.left is None or q_end - 1 + d - self.left <= k_begin)
            and (self.right is None or k_end - 1 <= q_begin + d + self.right)
        )

    def dense(self, len_q: int, len_k: int) -> np.ndarray:
        """Return the mask as a bool array (len_q, len_k), True where a query sees a key."""
        left, right = self._clamped(len_q, len_k)
        offset = np.arange(len_k) - (np.arange(len_q)[:, None] + self.diagonal(len_q, len_k))
        seen = np.ones((len_q, len_k), dtype=bool)
        if left is not None:
            seen &= offset >= -left
        if right is not None:
            seen &= offset <= right
        return seen

    def _clamped(self, len_q: int, len_k: int) -> tuple[int | None, int | None]:
        """Return the sides, none larger than the longer length: beyond it a side bounds nothing."""
        longest = max(len_q, len_k)
        left, right = (
            None if side is None else min(side, longest) for side in (self.left, self.right)
        )
        return left, right


ALL = (Band,)
