"""The oracle's operands: every layout becomes packed arrays (total, heads, dim) and sequences.

A dense batch is a packed one whose sequences have one length. `Packed` checks the operands, gives
absent modifiers their neutral value, and cuts the work into blocks of one sequence and head.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from . import _philox
from .errors import InvalidArgument, InvalidType, shown
from .masks import Mask

# The kinds of elements that arguments may have, as NumPy's letters, and what errors call them.
REAL = "fiu"
KINDS = {"f": "floating-point numbers", REAL: "real numbers", "iu": "integers", "b": "bool"}
ROWS = 256  # query rows of a block: no more of the score matrix ever exists


@dataclass(frozen=True)
class Options:
    """The keywords of the oracle's functions, with the meaning of `cupyflash.attention`'s."""

    softmax_scale: Any = None
    causal: bool = False
    window_size: tuple[int | None, int | None] = (-1, -1)
    alignment: str = "bottom_right"
    softcap: Any = 0.0
    alibi_slopes: Any = None  # (H,) or (B, H)
    attn_bias: Any = None  # broadcastable to (B, H, Sq, Sk)
    attn_mask: Any = None  # bool, broadcastable likewise; True attends
    mask: Any = None  # of cupyflash.masks
    seqused_q: Any = None  # (B,)
    seqused_k: Any = None  # (B,)
    learnable_sink: Any = None  # (H,)
    dropout_p: Any = 0.0
    rng_state: Any = None  # (seed, offset)
    q_descale: Any = None  # broadcastable to (B, Hk), multiplies; gradients are of the product
    k_descale: Any = None
    v_descale: Any = None
    layout: str = "bshd"
    cu_seqlens_q: Any = None  # (B + 1,): then q, k and v are packed
    cu_seqlens_k: Any = None


class Span(NamedTuple):
    """The rows of one sequence in a packed array."""

    first: int
    length: int


class Block(NamedTuple):
    """Some queries of one sequence and head, and all keys of the sequence."""

    b: int
    h: int
    h_k: int
    i: range  # positions of the queries in the sequence
    len_q: int
    len_k: int
    diagonal: int
    rows: slice  # of the packed q
    keys: slice  # of the packed k and v

    def tile(self, array: np.ndarray) -> np.ndarray:
        """Return the view of a (B, H, Sq, Sk) array on this block; an axis of size 1 stays so."""
        batch, heads, queries, _ = array.shape
        b, h = self.b if batch > 1 else 0, self.h if heads > 1 else 0
        rows = slice(self.i.start, self.i.stop) if queries > 1 else slice(None)
        return array[b, h, rows, : self.len_k]


class Packed:
    """The operands, checked, as packed arrays, with a span for every sequence."""

    def __init__(self, q: Any, k: Any, v: Any, options: dict[str, Any]):
        if unknown := options.keys() - Options.__dataclass_fields__:
            raise InvalidType(f"`{min(unknown)}` is no option of the oracle: see reference.Options")
        self.options = o = Options(**options)
        _check_options(o)
        self.dense, self.swapped = o.cu_seqlens_q is None, o.layout == "bhsd"
        q, k, v = (operand(name, x, "f") for name, x in (("q", q), ("k", k), ("v", v)))
        _check_shapes(q, k, v, self.dense, heads_axis=1 if self.swapped or not self.dense else 2)
        self.dtype, self.shape_q, self.shape_k = q.dtype, q.shape, k.shape
        self.q, self.k, self.v = (self.pack(x) for x in (q, k, v))
        (_, self.heads, dim), self.heads_k = self.q.shape, self.k.shape[1]
        self.spans_q = self._spans(q, o.cu_seqlens_q, o.seqused_q, "seqused_q")
        self.spans_k = self._spans(k, o.cu_seqlens_k, o.seqused_k, "seqused_k")
        self.batch = len(self.spans_q)
        if len(self.spans_k) != self.batch:
            raise InvalidArgument(
                f"`k` has {len(self.spans_k)} sequences and `q` has {self.batch}: must be equal"
            )

        default = 1 / math.sqrt(dim) if dim else 0.0
        self.scale = default if o.softmax_scale is None else float(o.softmax_scale)
        self.rescale = _philox.rescale(o.dropout_p)
        self.slopes = self._per_head("alibi_slopes", 0.0, (self.heads,), (self.batch, self.heads))
        self.sink = self._per_head("learnable_sink", -np.inf, (self.heads,))
        self.bias = self._per_score("attn_bias", 0.0)
        self.mask = self._per_score("attn_mask", True)
        self.descale = [self._descale(name) for name in ("q_descale", "k_descale", "v_descale")]

    def blocks(self) -> Iterator[Block]:
        """Yield blocks that cover every query of every sequence and head once."""
        top_left = self.options.alignment == "top_left"
        for b, (span, span_k) in enumerate(zip(self.spans_q, self.spans_k, strict=True)):
            keys = slice(span_k.first, span_k.first + span_k.length)
            diagonal = 0 if top_left else span_k.length - span.length
            for h, first in itertools.product(range(self.heads), range(0, span.length, ROWS)):
                i = range(first, min(first + ROWS, span.length))
                rows = slice(span.first + i.start, span.first + i.stop)
                h_k = h // (self.heads // self.heads_k)
                yield Block(b, h, h_k, i, span.length, span_k.length, diagonal, rows, keys)

    def load(self, at: Block, dtype: Any) -> list[np.ndarray]:
        """Return the block's q, k and v."""
        parts = self.q[at.rows, at.h], self.k[at.keys, at.h_k], self.v[at.keys, at.h_k]
        scales = (descale[at.b, at.h_k] for descale in self.descale)
        return [x.astype(dtype) * dtype(scale) for x, scale in zip(parts, scales, strict=True)]

    def sees(self, at: Block) -> Any:
        """Return which pairs of the block the mask leaves."""
        mask = self.options.mask
        if mask is None:
            return True
        return mask.keep(np.array(at.i)[:, None], np.arange(at.len_k), at.len_q, at.len_k, at.b)

    def keep(self, at: Block) -> Any:
        """Return which scores of the block dropout keeps."""
        o = self.options
        if self.rescale == 1:
            return True
        return _philox.keep(o.rng_state, o.dropout_p, at.b, at.h, at.i, range(at.len_k))

    def pack(self, x: np.ndarray) -> np.ndarray:
        """Return an array of the caller's layout as (total, heads, dim)."""
        if not self.dense:
            return x
        x = x.swapaxes(1, 2) if self.swapped else x
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    def unpack(self, x: np.ndarray, like: tuple[int, ...]) -> np.ndarray:
        """Return (total, heads, dim) in the caller's layout: `like`, save for the last axis."""
        if not self.dense:
            return x
        if not self.swapped:
            return x.reshape(*like[:3], x.shape[-1])
        batch, heads, length = like[:3]
        return x.reshape(batch, length, heads, x.shape[-1]).swapaxes(1, 2)

    def pack_lse(self, x: Any) -> np.ndarray:
        """Return (B, H, Sq), or zeros for None, as (H, B * Sq)."""
        if x is None:
            return np.zeros(self.q.shape[1::-1])
        x = np.asarray(x)
        return x.swapaxes(0, 1).reshape(self.q.shape[1::-1]) if self.dense else x

    def unpack_lse(self, x: np.ndarray) -> np.ndarray:
        """Return (H, B * Sq) as (B, H, Sq)."""
        if not self.dense:
            return x
        return x.reshape(self.heads, self.batch, self._length(self.shape_q)).swapaxes(0, 1)

    def _length(self, shape: tuple[int, ...]) -> int:
        return shape[2 if self.swapped else 1] if self.dense else shape[0]

    def _spans(self, x: np.ndarray, cu_seqlens: Any, used: Any, name: str) -> list[Span]:
        """Return the sequences of an array; no value of the metadata reaches outside it."""
        total = len(x)
        if self.dense:
            length = self._length(x.shape)
            cu_seqlens, total = [b * length for b in range(len(x) + 1)], len(x) * length
        else:
            cu_seqlens = _integers(name.replace("seqused", "cu_seqlens"), cu_seqlens)
        spans = []
        for first, end in itertools.pairwise(cu_seqlens):
            first = min(max(first, 0), total)
            spans.append(Span(first, min(max(end - first, 0), total - first)))
        if used is None:
            return spans
        limits = _integers(name, used)
        if len(limits) != len(spans):
            raise InvalidArgument(f"`{name}` must have {len(spans)} entries, got {len(limits)}")
        return [Span(a, min(n, max(limit, 0))) for (a, n), limit in zip(spans, limits, strict=True)]

    def _per_head(self, name: str, neutral: float, *shapes: tuple[int, ...]) -> np.ndarray:
        """Return slopes or sinks, in the last of the shapes that they may have."""
        given = getattr(self.options, name)
        value = np.full(shapes[-1], neutral) if given is None else operand(name, given)
        if value.shape not in shapes:
            expected = " or ".join(str(shape) for shape in shapes)
            raise InvalidArgument(f"`{name}` must have shape {expected}, got {value.shape}")
        return np.broadcast_to(value, shapes[-1])

    def _descale(self, name: str) -> np.ndarray:
        """Return the factors of fp8 inputs as (B, Hk)."""
        given = getattr(self.options, name)
        value = operand(name, 1.0 if given is None else given)
        try:
            return np.broadcast_to(value, (self.batch, self.heads_k))
        except ValueError:
            raise InvalidArgument(
                f"`{name}` must broadcast to {(self.batch, self.heads_k)}, got {value.shape}"
            ) from None

    def _per_score(self, name: str, neutral: Any) -> np.ndarray:
        """Return a bias or mask with four axes; those of packed arrays may exceed the lengths."""
        given = getattr(self.options, name)
        x = operand(name, neutral if given is None else given, "b" if name == "attn_mask" else REAL)
        x = x.reshape((1,) * (4 - x.ndim) + x.shape)
        sizes = [self.batch, self.heads, self._length(self.shape_q), self._length(self.shape_k)]
        if not self.dense:
            for axis, spans in ((2, self.spans_q), (3, self.spans_k)):
                longest = max((span.length for span in spans), default=0)
                sizes[axis] = max(longest, x.shape[axis])
        if x.ndim != 4 or any(n not in (1, size) for n, size in zip(x.shape, sizes, strict=True)):
            raise InvalidArgument(
                f"`{name}` must broadcast to {tuple(sizes)}, got {np.shape(given)}"
            )
        return x


def operand(name: str, x: Any, kinds: str = REAL) -> np.ndarray:
    """Return an argument as an array, whose elements are of one of NumPy's kinds."""
    try:
        array = np.asarray(x)
    except (TypeError, ValueError, RuntimeError):  # ragged, or a tensor that is not to be read
        array = np.empty(0, object)
    kind = "f" if "float" in array.dtype.name else array.dtype.kind  # ml_dtypes' floats are V
    if kind not in kinds:
        got = shown(x) if array.dtype.hasobject else array.dtype
        raise InvalidType(f"`{name}` must be an array of {KINDS[kinds]}, got {got}: convert it")
    return array


def _integers(name: str, x: Any) -> list[int]:
    """Return metadata, one row of integers."""
    nothing = isinstance(x, tuple | list) and not x  # to NumPy an array of floats
    array = operand(name, np.zeros(0, int) if nothing else x, "iu")
    if array.ndim != 1:
        raise InvalidArgument(f"`{name}` must have one dimension, got shape {array.shape}")
    return array.tolist()


def _check_options(o: Options) -> None:
    if (o.cu_seqlens_q is None) != (o.cu_seqlens_k is None):
        raise InvalidArgument("`cu_seqlens_q` and `cu_seqlens_k` must be given together")
    if not isinstance(o.layout, str) or o.layout not in ("bshd", "bhsd"):
        raise InvalidArgument(f'`layout` must be "bshd" or "bhsd", got {shown(o.layout)}')
    if not isinstance(o.alignment, str) or o.alignment not in ("bottom_right", "top_left"):
        raise InvalidArgument(
            f'`alignment` must be "bottom_right" or "top_left", got {shown(o.alignment)}'
        )
    if not isinstance(o.mask, Mask | None):
        raise InvalidType(f"`mask` must be one of cupyflash.masks, got {type(o.mask).__name__}")
    if not isinstance(o.causal, bool | np.bool_):
        raise InvalidType(f"`causal` must be a bool, got {shown(o.causal)}")
    window = o.window_size if isinstance(o.window_size, tuple | list) else ()
    sides = [side for side in window if side is not None]
    integers = all(isinstance(n, Integral) and not isinstance(n, bool) for n in sides)
    right = len(window) == 2 and integers and min(sides, default=0) >= -1
    if not right and o.window_size is not None:
        raise InvalidArgument(
            "`window_size` must be a pair of sizes, or -1 or None for no bound, "
            f"got {shown(o.window_size)}"
        )
    for name in ("softmax_scale", "softcap"):
        value = 0 if getattr(o, name) is None else getattr(o, name)
        try:
            right = not isinstance(value, str | bytes) and math.isfinite(value)
        except (TypeError, ValueError, OverflowError):
            right = False
        if not right or isinstance(value, bool):
            raise InvalidArgument(f"`{name}` must be a finite number, got {shown(value)}")
        if name == "softcap" and value < 0:
            raise InvalidArgument(f"`softcap` must not be negative, got {shown(value)}")


def _check_shapes(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dense: bool, heads_axis: int
) -> None:
    shapes = f"{q.shape}, {k.shape} and {v.shape}"
    rank = 4 if dense else 3
    if not q.ndim == k.ndim == v.ndim == rank:
        raise InvalidArgument(f"`q`, `k` and `v` must have {rank} dimensions, got {shapes}")
    if k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1] or (dense and len(q) != len(k)):
        raise InvalidArgument(
            "`k` must have the batch and head_dim of `q`, `v` the batch, length and heads of `k`, "
            f"got {shapes}"
        )
    heads, heads_k = q.shape[heads_axis], k.shape[heads_axis]
    if heads % heads_k if heads_k else heads:
        raise InvalidArgument(
            f"`k` has {heads_k} heads and `q` has {heads}: heads of q must be a multiple of heads "
            "of k"
        )
