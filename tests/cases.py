"""The problems on which every forward kernel is held against the oracle.

`SMOKE` is a handful that touches every code path, `SHAPES` a seeded grid over head dims, dtypes,
lengths, heads, bands and memory layouts, `EDGES` the shapes at which attention kernels have been
seen to fail, `MEMORY` one case for each layout. `MODIFIED` are problems with modifiers: `ALONE`
each of them, `MIXED` random sets, `VARLEN` packed sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any
from zlib import crc32

import numpy as np
from strided import LAYOUTS, ROWWISE, Layout, Strided, dense

from cupyflash import masks

DTYPES = ("bfloat16", "float16", "float32")
UNBOUNDED = (-1, -1)
HUGE = 2**31 - 1
TILES = (16, 32, 64, 128)  # lengths one off a tile of a kernel, whichever of these it uses
LENGTHS = tuple(sorted({0, 1} | {tile + off for tile in TILES for off in (-1, 0, 1)}))


@dataclass(frozen=True)
class Case:
    """One problem: sizes, dtype, options, and how its arrays lie in memory (keys of `LAYOUTS`)."""

    len_q: int
    len_k: int
    head_dim: int
    head_dim_v: int
    dtype: str = "bfloat16"
    batch: int = 1
    heads_q: int = 1
    heads_k: int = 1
    causal: bool = False
    window_size: tuple[int | None, int | None] = UNBOUNDED
    alignment: str = "bottom_right"
    softmax_scale: float | None = None
    memory: tuple[str, str, str] = ("packed", "packed", "packed")
    label: str = ""

    @property
    def id(self) -> str:
        """A readable name that tells the case from every other."""
        parts = [
            self.label,
            f"{self.dtype}-b{self.batch}-q{self.len_q}k{self.len_k}",
            f"h{self.heads_q}/{self.heads_k}-d{self.head_dim}/{self.head_dim_v}",
            "causal" * self.causal,
            "" if self.window_size == UNBOUNDED else "window{}:{}".format(*self.window_size),
            "top_left" if self.alignment == "top_left" else "",
            "" if self.softmax_scale is None else f"scale{self.softmax_scale}",
            "+".join(dict.fromkeys(m for m in self.memory if m != "packed")),
        ]
        return "-".join(part for part in parts if part)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the call, the same for every kernel and for the oracle."""
        return {
            "causal": self.causal,
            "window_size": self.window_size,
            "alignment": self.alignment,
            "softmax_scale": self.softmax_scale,
        }

    def arrays(self) -> tuple[Strided, Strided, Strided]:
        """Draw q, k and v, always the same ones for the same case."""
        rng = np.random.default_rng(crc32(self.id.encode()))
        shapes = (
            (self.batch, self.len_q, self.heads_q, self.head_dim),
            (self.batch, self.len_k, self.heads_k, self.head_dim),
            (self.batch, self.len_k, self.heads_k, self.head_dim_v),
        )
        q, k, v = (
            Strided.of(rng.standard_normal(shape).astype(self.dtype), memory)
            for shape, memory in zip(shapes, self.memory, strict=True)
        )
        return q, k, v


SMOKE = (
    Case(65, 129, 64, 64, batch=2, heads_q=4, heads_k=2),
    Case(130, 130, 128, 128, "float16", causal=True, heads_q=2, heads_k=1),
    Case(70, 200, 80, 48, "bfloat16", window_size=(40, 10), alignment="top_left"),
    Case(33, 90, 40, 40, "float32", window_size=(16, -1), heads_q=3),
    Case(17, 40, 7, 5, "float16", memory=("offset_1", "row_gap_1", "heads_first")),
    Case(64, 64, 256, 256, causal=True),
    Case(129, 20, 64, 64, "float32", causal=True),
)

# (D, Dv): every bucket of the kernels at its edges, odd ones, and value dims of another bucket.
HEAD_DIMS = [(n, n) for n in (64, 64, 128, 40, 256)] + [(80, 96), (33, 31), (16, 8), (192, 128)]


def _window(rng: np.random.Generator) -> tuple[int | None, int | None]:
    """Draw a window: two-sided, one-sided, empty in places, or wider than any array."""
    sides = (-1, None, 0, 1, 7, 31, 32, 33, 64, 100, HUGE, 2**40)
    left, right = (sides[i] for i in rng.integers(len(sides), size=2))
    return left, right


def _draw(rng: np.random.Generator, index: int, dims: tuple[int, int]) -> Case:
    """Draw everything but the head dims."""
    dtype = DTYPES[(index + index // len(HEAD_DIMS)) % len(DTYPES)]
    lengths = rng.choice([*LENGTHS[1:], 50, 100, 200, 300], size=2)
    heads_k = int(rng.integers(1, 4))
    layouts = list(ROWWISE) + ["packed"] * 4
    return Case(
        *(int(n) for n in lengths),
        *dims,
        dtype,
        batch=int(rng.integers(1, 4)),
        heads_q=heads_k * int(rng.choice([1, 1, 2, 3, 8])),
        heads_k=heads_k,
        causal=bool(rng.random() < 0.4),
        window_size=_window(rng) if rng.random() < 0.4 else UNBOUNDED,
        alignment="top_left" if rng.random() < 0.3 else "bottom_right",
        memory=tuple(str(name) for name in rng.choice(layouts, size=3)),
        label=f"{index:02}",
    )


def _grid() -> tuple[Case, ...]:
    """Give each pair of head dims two dtypes; draw everything else with a fixed seed."""
    rng = np.random.default_rng(20260)
    return tuple(_draw(rng, index, dims) for index, dims in enumerate(HEAD_DIMS * 2))


SHAPES = _grid()

_SMALL = {"head_dim": 16, "head_dim_v": 24, "dtype": "float16"}
EDGES = (
    # An axis of no elements.
    Case(3, 5, **_SMALL, batch=0, label="no_batch"),
    Case(0, 5, **_SMALL, batch=2, label="no_query"),
    Case(3, 0, **_SMALL, batch=2, heads_q=2, heads_k=2, label="no_key"),
    Case(3, 0, **_SMALL, causal=True, label="no_key"),
    Case(0, 0, **_SMALL, label="no_query_no_key"),
    Case(3, 5, **_SMALL, heads_q=0, heads_k=2, label="no_query_head"),
    Case(3, 5, **_SMALL, heads_q=0, heads_k=0, label="no_head"),
    Case(3, 5, 16, 0, "float16", batch=2, label="no_value_column"),
    Case(3, 5, 0, 8, "float16", batch=2, label="no_column"),
    Case(3, 5, 0, 8, "float32", causal=True, label="no_column"),
    Case(3, 5, 0, 0, "bfloat16", label="no_column_at_all"),
    # More queries than keys, and the other way round, under both alignments.
    Case(2048, 1024, 64, 64, causal=True, label="rows_before_the_first_key"),
    Case(300, 20, 64, 64, causal=True, alignment="top_left", label="keys_run_out"),
    Case(20, 300, 64, 64, causal=True, alignment="top_left", label="most_keys_unseen"),
    Case(128, 256, 64, 64, batch=2, heads_q=2, heads_k=2, label="more_keys"),
    Case(256, 128, 64, 64, batch=2, heads_q=2, heads_k=2, label="more_queries"),
    Case(1024, 2048, 64, 64, label="many_tiles"),
    Case(256, 256, 64, 64, "float16", heads_q=8, heads_k=2, causal=True, label="grouped_causal"),
    Case(1001, 503, 64, 64, "float16", label="ragged_tail"),
    Case(9, 9, 64, 64, "float16", label="one_short_tile"),
    # Windows that leave rows or whole tiles empty.
    Case(129, 32, 64, 64, window_size=(32, 64), label="rows_left_of_the_window"),
    Case(40, 400, 64, 64, window_size=(0, 0), label="one_key_each"),
    Case(200, 70, 64, 64, window_size=(0, 0), label="one_key_or_none"),
    Case(400, 100, 64, 64, window_size=(3, 3), alignment="top_left", label="rows_past_the_end"),
    Case(500, 500, 64, 64, window_size=(HUGE, 0), label="huge_left"),
    Case(500, 500, 64, 64, window_size=(0, 2**62), label="huge_right"),
    Case(70, 4, 64, 64, window_size=(None, 100), label="right_wider_than_the_keys"),
    Case(600, 600, 64, 64, window_size=(70, None), causal=True, label="causal_window"),
    Case(600, 600, 64, 64, window_size=(300, 5), label="wide_band"),
    # Short queries, which other libraries give a path of their own.
    *(Case(n, 100, 64, 64, memory=("heads_first",) * 3, label="short") for n in (1, 2, 8, 9)),
    # Heads: many, one for all, and a group that fills no tile.
    Case(5, 40, 64, 64, heads_q=40, heads_k=5, label="many_heads"),
    Case(16, 50, 64, 64, heads_q=17, label="odd_group"),
    Case(512, 512, 72, 72, "float16", heads_q=3, heads_k=3, label="odd_bucket"),
    # Scales that break a kernel which masks or takes the maximum before scaling.
    *(
        Case(70, 70, 64, 64, causal=True, softmax_scale=scale, label="scale")
        for scale in (0.0, -0.125, 2.0, -1.0)
    ),
    Case(40, 70, 64, 64, "float32", softmax_scale=-0.5, window_size=(9, 3), label="scale"),
)

# One case a layout: what is read in place, with stride 0, and what is copied first. In float32 V
# never repeats: where all values are equal, one rounding error is that of every element, and the
# accuracy rule has no sample to judge by.
MEMORY = tuple(
    Case(50, 90, 40, 24, dtype, 3, 4, 4, memory=memory, label="memory")
    for dtype in ("float16", "float32")
    for name in LAYOUTS
    for memory in [(name, name, "packed" if dtype == "float32" and "one_" in name else name)]
)


# Modifiers, masks and lengths, each alone and in random sets of all: one list for every kernel.

Maker = Callable[["Modified", np.random.Generator], dict[str, Any]]


def _bias(dtype: str, *axes: int, layout: Callable[..., Layout] = dense) -> Maker:
    """Make a bias that varies along these axes of (batch, heads, len_q, len_k), a tenth of -inf."""

    def make(case: "Modified", rng: np.random.Generator) -> dict[str, Any]:
        shape = tuple(n if axis in axes else 1 for axis, n in enumerate(case.scores))
        values = rng.standard_normal(shape)
        values[rng.random(shape) < 0.1] = -np.inf
        return {"attn_bias": Strided.of(values.astype(dtype), layout(shape))}

    return make


def _mask(*axes: int, layout: Callable[..., Layout] = dense) -> Maker:
    """Make a mask of True and False likewise, some of whose rows are all False."""

    def make(case: "Modified", rng: np.random.Generator) -> dict[str, Any]:
        shape = tuple(n if axis in axes else 1 for axis, n in enumerate(case.scores))
        seen = rng.random(shape) < 0.7
        if 2 in axes:
            seen[:, :, ::5] = False
        return {"attn_mask": Strided.of(seen, layout(shape))}

    return make


def _used(name: str, dtype: str) -> Maker:
    """Make lengths in use: none, all, and what lies between."""

    def make(case: "Modified", rng: np.random.Generator) -> dict[str, Any]:
        lengths = case.lens_q if name == "seqused_q" else case.lens_k
        used = [int(rng.integers(0, n + 1)) for n in lengths]
        used[:2] = [*lengths[:1], 0][: len(used)]
        return {name: np.minimum(used, np.iinfo(dtype).max).astype(dtype)}

    return make


def _segments(case: "Modified", rng: np.random.Generator) -> dict[str, Any]:
    """Make documents of random lengths, side by side."""
    _, _, len_q, len_k = case.scores
    ids = [
        np.sort(rng.integers(0, 4, (case.sequences, n))).astype(np.int32) for n in (len_q, len_k)
    ]
    return {"mask": masks.Segments(*ids)}


# What a name in `Modified.modifiers` adds to the options of a call.
MODIFIERS: dict[str, Maker] = {
    "softcap": lambda c, r: {"softcap": 1.5},
    "alibi": lambda c, r: {"alibi_slopes": r.random(c.heads_q, np.float32)},
    "alibi_batch": lambda c, r: {"alibi_slopes": r.random((c.sequences, c.heads_q), np.float32)},
    "bias": _bias("float32", 0, 1, 2, 3),
    "bias_fp16": _bias("float16", 0, 2, 3),
    "bias_bf16": _bias("bfloat16", 1, 2, 3),
    "bias_fp64": _bias("float64", 2, 3),
    "bias_of_keys": _bias("bfloat16", 0, 3),
    "bias_of_queries": _bias("float16", 1, 2),
    "bias_columns_first": _bias("float16", 1, 2, 3, layout=lambda s: dense(s, (0, 1, 3, 2))),
    "bias_of_odd_rows": _bias("bfloat16", 2, 3, layout=lambda s: dense(s, shift=1)),
    "mask": _mask(0, 1, 2, 3),
    "mask_of_keys": _mask(0, 3),
    "mask_of_queries": _mask(1, 2),
    "mask_columns_first": _mask(0, 2, 3, layout=lambda s: dense(s, (0, 1, 3, 2), shift=1)),
    "prefix": lambda c, r: {
        "mask": masks.PrefixLM(r.integers(0, c.scores[3] + 1, c.sequences).astype(np.int32))
    },
    "prefix_of_all": lambda c, r: {"mask": masks.PrefixLM(9, "top_left")},
    "segments": _segments,
    "sink": lambda c, r: {"learnable_sink": r.standard_normal(c.heads_q).astype(np.float32)},
    "sink_fp16": lambda c, r: {
        "learnable_sink": np.where(r.random(c.heads_q) < 0.3, -np.inf, 3).astype(np.float16)
    },
    "dropout": lambda c, r: {"dropout_p": 0.25, "rng_state": (2**63 + 11, 2**40 + 5)},
    "dropout_array": lambda c, r: {
        "dropout_p": 0.5, "rng_state": r.integers(0, 2**32, 4).astype(np.uint32)
    },
    "dropout_of_all": lambda c, r: {"dropout_p": 1.0, "rng_state": (1, 2)},
    "used_q": _used("seqused_q", "int32"),
    "used_k": _used("seqused_k", "int64"),
    "used_uint8": _used("seqused_k", "uint8"),
}  # fmt: skip


@dataclass(frozen=True)
class Modified(Case):
    """A problem with modifiers (keys of `MODIFIERS`); of packed sequences where `packed` says so.

    The sequences of a packed problem have the lengths `packed`, pairs of queries and keys; `tail`
    rows of none follow the last.
    """

    modifiers: tuple[str, ...] = ()
    layout: str = "bshd"
    packed: tuple[tuple[int, int], ...] | None = None
    tail: int = 0

    @classmethod
    def varlen(cls, packed: tuple[tuple[int, int], ...], *dims: Any, **rest: Any) -> "Modified":
        """Return a problem of packed sequences."""
        tail = rest.get("tail", 0)
        len_q, len_k = (sum(pair[side] for pair in packed) + tail for side in (0, 1))
        return cls(len_q, len_k, *dims, packed=packed, **rest)

    @property
    def id(self) -> str:
        """A readable name that tells the case from every other."""
        parts = [super().id, *self.modifiers, "" if self.layout == "bshd" else self.layout]
        if self.packed is not None:
            runs = [(len([*run]), pair) for pair, run in groupby(self.packed)]
            lengths = ("{}x{}:{}".format(n, *pair).removeprefix("1x") for n, pair in runs)
            parts.append("packed" + "+".join(lengths))
            parts.append(f"tail{self.tail}" if self.tail else "")
        return "-".join(part for part in parts if part)

    @property
    def sequences(self) -> int:
        """How many sequences, or batch entries, there are."""
        return self.batch if self.packed is None else len(self.packed)

    @property
    def lens_q(self) -> tuple[int, ...]:
        """The queries of each."""
        return self._lengths(0, self.len_q)

    @property
    def lens_k(self) -> tuple[int, ...]:
        """The keys of each."""
        return self._lengths(1, self.len_k)

    def _lengths(self, side: int, length: int) -> tuple[int, ...]:
        if self.packed is None:
            return (length,) * self.batch
        return tuple(pair[side] for pair in self.packed)

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """The shape that a bias broadcasts to."""
        longest = (max(lengths, default=0) for lengths in (self.lens_q, self.lens_k))
        return (self.sequences, self.heads_q, *longest)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the call."""
        rng = np.random.default_rng(crc32(self.id.encode()) + 1)
        options = super().options
        for name in self.modifiers:
            made = MODIFIERS[name](self, rng)
            if "mask" in made and "mask" in options:
                made["mask"] = options["mask"] & made["mask"]
            options |= made
        if self.packed is None:
            return options | {"layout": self.layout}
        for side, name in enumerate(("cu_seqlens_q", "cu_seqlens_k")):
            ends = np.cumsum([0, *(pair[side] for pair in self.packed)])
            options[name] = ends.astype(np.int64 if self.tail else np.int32)
        return options

    def arrays(self) -> tuple[Strided, Strided, Strided]:
        """Draw q, k and v, in the layout of the call."""
        q, k, v = super().arrays()
        if self.packed is not None:
            return _view(q, 1, 2, 3), _view(k, 1, 2, 3), _view(v, 1, 2, 3)
        if self.layout == "bhsd":
            return _view(q, 0, 2, 1, 3), _view(k, 0, 2, 1, 3), _view(v, 0, 2, 1, 3)
        return q, k, v


def _view(x: Strided, *axes: int) -> Strided:
    """Return a copy with these axes, each where it lay in memory; an axis left out has size 1."""
    shape = tuple(x.shape[axis] for axis in axes)
    strides = tuple(x.layout.strides[axis] for axis in axes)
    values = np.array(x.host).transpose(*axes, *({*range(4)} - {*axes})).reshape(shape)
    return Strided.of(values, x.layout._replace(strides=strides))


ALONE = tuple(
    Modified(
        *(97, 130, 64, 64, dtype),
        batch=2,
        heads_q=4,
        heads_k=2,
        causal=n % 3 == 0,
        modifiers=(name,),
        label="alone",
    )
    for n, name in enumerate(MODIFIERS)
    for dtype in [DTYPES[n % 3]]
)

# At most one of each: what would replace another's argument.
_CHOICES = (
    ("softcap",),
    ("alibi", "alibi_batch"),
    tuple(name for name in MODIFIERS if name.startswith("bias")),
    tuple(name for name in MODIFIERS if name.startswith("mask")),
    ("prefix", "prefix_of_all"),
    ("segments",),
    ("sink", "sink_fp16"),
    ("dropout", "dropout_array"),
    ("used_q",),
    ("used_k", "used_uint8"),
)
_DIMS = (
    (64, 64),
    (64, 64),
    (128, 128),
    (40, 40),
    (80, 96),
    (33, 31),
    (16, 8),
    (192, 128),
    (256, 256),
)


_FEW_HEADS = tuple({"heads_q": n, "heads_k": m} for n, m in ((1, 1), (4, 2), (3, 1), (2, 2)))


def _set(rng: np.random.Generator) -> tuple[str, ...]:
    """Draw modifiers: none of a few kinds, one of the others."""
    return tuple(str(rng.choice(names)) for names in _CHOICES if rng.random() < 0.35)


def _mixed(rng: np.random.Generator, index: int) -> Modified:
    """Draw a dense problem with a set of modifiers."""
    base = _draw(rng, index, _DIMS[index % len(_DIMS)])
    drawn = {field.name: getattr(base, field.name) for field in fields(base)}
    return Modified(
        **drawn | _FEW_HEADS[index % 4] | {"label": f"mixed{index:02}"},
        modifiers=_set(rng),
        layout=("bshd", "bhsd")[index % 2],
    )


def _varlen(rng: np.random.Generator, index: int) -> Modified:
    """Draw a packed problem with a set of modifiers: lengths around tiles, and some of none."""
    count = int(rng.integers(1, 6))
    lengths = rng.choice([0, 1, 5, 15, 16, 17, 63, 64, 65, 127, 128, 129, 150], (count, 2))
    base = _draw(rng, index, _DIMS[index % len(_DIMS)])
    describable = [name for name in ROWWISE if name != "reversed_batch"]
    return Modified.varlen(
        tuple((int(n), int(m)) for n, m in lengths),
        *(base.head_dim, base.head_dim_v, base.dtype),
        **_FEW_HEADS[index % 4],
        causal=base.causal,
        window_size=base.window_size,
        alignment=base.alignment,
        memory=tuple(str(name) for name in rng.choice(describable + ["packed"] * 9, 3)),
        modifiers=_set(rng),
        tail=int(rng.choice([0, 0, 3])),
        label=f"varlen{index:02}",
    )


MIXED = tuple(_mixed(rng, n) for rng in [np.random.default_rng(515)] for n in range(64))

_HEADS = {"heads_q": 4, "heads_k": 2}
VARLEN = (
    # One sequence, equal ones, lengths of every kind, and none at all.
    Modified.varlen(((70, 90),), 64, 64, **_HEADS),
    Modified.varlen(((64, 64),) * 4, 64, 64, **_HEADS, causal=True),
    Modified.varlen(((1, 1), (127, 127), (128, 128), (129, 129), (0, 0), (63, 63)), 64, 64),
    Modified.varlen(((300, 300), *((5, 5),) * 20), 128, 128, **_HEADS, causal=True),
    Modified.varlen(((3, 3), (0, 4), (5, 0), (0, 0), (1, 9)), 16, 16, "float32", causal=True),
    Modified.varlen(((0, 0), (0, 5)), 16, 16, "float16"),
    Modified.varlen(((5, 0), (2, 0)), 16, 16, "float16"),
    Modified.varlen((), 16, 16, "float16", tail=2),
    Modified.varlen((), 16, 16, "float16"),
    Modified.varlen(((3, 5), (4, 1)), 0, 8, "float16", causal=True),
    Modified.varlen(((3, 5), (4, 1)), 16, 0, "float16"),
    Modified.varlen(((3, 5), (4, 1)), 16, 16, "float16", heads_q=0, heads_k=2),
    Modified.varlen(((40, 30), (30, 40)), 64, 32, "float16", tail=5, causal=True),
    # A query of each sequence, or none: what decoding packs.
    Modified.varlen(((1, 3), (0, 0), (1, 5)), 64, 64, heads_q=9, heads_k=3, causal=True),
    # Queries without keys to see, at the begin of sequences and of windows.
    Modified.varlen(((76, 1), (34, 1), (146, 1)), 32, 32, "float16", causal=True),
    Modified.varlen(((90, 20), (20, 90)), 64, 64, window_size=(9, 3)),
    Modified.varlen(((90, 20), (20, 90)), 64, 64, window_size=(9, -1), alignment="top_left"),
    Modified.varlen(((7, 7),) * 40, 64, 64, "float32", causal=True, softmax_scale=-0.5),
    *(
        Modified.varlen(((70, 90), (0, 3), (129, 40)), 64, 64, **_HEADS, modifiers=names)
        for names in (
            ("alibi_batch",),
            ("bias_fp16", "mask_of_keys"),
            ("bias_of_queries", "mask_columns_first"),
            ("prefix",),
            ("segments", "prefix"),
            ("sink", "dropout"),
            ("used_q", "used_k"),
            ("softcap", "alibi", "bias", "mask", "prefix", "sink", "dropout", "used_k"),
        )
    ),
    *(_varlen(rng, n) for rng in [np.random.default_rng(516)] for n in range(40)),
)
MODIFIED = ALONE + MIXED + VARLEN
