"""The problems on which every forward kernel is held against the oracle.

`SMOKE` is a handful that touches every code path, `SHAPES` a seeded grid over head dims, dtypes,
lengths, heads, bands and memory layouts, `EDGES` the shapes at which attention kernels have been
seen to fail, `MEMORY` one case for each layout.
"""

from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
from strided import LAYOUTS, ROWWISE, Strided

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
HEAD_DIMS = (
    *((1, 1), (2, 2), (3, 3), (5, 4), (7, 9), (8, 8), (9, 7), (15, 15), (16, 16), (17, 17)),
    *((24, 24), (31, 33), (32, 32), (33, 31), (40, 40), (48, 56), (56, 56), (63, 65), (64, 64)),
    *((65, 63), (72, 72), (80, 80), (88, 88), (96, 96), (97, 97), (100, 100), (104, 112)),
    *((127, 127), (128, 128), (129, 129), (160, 160), (192, 192), (193, 193), (224, 224)),
    *((255, 255), (256, 256), (64, 32), (192, 128), (1, 256), (256, 1), (16, 128), (128, 16)),
)


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
