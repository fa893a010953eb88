"""Masks as policies: which keys a query sees; each is the twin of one header of ``cuda/masks``.

``dense`` is the truth that every path is held to; a tiled path asks ``keys``, ``whole`` and
``keep``. Masks intersect: ``Band(right=0) & Segments(ids)`` keeps what both keep.
"""

import abc
import dataclasses
import functools
import numbers
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from .errors import InvalidArgument, InvalidType, shown

__all__ = ["ALIGNMENTS", "ALL", "All", "Band", "Mask", "PrefixLM", "Segments"]

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


def _check_alignment(alignment: Any) -> None:
    if not isinstance(alignment, str) or alignment not in ALIGNMENTS:
        raise InvalidArgument(
            f"`alignment` must be 'bottom_right' or 'top_left', got {shown(alignment)}: "
            "use 'top_left' for the diagonal of torch's is_causal"
        )


def _diagonal(alignment: str, len_q: int, len_k: int) -> int:
    """Return d: query i stands at key i + d."""
    return len_k - len_q if alignment == "bottom_right" else 0


class Mask(abc.ABC):
    """What every mask answers, of the batch entry or sequence ``b`` and its lengths in use.

    Two masks are equal if they are but for their arrays. JAX's transformations take masks as
    arguments and results: a mask that is made when JAX has been imported is a pytree, whose leaves
    are its arrays.
    """

    header: ClassVar[str]  # of the CUDA type, from cuda/
    cuda_bytes: ClassVar[int]  # of an object of the CUDA type
    # The fields that hold integer arrays, and what each broadcasts to: "batch", "len_q", "len_k".
    shapes: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __new__(cls, *args: Any, **kwargs: Any) -> "Mask":
        """Make a mask, of a class that JAX knows from then on."""
        mask = super().__new__(cls)
        if cls not in _nodes and hasattr(sys.modules.get("jax"), "tree_util"):
            _register(cls)
        return mask

    @abc.abstractmethod
    def cuda_type(self, *dtypes: str) -> str:
        """Return the type in the translation unit, for ``arrays`` of these dtypes."""

    @property
    def parts(self) -> tuple["Mask", ...]:
        """The masks that this one is the intersection of."""
        return (self,)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The integer arrays, in the order of ``shapes``."""
        return tuple(getattr(self, name) for name in self.shapes)

    def bound(self, *arrays: Any) -> "Mask":
        """Return the mask with other arrays, in the order of ``shapes``."""
        fields: dict[str, Any] = dict(zip(self.shapes, arrays, strict=True))
        return dataclasses.replace(self, **fields) if fields else self  # type: ignore[type-var]

    @functools.cached_property
    def static(self) -> "Mask":
        """The mask without its arrays."""
        return self.bound(*(None for _ in self.shapes))

    @abc.abstractmethod
    def keep(self, i: np.ndarray, j: np.ndarray, len_q: int, len_k: int, b: int = 0) -> np.ndarray:
        """Return whether queries i see keys j, positions that broadcast against each other."""

    def keys(self, q_begin: int, q_end: int, len_q: int, len_k: int, b: int = 0) -> tuple[int, int]:
        """Return a range of keys with all that some query of [q_begin, q_end) sees."""
        return (0, len_k) if q_begin < q_end else (0, 0)

    def whole(
        self, q_begin: int, q_end: int, k_begin: int, k_end: int, len_q: int, len_k: int, b: int = 0
    ) -> bool:
        """Return whether surely every query of [q_begin, q_end) sees all of [k_begin, k_end)."""
        return False

    def dense(self, len_q: int, len_k: int, b: int = 0) -> np.ndarray:
        """Return the mask as a bool array (len_q, len_k), True where a query sees a key."""
        seen = self.keep(np.arange(len_q)[:, None], np.arange(len_k), len_q, len_k, b)
        return np.array(np.broadcast_to(seen, (len_q, len_k)))

    def __and__(self, other: Any) -> "All":
        if not isinstance(other, Mask):
            return NotImplemented
        return All(self, other)


_lock = threading.Lock()
_nodes: set[type[Mask]] = set()  # classes that JAX knows


def _register(cls: type[Mask]) -> None:
    """Let JAX carry the masks of a class into its transformations and out of them."""

    def flatten(mask: Mask) -> tuple[list[Any], tuple[Mask, ...]]:
        return [x for part in mask.parts for x in part.arrays], tuple(p.static for p in mask.parts)

    def unflatten(statics: tuple[Mask, ...], leaves: Iterable[Any]) -> Mask:
        rest = iter(leaves)
        parts = [part.bound(*(next(rest) for _ in part.shapes)) for part in statics]
        return All(*parts) if cls is All else parts[0]

    with _lock:
        if cls not in _nodes:
            sys.modules["jax"].tree_util.register_pytree_node(cls, flatten, unflatten)
            _nodes.add(cls)


@dataclass(frozen=True)
class Band(Mask):
    """Full, causal and windowed attention: ``i + d - left <= j <= i + d + right`` is seen.

    Parameters
    ----------
    left, right : int or None
        How far the band reaches to either side of the diagonal, inclusive; None is unbounded, and
        a negative side ends before the diagonal.
    alignment : {"bottom_right", "top_left"}
        Whether the diagonal ``d`` is ``len_k - len_q`` or 0.
    """

    left: int | None = None
    right: int | None = None
    alignment: str = "bottom_right"

    header: ClassVar[str] = "masks/band.cuh"
    cuda_bytes: ClassVar[int] = 16

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            side = getattr(self, name)
            if side is None:
                continue
            if isinstance(side, bool | np.bool_) or not isinstance(side, numbers.Integral):
                raise InvalidType(
                    f"`{name}` must be an integer or None, got {type(side).__name__}: "
                    "use None for an unbounded side"
                )
            object.__setattr__(self, name, int(side))
        _check_alignment(self.alignment)

    @classmethod
    def of(
        cls, causal: Any = False, window_size: Any = (-1, -1), alignment: Any = "bottom_right"
    ) -> "Band":
        """Return the intersection of ``causal`` and ``window_size``, both checked."""
        if not isinstance(causal, bool | np.bool_):
            raise InvalidType(
                f"`causal` must be a bool, got {type(causal).__name__}: use True or False"
            )
        _check_alignment(alignment)
        if window_size is None:
            window_size = (None, None)
        if not isinstance(window_size, tuple | list) or len(window_size) != 2:
            raise InvalidArgument(
                f"`window_size` must be a pair (left, right), got {shown(window_size)}: "
                "use None for no window"
            )
        left, right = (_side(side) for side in window_size)
        if causal:
            right = 0
        return cls(left, right, alignment)

    @property
    def bounded(self) -> bool:
        """Whether the band hides anything, for some lengths."""
        return self.left is not None or self.right is not None

    def cuda_type(self, *dtypes: str) -> str:
        """Return the type in the translation unit: bounds are run-time, their presence is not."""
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

    def meet(self, other: "Band") -> "Band | None":
        """Return the band that is the intersection of two, or None where their diagonals differ."""
        if not other.bounded:
            return self
        if self.alignment != other.alignment:
            return None
        left, right = (
            min((side for side in sides if side is not None), default=None)
            for sides in ((self.left, other.left), (self.right, other.right))
        )
        return Band(left, right, self.alignment)

    def operands(self, len_q: int, len_k: int) -> tuple[int, int, int]:
        """Return (left, right, bottom_right) as the kernels take them.

        A side beyond every pair of positions is clamped to the longer length, which bounds nothing
        (or everything) and keeps 32-bit arithmetic in range; an unbounded side is 0 and never read.
        """
        left, right = self._clamped(len_q, len_k)
        return left or 0, right or 0, int(self.alignment == "bottom_right")

    def diagonal(self, len_q: int, len_k: int) -> int:
        """Return d: query i stands at key i + d."""
        return _diagonal(self.alignment, len_q, len_k)

    def keys(self, q_begin: int, q_end: int, len_q: int, len_k: int, b: int = 0) -> tuple[int, int]:
        """Return the range of keys that some query of [q_begin, q_end) sees, empty if none does."""
        if q_begin >= q_end:
            return 0, 0
        d = self.diagonal(len_q, len_k)
        begin = 0 if self.left is None else q_begin + d - self.left
        end = len_k if self.right is None else q_end + d + self.right
        begin = min(max(begin, 0), len_k)
        return begin, min(max(end, begin), len_k)

    def whole(
        self, q_begin: int, q_end: int, k_begin: int, k_end: int, len_q: int, len_k: int, b: int = 0
    ) -> bool:
        """Return whether every query of [q_begin, q_end) sees every key of [k_begin, k_end)."""
        d = self.diagonal(len_q, len_k)
        return (
            k_end <= len_k
            and (self.left is None or q_end - 1 + d - self.left <= k_begin)
            and (self.right is None or k_end - 1 <= q_begin + d + self.right)
        )

    def keep(self, i: np.ndarray, j: np.ndarray, len_q: int, len_k: int, b: int = 0) -> np.ndarray:
        """Return whether queries i see keys j, positions that broadcast against each other."""
        left, right = self._clamped(len_q, len_k)
        offset = j - (i + self.diagonal(len_q, len_k))
        seen = np.ones(offset.shape, dtype=bool)
        if left is not None:
            seen &= offset >= -left
        if right is not None:
            seen &= offset <= right
        return seen

    def _clamped(self, len_q: int, len_k: int) -> tuple[int | None, int | None]:
        """Return the sides, none larger than the longer length: beyond it a side bounds nothing."""
        longest = max(len_q, len_k)
        left, right = (
            None if side is None else max(min(side, longest), -longest)
            for side in (self.left, self.right)
        )
        return left, right


@dataclass(frozen=True)
class PrefixLM(Mask):
    """A prefix that every query sees, and causal attention after it.

    Query i sees the keys ``j < prefix[b]`` and ``j <= i + d``.

    Parameters
    ----------
    prefix : int, or integer array (batch,)
        How many keys the prefix has, of each batch entry or sequence.
    alignment : {"bottom_right", "top_left"}
        Whether the diagonal ``d`` is ``len_k - len_q`` or 0.
    """

    prefix: Any = field(compare=False)
    alignment: str = "bottom_right"

    header: ClassVar[str] = "masks/prefix_lm.cuh"
    cuda_bytes: ClassVar[int] = 16
    shapes: ClassVar[dict[str, tuple[str, ...]]] = {"prefix": ("batch",)}

    def __post_init__(self) -> None:
        _check_alignment(self.alignment)

    def cuda_type(self, *dtypes: str) -> str:
        """Return the type in the translation unit."""
        return "PrefixLM"

    def keys(self, q_begin: int, q_end: int, len_q: int, len_k: int, b: int = 0) -> tuple[int, int]:
        """Return the range of keys that some query of [q_begin, q_end) sees, empty if none does."""
        if q_begin >= q_end:
            return 0, 0
        end = max(_entry(self.prefix, b), q_end + _diagonal(self.alignment, len_q, len_k))
        return 0, min(max(end, 0), len_k)

    def whole(
        self, q_begin: int, q_end: int, k_begin: int, k_end: int, len_q: int, len_k: int, b: int = 0
    ) -> bool:
        """Return whether every query of [q_begin, q_end) sees every key of [k_begin, k_end)."""
        causal = k_end - 1 <= q_begin + _diagonal(self.alignment, len_q, len_k)
        return k_end <= len_k and (causal or k_end <= _entry(self.prefix, b))

    def keep(self, i: np.ndarray, j: np.ndarray, len_q: int, len_k: int, b: int = 0) -> np.ndarray:
        """Return whether queries i see keys j, positions that broadcast against each other."""
        causal: np.ndarray = j <= i + _diagonal(self.alignment, len_q, len_k)
        return causal | (j < _entry(self.prefix, b))


@dataclass(frozen=True)
class Segments(Mask):
    """Documents side by side: a query sees the keys of its own segment.

    Parameters
    ----------
    q : integer array (batch, len_q)
        The segment of each query; an array of fewer or smaller dimensions is broadcast.
    k : integer array (batch, len_k), optional
        The segment of each key, of the dtype of ``q``; ``q`` by default.
    """

    q: Any = field(compare=False)
    k: Any = field(default=None, compare=False)

    header: ClassVar[str] = "masks/segments.cuh"
    cuda_bytes: ClassVar[int] = 56
    shapes: ClassVar[dict[str, tuple[str, ...]]] = {
        "q": ("batch", "len_q"),
        "k": ("batch", "len_k"),
    }

    def __post_init__(self) -> None:
        if self.k is None:
            object.__setattr__(self, "k", self.q)

    def cuda_type(self, *dtypes: str) -> str:
        """Return the type in the translation unit, which has the bytes of an id."""
        return f"Segments<{np.dtype(dtypes[0]).itemsize}>"

    def keys(self, q_begin: int, q_end: int, len_q: int, len_k: int, b: int = 0) -> tuple[int, int]:
        """Return the smallest range of keys with all that some query of [q_begin, q_end) sees."""
        ids = _row(self.q, b, np.arange(q_begin, q_end))
        seen = np.flatnonzero(np.isin(_row(self.k, b, np.arange(len_k)), ids))
        return (int(seen[0]), int(seen[-1]) + 1) if seen.size else (0, 0)

    def whole(
        self, q_begin: int, q_end: int, k_begin: int, k_end: int, len_q: int, len_k: int, b: int = 0
    ) -> bool:
        """Return whether every query of [q_begin, q_end) sees every key of [k_begin, k_end)."""
        queries, keys = np.arange(q_begin, q_end)[:, None], np.arange(k_begin, k_end)
        first = self.keep(queries[:1], keys, len_q, len_k, b)
        return k_end <= len_k and bool(
            first.all() and self.keep(queries, keys[:1], len_q, len_k, b).all()
        )

    def keep(self, i: np.ndarray, j: np.ndarray, len_q: int, len_k: int, b: int = 0) -> np.ndarray:
        """Return whether queries i see keys j, positions that broadcast against each other."""
        same: np.ndarray = _row(self.q, b, i) == _row(self.k, b, j)
        return same


def _entry(x: Any, b: int) -> int:
    """Return what an array that broadcasts to (batch,) has for an entry."""
    return int(np.ravel(x)[b if np.size(x) > 1 else 0])


def _row(x: Any, b: int, positions: np.ndarray) -> np.ndarray:
    """Return what an array that broadcasts to (batch, length) has for positions of an entry.

    Positions beyond it have its last.
    """
    rows: np.ndarray = np.atleast_2d(x)
    row = rows[b if len(rows) > 1 else 0]
    return row[np.minimum(positions, len(row) - 1)]


class All(Mask):
    """The intersection of masks, which ``&`` makes.

    Parameters
    ----------
    *masks : Mask
        What is combined.
    """

    header: ClassVar[str] = "masks/all.cuh"

    def __init__(self, *masks: Mask) -> None:
        for mask in masks:
            if not isinstance(mask, Mask):
                raise InvalidType(
                    f"`masks` must be masks of cupyflash.masks, got {type(mask).__name__}"
                )
        self._parts = tuple(part for mask in masks for part in mask.parts)

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The masks that this one is the intersection of."""
        return self._parts

    def cuda_type(self, *dtypes: str) -> str:
        """Return the type in the translation unit."""
        rest = iter(dtypes)
        types = (part.cuda_type(*(next(rest) for _ in part.shapes)) for part in self.parts)
        return f"All<{', '.join(types)}>"

    def keys(self, q_begin: int, q_end: int, len_q: int, len_k: int, b: int = 0) -> tuple[int, int]:
        """Return a range of keys with all that some query of [q_begin, q_end) sees."""
        ranges = [part.keys(q_begin, q_end, len_q, len_k, b) for part in self.parts]
        begin = max((first for first, _ in ranges), default=0)
        return begin, max(begin, min((end for _, end in ranges), default=len_k))

    def whole(
        self, q_begin: int, q_end: int, k_begin: int, k_end: int, len_q: int, len_k: int, b: int = 0
    ) -> bool:
        """Return whether surely every query of [q_begin, q_end) sees all of [k_begin, k_end)."""
        return all(
            part.whole(q_begin, q_end, k_begin, k_end, len_q, len_k, b) for part in self.parts
        )

    def keep(self, i: np.ndarray, j: np.ndarray, len_q: int, len_k: int, b: int = 0) -> np.ndarray:
        """Return whether queries i see keys j, positions that broadcast against each other."""
        seen = np.ones(np.broadcast_shapes(i.shape, j.shape), dtype=bool)
        for part in self.parts:
            seen &= part.keep(i, j, len_q, len_k, b)
        return seen

    def __eq__(self, other: object) -> bool:
        return isinstance(other, All) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.parts))


ALL = (Band, PrefixLM, Segments)
