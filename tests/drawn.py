"""What tests of the CPU path draw, and how they call it: arrays, modifiers, random problems."""

import math
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from strided import LAYOUTS, Strided

from cupyflash import _blas, _cpu
from cupyflash.masks import All, Band, Mask, PrefixLM, Segments

bfloat16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (np.dtype("float16"), bfloat16, np.dtype("float32"), np.dtype("float64"))
SMALL = {"BLOCK_Q": 16, "BLOCK_K": 24}  # tiles, of which a small problem has many


class FourThreads(_blas.OneBlasThread):
    def __enter__(self) -> int:
        super().__enter__()
        return 4


def direct(q: np.ndarray, k: np.ndarray, **options: Any) -> dict[str, Any]:
    """Return the options of `cupyflash.attention` as the functions of the CPU path take them."""
    batch, len_q, heads, dim = q.shape
    call = dict(options)
    names = ("causal", "window_size", "alignment")
    call["band"] = Band.of(**{name: call.pop(name) for name in names if name in call})
    scale = call.pop("softmax_scale", None)
    call["scale"] = scale if scale is not None else 1 / math.sqrt(dim) if dim else 0.0
    for name in ("attn_bias", "attn_mask"):
        if call.get(name) is not None:
            call[name] = np.broadcast_to(call[name], (batch, heads, len_q, k.shape[1]))
    if "mask" in call:
        call["masks"] = call.pop("mask").parts
    return call


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of the CPU path, in outputs that held NaN before."""
    batch, len_q, heads, _ = q.shape
    double = q.dtype == np.float64
    out = np.full((batch, len_q, heads, v.shape[-1]), np.nan, q.dtype)
    lse = np.full((batch, heads, len_q), np.nan, np.float64 if double else np.float32)
    _cpu.attention(q, k, v, out, lse, **direct(q, k, **options))
    return out, lse


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def inputs(
    rng: np.random.Generator,
    len_q: int = 37,
    len_k: int = 53,
    *,
    batch: int = 2,
    heads: int = 4,
    heads_k: int = 2,
    dim: int = 20,
    dim_v: int = 12,
    dtype: Any = np.float32,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        normal(rng, batch, len_q, heads, dim, dtype=dtype),
        normal(rng, batch, len_k, heads_k, dim, dtype=dtype),
        normal(rng, batch, len_k, heads_k, dim_v, dtype=dtype),
    )


def segments(rng: np.random.Generator, *shape: int, kinds: int = 4) -> np.ndarray:
    """Draw documents side by side."""
    return np.sort(rng.integers(0, kinds, shape), axis=-1)


def bias(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Draw a bias, a fifth of it -inf."""
    values = rng.standard_normal(shape)
    return np.where(rng.random(shape) < 0.2, -np.inf, values).astype(dtype)


# Each takes a generator and gives the options of a call on the shapes of `inputs`.
MODIFIERS: dict[str, Any] = {
    "nothing": lambda r: {},
    "causal": lambda r: {"causal": True},
    "top left": lambda r: {"causal": True, "alignment": "top_left"},
    "window": lambda r: {"window_size": (5, 9)},
    "left window": lambda r: {"window_size": (7, -1)},
    "huge window": lambda r: {"window_size": (2**80, 2**80)},
    "zero scale": lambda r: {"softmax_scale": 0.0},
    "negative scale": lambda r: {"softmax_scale": -0.3, "causal": True},
    "softcap": lambda r: {"softcap": 1.5},
    "alibi": lambda r: {"alibi_slopes": np.float32([0.5, 0.25, -0.1, 0])},
    "alibi by batch": lambda r: {"alibi_slopes": r.random((2, 4), np.float32), "causal": True},
    "bias": lambda r: {"attn_bias": bias(r, 2, 4, 37, 53)},
    "bias of keys": lambda r: {"attn_bias": bias(r, 2, 1, 1, 53)},
    "bias of queries": lambda r: {"attn_bias": bias(r, 4, 37, 1)},
    "bfloat16 bias": lambda r: {"attn_bias": bias(r, 1, 4, 37, 53, dtype=bfloat16)},
    "float16 bias": lambda r: {"attn_bias": bias(r, 4, 37, 53, dtype=np.float16)},
    "transposed bias": lambda r: {"attn_bias": bias(r, 2, 4, 53, 37).swapaxes(2, 3)},
    "mask": lambda r: {"attn_mask": r.random((2, 4, 37, 53)) < 0.3},
    "mask of keys": lambda r: {"attn_mask": r.random((2, 1, 1, 53)) < 0.7},
    "mask of queries": lambda r: {"attn_mask": r.random((37, 1)) < 0.7},
    "mask and causal": lambda r: {"attn_mask": r.random((1, 4, 37, 53)) < 0.3, "causal": True},
    "seqused": lambda r: {"seqused_q": np.int64([30, 0]), "seqused_k": np.int32([17, 40])},
    "no keys": lambda r: {"seqused_k": np.uint8([0, 53]), "causal": True},
    "long seqused": lambda r: {"seqused_q": np.int64([99, -3]), "seqused_k": np.int64([-1, 99])},
    "prefix": lambda r: {"mask": PrefixLM(np.array([40, 3]))},
    "prefix and window": lambda r: {"mask": PrefixLM(20, "top_left"), "window_size": (30, -1)},
    "segments": lambda r: {"mask": Segments(segments(r, 2, 37), segments(r, 1, 53))},
    "scattered segments": lambda r: {
        "mask": Segments(r.integers(0, 3, (2, 37)), r.integers(0, 3, (2, 53))),
        "seqused_k": np.int32([53, 20]),
    },
    "policies": lambda r: {
        "mask": PrefixLM(np.array([30, 53])) & Segments(segments(r, 37), segments(r, 53)),
        "attn_mask": r.random((4, 37, 53)) < 0.8,
    },
    "sink": lambda r: {"learnable_sink": np.float32([0.5, -np.inf, 40, -3])},
    "sink and window": lambda r: {"learnable_sink": normal(r, 4), "window_size": (3, 0)},
    "dropout": lambda r: {"dropout_p": 0.3, "rng_state": (17, 4)},
    "dropout of nothing": lambda r: {"dropout_p": 1e-9, "rng_state": (17, 4)},
    "dropout of all": lambda r: {"dropout_p": 1.0, "rng_state": np.uint32([1, 2, 3, 4])},
    "everything": lambda r: {
        "softmax_scale": 0.4,
        "softcap": 2.0,
        "alibi_slopes": r.random((2, 4), np.float32),
        "attn_bias": bias(r, 1, 4, 37, 53),
        "attn_mask": r.random((2, 1, 37, 53)) < 0.8,
        "window_size": (20, 4),
        "seqused_q": np.int32([30, 37]),
        "seqused_k": np.int32([50, 21]),
        "learnable_sink": normal(r, 4),
        "dropout_p": 0.25,
        "rng_state": np.int64([3, 1]),
    },
}


def policies(
    rng: np.random.Generator, batch: int, len_q: int, len_k: int
) -> st.SearchStrategy[Mask]:
    """Draw a mask."""
    prefixes = st.lists(st.integers(-1, len_k + 1), min_size=batch, max_size=batch).map(np.array)
    entries = st.sampled_from([1, batch])
    kinds = st.integers(1, 6)
    return st.one_of(
        st.builds(PrefixLM, prefixes, st.sampled_from(["bottom_right", "top_left"])),
        st.builds(
            lambda n, m, few: Segments(
                segments(rng, n, len_q, kinds=few), segments(rng, m, len_k, kinds=few)
            ),
            *(entries, entries, kinds),
        ),
    )


@st.composite
def problems(draw: Any) -> tuple[list[Strided], dict[str, Any]]:
    """Draw a problem with any set of modifiers, in memory of any layout.

    Not in fp64, where the oracle itself is not exact enough for a handful of elements.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(DTYPES[:3]))
    length = st.sampled_from([0, 1, 15, 16, 17, 23, 24, 25]) | st.integers(0, 70)
    dim = st.sampled_from([0, 1, 3, 8, 16, 33])
    batch, group, heads_k = (draw(st.integers(1, n)) for n in (3, 3, 2))
    len_q, len_k, head_dim, head_dim_v = draw(length), draw(length), draw(dim), draw(dim)
    heads = heads_k * group
    arrays = inputs(
        rng,
        len_q,
        len_k,
        batch=batch,
        heads=heads,
        heads_k=heads_k,
        dim=head_dim,
        dim_v=head_dim_v,
        dtype=dtype,
    )
    side = st.none() | st.just(-1) | st.integers(0, 80) | st.just(2**40)
    shape = [draw(st.sampled_from([1, n])) for n in (batch, heads, len_q, len_k)]
    per_batch = st.lists(st.integers(0, 80), min_size=batch, max_size=batch)
    choices = {
        "window_size": lambda: (draw(side), draw(side)),
        "causal": lambda: True,
        "alignment": lambda: "top_left",
        "softmax_scale": lambda: draw(st.floats(-2, 2)),
        "softcap": lambda: draw(st.floats(0.1, 50)),
        "alibi_slopes": lambda: normal(rng, *draw(st.sampled_from([(heads,), (batch, heads)]))),
        "attn_bias": lambda: bias(rng, *shape[draw(st.integers(0, 3)) :]),
        "attn_mask": lambda: rng.random(shape) < draw(st.sampled_from([0.1, 0.9])),
        "mask": lambda: All(*draw(st.lists(policies(rng, batch, len_q, len_k), max_size=2))),
        "seqused_q": lambda: np.array(draw(per_batch), np.int32),
        "seqused_k": lambda: np.array(draw(per_batch), np.int64),
        "learnable_sink": lambda: normal(rng, heads),
    }
    names = draw(st.sets(st.sampled_from([*choices, "dropout"])))
    options = {name: choices[name]() for name in choices if name in names}
    if "dropout" in names:
        seed = draw(st.integers(0, 2**64 - 1))
        options |= {"dropout_p": draw(st.floats(0, 1)), "rng_state": (seed, 1)}
    layout = st.sampled_from(["packed", *LAYOUTS])
    return [Strided.of(x, draw(layout)) for x in arrays], options
