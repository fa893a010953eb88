"""One problem to check or to time: its sizes and mask, and the inputs and counts that follow."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .. import reference
from .._explain import Request, resolve
from ..errors import InvalidArgument
from ..masks import Band
from .modifiers import Modifier, Place, modifier, squares

DTYPES: dict[str, np.dtype] = {
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
_LONG_NAMES = {dtype.name: short for short, dtype in DTYPES.items()}
_WINDOW = re.compile(r"window:(-?\d+),(-?\d+)")


def short_dtype(name: str) -> str:
    """Return the short name (``bf16``) of a dtype given by its short or its long name."""
    short = _LONG_NAMES.get(name, name)
    if short not in DTYPES:
        expected = ", ".join((*DTYPES, *_LONG_NAMES))
        raise InvalidArgument(f"`dtype` must be one of {expected}, got {name!r}")
    return short


def split_masks(text: str) -> list[str]:
    """Split a comma list of masks, where ``window:L,R`` has a comma of its own."""
    return re.findall(r"window:[^,]*,[^,]*|[^,]+", text)


def mask_options(mask: str) -> dict[str, Any]:
    """Return the arguments of `attention` that a mask's text stands for."""
    if mask in ("full", "causal"):
        return {"causal": mask == "causal"}
    window = _WINDOW.fullmatch(mask)
    if window is None:
        raise InvalidArgument(f"`mask` must be full, causal or window:L,R, got {mask!r}")
    return {"window_size": (int(window[1]), int(window[2]))}


def both(first: int, second: int, between: str) -> str:
    """Return two sizes as text, as one where they are equal."""
    return str(first) if first == second else f"{first}{between}{second}"


@functools.lru_cache(maxsize=8)
def normal(dtype: str, size: int, seed: int) -> np.ndarray:
    """Return standard normal numbers; the suites' large arrays take a second each."""
    return np.random.default_rng(seed).standard_normal(size, np.float32).astype(DTYPES[dtype])


@dataclass(frozen=True)
class Case:
    """One attention problem, in the words of the results files.

    Packed sequences see themselves only; `batch` is their number, `len_q` and `len_k` the longest.
    """

    dtype: str
    batch: int
    len_q: int
    len_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    mask: str = "full"  # "full", "causal" or "window:L,R"
    alignment: str = "bottom_right"
    modifier: str = ""  # one of `modifiers.MODIFIERS`, some with a value: "softcap:30"
    lengths: tuple[int, ...] = ()  # of packed sequences, which are their own keys

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, int) and value < 0:
                raise InvalidArgument(f"`{name}` must not be negative, got {value}")
        _ = self.band, self.modified  # check mask, alignment and modifier
        sizes = (len(self.lengths), max(self.lengths, default=0), max(self.lengths, default=0))
        if self.lengths and sizes != (self.batch, self.len_q, self.len_k):
            raise InvalidArgument(f"`lengths` must be {self.batch} up to {self.len_q}, got {sizes}")

    def __str__(self) -> str:
        lengths = both(self.len_q, self.len_k, "x")
        heads = both(self.heads_q, self.heads_k, "/")
        dims = both(self.head_dim, self.head_dim_v, "/")
        words = f"{self.dtype} B{self.batch} S{lengths} H{heads} D{dims} {self.mask}"
        return " ".join(filter(None, (words, self.variant)))

    @property
    def variant(self) -> str:
        """What the case has beyond a dense problem's mask, as the results files say it."""
        return " ".join(filter(None, ("packed" if self.lengths else "", self.modifier)))

    @property
    def features(self) -> set[str]:
        """What an implementation must have beyond dense attention with a band."""
        return {name.partition(":")[0] for name in self.variant.split()}

    @property
    def modified(self) -> Modifier:
        """The modifier, which knows its operands."""
        return modifier(self.modifier)

    @property
    def options(self) -> dict[str, Any]:
        """The mask as arguments of `cupyflash.attention`."""
        return {**mask_options(self.mask), "alignment": self.alignment}

    @property
    def band(self) -> Band:
        """The mask as the band policy that the kernels read."""
        options = mask_options(self.mask)
        window = options.get("window_size", (-1, -1))
        return Band.of(options.get("causal", False), window, self.alignment)

    def arguments(self, place: Place) -> dict[str, Any]:
        """Return all arguments of our call but q, k and v, each array as `place` puts it."""
        packing = self.packing(place) if self.lengths else {}
        return {**self.options, **self.modified.arguments(self, place), **packing}

    @property
    def ends(self) -> np.ndarray:
        """Where each packed sequence begins, and the last ends."""
        return np.cumsum((0, *self.lengths), dtype=np.int32)

    def packing(self, place: Place) -> dict[str, Any]:
        """Return the arguments that say where packed sequences are; the libraries agree on them."""
        ends, longest = place(self.ends), self.len_q
        return {
            "cu_seqlens_q": ends,
            "cu_seqlens_k": ends,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
        }

    def sizes(self, arch: int | str | None) -> dict[str, Any]:
        """Return the sizes as arguments of `cupyflash.explain`; no architecture is the host."""
        names = ("batch", "len_q", "len_k", "heads_q", "heads_k", "head_dim", "head_dim_v")
        sizes = {name: getattr(self, name) for name in names}
        if self.lengths:  # then the rows of all of them
            sizes["len_q"] = sizes["len_k"] = sum(self.lengths)
        return {**sizes, "dtype": DTYPES[self.dtype].name, "arch": arch}

    def request(self, arch: int | None, **extras: Any) -> Request:
        """Return the call that the dispatch table is asked about, with arguments beyond these."""
        options = self.arguments(lambda array: True) | extras
        return resolve((None, None, None), self.sizes(arch), options)

    def inputs(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return standard normal q, k and v in layout (batch, length, heads, head_dim)."""
        dtype = DTYPES[self.dtype]
        q, k, v = (rng.standard_normal(shape, np.float32).astype(dtype) for shape in self.shapes)
        return q, k, v

    def shared_inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the like in memory that all cases of as many elements share: only to be read."""
        q, k, v = (
            normal(self.dtype, math.prod(shape), seed).reshape(shape)
            for seed, shape in enumerate(self.shapes, 2026)
        )
        return q, k, v

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of q, k and v."""
        rows_q: tuple[int, ...] = (self.batch, self.len_q)
        rows_k: tuple[int, ...] = (self.batch, self.len_k)
        if self.lengths:
            rows_q = rows_k = (sum(self.lengths),)
        return (
            (*rows_q, self.heads_q, self.head_dim),
            (*rows_k, self.heads_k, self.head_dim),
            (*rows_k, self.heads_k, self.head_dim_v),
        )

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the output."""
        return (*self.shapes[0][:-1], self.head_dim_v)

    def pairs(self) -> float:
        """Count the (query, key) pairs of one head; a square causal mask counts as half of all.

        Of one batch entry, or of all packed sequences.
        """
        if self.lengths:
            return squares(self.lengths, self.mask)
        if (pairs := self.modified.pairs(self)) is not None:
            return pairs
        if self.mask == "full":
            return self.len_q * self.len_k
        if self.mask == "causal" and self.len_q == self.len_k:
            return self.len_q * self.len_k / 2
        rows = (self.band.keys(i, i + 1, self.len_q, self.len_k) for i in range(self.len_q))
        return sum(end - begin for begin, end in rows)

    def flops(self) -> float:
        """Count the floating-point operations of the two matrix products, forward."""
        batch = 1 if self.lengths else self.batch
        return 2.0 * batch * self.heads_q * self.pairs() * (self.head_dim + self.head_dim_v)

    def bytes(self) -> int:
        """Count the bytes of q, k, v and the output: what a forward pass cannot help but move."""
        dtype = DTYPES[self.dtype]
        read, written = sum(map(math.prod, self.shapes)), math.prod(self.out_shape)
        return read * dtype.itemsize + written * reference.output_dtype(dtype).itemsize
