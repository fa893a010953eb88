"""The CPU path's gradients by itself: every modifier, its tiles, its order of sums, its memory."""

import math
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from drawn import (
    DTYPES,
    MODIFIERS,
    SMALL,
    attend,
    bfloat16,
    bias,
    direct,
    inputs,
    normal,
    problems,
)  # fmt: skip
from harness import same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strided import LAYOUTS, Strided

import cupyflash
from cupyflash import Gradients, _cpu, _cpu_backward, _threads, _tile_gradients
from cupyflash._accuracy import gradients_verdict
from cupyflash.masks import Band, PrefixLM, Segments


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tiles so small that a small problem has many."""
    for name, size in (SMALL | {"CHUNK": 8}).items():
        monkeypatch.setattr(_tile_gradients, name, size)


@pytest.fixture(params=["small tiles", "tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the real tiles and with small ones."""
    if request.param == "small tiles":
        shrink(monkeypatch)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


def seeds(rng: np.random.Generator, q: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw dout and dlse."""
    batch, len_q, heads, _ = q.shape
    dlse = normal(rng, batch, heads, len_q, dtype=float if q.dtype == float else np.float32)
    return normal(rng, *q.shape[:3], v.shape[-1], dtype=q.dtype), dlse


def backward(
    dout: np.ndarray, dlse: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any
) -> Gradients:
    """Return the gradients of the CPU path, in arrays that held NaN before.

    `results`, an option, is (out, lse) of another forward pass.
    """
    results = options.pop("results", None)
    own = {name: x for name, x in options.items() if "cu_seqlens" not in name}
    if len(own) < len(options):
        out, lse = cupyflash.attention_varlen(q, k, v, return_lse=True, kernel="cpu", **options)
        return cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    out, lse = attend(q, k, v, **options) if results is None else results
    given = q, k, v, options.get("attn_bias"), options.get("learnable_sink")
    grads = Gradients(*(x if x is None else np.full(x.shape, np.nan, x.dtype) for x in given))
    dq, dk, dv, dbias, dsink = grads
    if dbias is not None:
        dbias = dbias.reshape((1,) * (4 - dbias.ndim) + dbias.shape)
    given = q, k, v, out, lse, dout, dlse, dq, dk, dv, dbias, dsink
    _cpu_backward.attention_backward(*given, **direct(q, k, **options))
    return grads


def assert_same(grads: Gradients, others: Gradients) -> None:
    """Assert that gradients are the same numbers; a zero may have either sign."""
    for name, x, y in zip(grads._fields, grads, others, strict=True):
        if x is not y:
            np.testing.assert_array_equal(x, y, err_msg=name)


def check(rng: np.random.Generator, *arrays: np.ndarray, **options: Any) -> Gradients:
    """Draw dout and dlse, hold the gradients against the oracle and return them."""
    dout, dlse = seeds(rng, arrays[0], arrays[2])
    grads = backward(dout, dlse, *arrays, **options)
    result = gradients_verdict(grads, dout, *arrays, dlse=dlse, **options)
    assert result.ok, result.message
    return grads


def check_in_double(dout: Any, dlse: Any, *arrays: np.ndarray, **options: Any) -> Gradients:
    """Compute in fp64 from values of fp32, and judge as fp32: what is wrong is no rounding."""
    grads = backward(dout, dlse, *arrays, **options)
    three = [x.astype(np.float32) for x in grads[:3]]
    given = [x.astype(np.float32) for x in (dout, *arrays)]
    dlse = dlse.astype(np.float32)
    result = gradients_verdict((*three, *grads[3:]), *given, dlse=dlse, **options)
    assert result.ok, result.message
    return grads


def in_double(rng: np.random.Generator, *arrays: np.ndarray, **options: Any) -> Gradients:
    """Draw dout and dlse, and check in fp64 arrays of values of fp32."""
    drawn = (*seeds(rng, arrays[0], arrays[2]), *arrays)
    return check_in_double(*(x.astype(np.float32).astype(np.float64) for x in drawn), **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("modifier", MODIFIERS)
def test_modifier(modifier: str, dtype: np.dtype, rng: np.random.Generator) -> None:
    check(rng, *inputs(rng, dtype=dtype), **MODIFIERS[modifier](rng))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("modifier", MODIFIERS)
def test_modifier_in_small_tiles(modifier: str, rng: np.random.Generator) -> None:
    in_double(rng, *inputs(rng), **MODIFIERS[modifier](rng))


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("heads_k", [4, 2, 1])
@pytest.mark.parametrize("len_q", [1, 3, 37, 300])
def test_groups_of_heads(heads_k: int, len_q: int, rng: np.random.Generator) -> None:
    arrays = inputs(rng, len_q, 53, heads_k=heads_k)
    options = {"causal": True, "attn_bias": bias(rng, 4, len_q, 53), "softcap": 2.0}
    in_double(rng, *arrays, **options, dropout_p=0.3, rng_state=(5, 6))


BIASES = [
    (), (53,), (37, 1), (37, 53), (4, 1, 1), (4, 37, 1), (4, 1, 53), (4, 37, 53), (2, 1, 1, 1),
    (2, 1, 37, 1), (2, 1, 1, 53), (2, 1, 37, 53), (2, 4, 1, 1), (2, 4, 1, 53), (2, 4, 37, 1),
    (1, 4, 37, 53), (2, 4, 37, 53),
]  # fmt: skip


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_bias_of_every_shape(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> None:
    values = normal(rng, *shape, dtype=dtype)
    grads = in_double(rng, *inputs(rng), attn_bias=values, causal=True, softcap=3.0)
    assert grads.dbias is not None
    assert (grads.dbias.shape, grads.dbias.dtype) == (shape, dtype)


@settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    problem=problems(),
    layout=st.sampled_from(["packed", *LAYOUTS]),
    small=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_problem(
    problem: tuple[list[Strided], dict[str, Any]],
    layout: str,
    small: bool,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrays, options = problem
    rng = np.random.default_rng(seed)
    wide = [Strided.of(x.host.astype(np.float64), x.layout).host for x in arrays]
    dout, dlse = (x.astype(np.float32) for x in seeds(rng, wide[0], wide[2]))
    dout = Strided.of(dout.astype(np.float64), layout).host
    with monkeypatch.context() as patch:
        if small:
            shrink(patch)
        check_in_double(dout, dlse.astype(np.float64), *wide, **options)


def test_dropout_has_the_bits_of_the_forward_pass(rng: np.random.Generator) -> None:
    """Of v, whose gradient is linear in the weights that are left."""
    q, k, _ = inputs(rng, heads_k=4)
    v = np.broadcast_to(np.eye(53, dtype=np.float32)[:, None], (2, 53, 4, 53))
    options = {"dropout_p": 0.4, "rng_state": (7, 8)}
    dout = np.zeros((2, 37, 4, 53), np.float32)
    dout[:, 5] = 1
    grads = backward(dout, None, q, k, v, **options)
    keep = cupyflash.dropout_mask((7, 8), 0.4, (2, 4, 37, 53))
    np.testing.assert_array_equal(grads.dv[..., 0] != 0, keep[:, :, 5].swapaxes(1, 2))


# Finite differences


DIFFERENTIABLE = (
    "nothing", "causal", "window", "negative scale", "softcap", "alibi", "bias", "bias of queries",
    "mask", "seqused", "prefix", "segments", "sink", "dropout", "everything",
)  # fmt: skip


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("modifier", DIFFERENTIABLE)
def test_gradients_are_the_slopes_of_the_cpu_path(modifier: str, rng: np.random.Generator) -> None:
    """Along random directions, in fp64; central differences err by step^2 f''' and by roundings."""
    arrays, options = inputs(rng, dtype=np.float64), MODIFIERS[modifier](rng)
    for name in ("attn_bias", "learnable_sink"):
        if name in options:
            options[name] = options[name].astype(np.float64)
    dout, dlse = seeds(rng, arrays[0], arrays[2])
    grads = backward(dout, dlse, *arrays, **options)
    names = ("q", "k", "v", "attn_bias", "learnable_sink")
    point = dict(zip(("q", "k", "v"), arrays, strict=True)) | options
    for name, grad in zip(names, grads, strict=True):
        if grad is None:
            continue
        direction = rng.standard_normal(grad.shape)

        def loss(step: float, name: str = name, direction: np.ndarray = direction) -> float:
            out, lse = attend(**point | {name: point[name] + step * direction})
            return float((out * dout).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum())

        slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
        np.testing.assert_allclose((grad * direction).sum(), slope, rtol=1e-6, atol=1e-6)


# What must not matter


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_hidden_keys_do_not_matter(value: float, rng: np.random.Generator) -> None:
    """Neither under a mask, nor beyond a length or outside of the band."""
    q, k, v = inputs(rng)
    dout, dlse = seeds(rng, q, v)
    mask = np.arange(53) % 7 != 3
    for hidden, options in (
        (~mask, {"attn_mask": mask}),
        (~mask, {"mask": Segments(np.zeros((1, 37), int), 1 - mask.astype(int)[None])}),
        (np.arange(53) >= 30, {"seqused_k": np.int32([30, 30])}),
        (np.arange(53) >= 37, {"causal": True, "alignment": "top_left"}),
        (np.arange(53) < 10, {"window_size": (6, -1)}),
    ):
        results = attend(q, k, v, **options)
        bad_k, bad_v = k.copy(), v.copy()
        bad_k[:, hidden] = bad_v[:, hidden] = value
        clean = backward(dout, dlse, q, k, v, results=results, **options)
        bad = backward(dout, dlse, q, bad_k, bad_v, results=results, **options)
        assert_same(bad, clean)
        assert not bad.dk[:, hidden].any()
        assert not bad.dv[:, hidden].any()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("sink", [False, True])
def test_rows_that_see_no_key_do_not_matter(
    value: float, sink: bool, rng: np.random.Generator
) -> None:
    """Whatever their q and dout are; only the sink has a gradient of theirs, by the lse."""
    q, k, v = inputs(rng)
    dout, dlse = seeds(rng, q, v)
    blind = np.arange(37) % 5 == 2
    options: dict[str, Any] = {"attn_mask": ~blind[:, None]}
    if sink:
        options["learnable_sink"] = normal(rng, 4)
    clean = backward(dout, dlse, q, k, v, **options)
    q[:, blind] = dout[:, blind] = value
    bad = backward(dout, dlse, q, k, v, **options)
    assert_same(bad, clean)
    assert not bad.dq[:, blind].any()


@pytest.mark.usefixtures("tiles")
def test_rows_beyond_the_lengths_do_not_matter(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    dout, dlse = seeds(rng, q, v)
    used = {"seqused_q": np.int32([5, 37]), "seqused_k": np.int32([2, 0])}
    options = used | {"causal": True, "learnable_sink": normal(rng, 4)}
    clean = backward(dout, dlse, q, k, v, **options)
    q[0, 5:] = dout[0, 5:] = dlse[0, :, 5:] = k[0, 2:] = v[0, 2:] = k[1] = v[1] = np.nan
    bad = backward(dout, dlse, q, k, v, **options)
    assert_same(bad, clean)
    assert not bad.dq[0, :3].any(), "rows 0 to 2 stand before the first key"
    assert bad.dq[0, 4].all()
    assert not bad.dq[0, 5:].any()
    assert not bad.dq[1].any()
    assert not bad.dk[0, 2:].any()
    assert not bad.dv[1].any()
    assert bad.dsink is not None
    rows = dlse[1].sum(axis=1, dtype=float) + dlse[0, :, :3].sum(axis=1, dtype=float)
    seen = backward(dout[:1, 3:5], dlse[:1, :, 3:5], q[:1, 3:5], k[:1, :2], v[:1, :2],
                    causal=True, learnable_sink=options["learnable_sink"]).dsink  # fmt: skip
    np.testing.assert_allclose(bad.dsink, rows + seen, rtol=1e-6)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "dlse"])
@pytest.mark.parametrize("modifier", ["nothing", "causal", "segments", "softcap", "dropout"])
def test_nan_reaches_what_it_meets(name: str, modifier: str, rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    dout, dlse = seeds(rng, q, v)
    given = {"q": q, "k": k, "v": v, "dout": dout, "dlse": dlse.swapaxes(1, 2)}
    given[name][1, 20] = np.nan
    options = MODIFIERS[modifier](rng)
    results = (x.astype(np.float32) for x in cupyflash.reference.attention(q, k, v, **options))
    grads = backward(dout, dlse, q, k, v, results=tuple(results), **options)
    expected = cupyflash.reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    for of, x, y in zip(grads._fields, grads, expected, strict=True):
        if x is not None:
            np.testing.assert_array_equal(np.isnan(x), np.isnan(y), err_msg=of)


@pytest.mark.usefixtures("tiles")
def test_a_huge_hidden_row_does_not_overflow(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    dout, dlse = seeds(rng, q, v)
    mask = np.arange(53) % 7 != 3
    clean = backward(dout, dlse, q, k, v, attn_mask=mask, softcap=1.0)
    k[:, ~mask], v[:, ~mask] = 3e38, -3e38
    huge = backward(dout, dlse, q, k, v, attn_mask=mask, softcap=1.0)
    assert_same(huge, clean)


# Memory that goes in and out


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_any_strides(layout: str, rng: np.random.Generator) -> None:
    arrays = inputs(rng)
    dout, dlse = seeds(rng, arrays[0], arrays[2])
    *arrays, dout = (Strided.of(x, layout).host for x in (*arrays, dout))
    dlse = np.broadcast_to(dlse[..., :1], dlse.shape)
    options = {"causal": True, "learnable_sink": normal(rng, 4)}
    strided = backward(dout, dlse, *arrays, **options)
    dense = backward(*(np.ascontiguousarray(x) for x in (dout, dlse, *arrays)), **options)
    assert_same(strided, dense)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=str)
@pytest.mark.parametrize("layout", ["heads_first", "reversed_rows", "every_other_column"])
def test_gradients_of_any_strides(layout: str, dtype: Any, rng: np.random.Generator) -> None:
    q, k, v = inputs(rng, dtype=dtype)
    dout, dlse = seeds(rng, q, v)
    addend, sink = normal(rng, 2, 4, 37, 53, dtype=dtype), normal(rng, 4)
    options = {"attn_bias": addend, "learnable_sink": sink}
    expected = backward(dout, dlse, q, k, v, **options)
    out, lse = attend(q, k, v, **options)
    results = [Strided.output(x.shape, dtype, layout) for x in (q, k, v, addend)]
    held = [x.storage[~x.inside] for x in results]
    dsink = np.full(8, np.nan, np.float32)[::2]
    call = direct(q, k, **options)
    grads = [x.host for x in results]
    _cpu_backward.attention_backward(q, k, v, out, lse, dout, dlse, *grads, dsink, **call)
    for x, before, y in zip(results, held, expected, strict=False):
        assert (x.storage[~x.inside] == before).all(), "written outside of the gradient"
        assert same_bits(np.ascontiguousarray(x.host), y)
    assert same_bits(dsink.copy(), expected.dsink)


def test_gradients_of_a_bias_and_a_sink_are_optional(rng: np.random.Generator) -> None:
    arrays = inputs(rng)
    options = {"attn_bias": normal(rng, 4, 37, 53), "learnable_sink": normal(rng, 4)}
    dout, dlse = seeds(rng, arrays[0], arrays[2])
    out, lse = attend(*arrays, **options)
    grads = [np.full_like(x, np.nan) for x in arrays]
    call = direct(*arrays[:2], **options)
    _cpu_backward.attention_backward(*arrays, out, lse, dout, dlse, *grads, None, None, **call)
    for x, y in zip(grads, backward(dout, dlse, *arrays, **options), strict=False):
        assert same_bits(x, y)


@pytest.mark.parametrize("axis", ["batch", "len_q", "len_k", "heads", "dim", "dim_v"])
def test_empty_dimension(axis: str, rng: np.random.Generator) -> None:
    sizes = {"batch": 2, "len_q": 3, "len_k": 4, "heads": 4, "dim": 5, "dim_v": 6, axis: 0}
    arrays = inputs(rng, **sizes, heads_k=0 if axis == "heads" else 2)
    for options in ({}, {"causal": True}, {"learnable_sink": normal(rng, sizes["heads"])}):
        in_double(rng, *arrays, **options)
    shape = [sizes[name] for name in ("batch", "heads", "len_q", "len_k")]
    for keys in (shape[3], 1):
        in_double(rng, *arrays, attn_bias=normal(rng, *shape[1:3], keys))


@pytest.mark.parametrize(("batch", "heads"), [(20000, 1), (1, 20000)])
def test_many_batch_entries_or_heads(batch: int, heads: int, rng: np.random.Generator) -> None:
    """Of one key each, whose weight is 1."""
    q, k, v = (normal(rng, batch, 1, heads, 4, dtype=np.float16) for _ in "qkv")
    dout = normal(rng, batch, 1, heads, 4, dtype=np.float16)
    assert same_bits(backward(dout, None, q, k, v).dv, dout)
    used = np.arange(batch, dtype=np.int32) % 2
    dv = backward(dout, None, q, k, v, seqused_k=used).dv
    np.testing.assert_array_equal(dv, dout * used[:, None, None, None])


@pytest.mark.parametrize("option", ["nothing", "causal", "window", "everything"])
def test_tiles_of_the_real_size(option: str, rng: np.random.Generator) -> None:
    options = {
        "nothing": {},
        "causal": {"causal": True},
        "window": {"window_size": (700, 300)},
        "everything": {
            "causal": True,
            "softcap": 3.0,
            "attn_bias": normal(rng, 2, 1, 1300),
            "attn_mask": rng.random((600, 1300)) < 0.9,
            "learnable_sink": np.float32([1, 2]),
            "dropout_p": 0.1,
            "rng_state": (1, 2),
        },
    }[option]
    check(rng, *inputs(rng, 600, 1300, batch=1, heads=2, heads_k=1, dim=64, dim_v=64), **options)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("option", ["prefix", "segments", "both"])
def test_tiles_that_masks_hide_are_skipped(
    option: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tile_gradients, "BLOCK_K", 16)
    ids = np.repeat(np.arange(4), 16)
    mask, tiles = {
        "prefix": (PrefixLM(np.array([32, 0])), (2 + 2 + 3 + 4) + (1 + 2 + 3 + 4)),
        "segments": (Segments(ids), 2 * 4),
        "both": (Segments(ids, ids[::-1]) & PrefixLM(0), 2 * 2),
    }[option]
    given: list[Any] = []
    recompute = _tile_gradients._recompute

    def count(call: Any, tile: Any, *rest: Any) -> Any:
        given.append(tile.heads[0].stop - tile.heads[0].start)
        return recompute(call, tile, *rest)

    monkeypatch.setattr(_tile_gradients, "_recompute", count)
    monkeypatch.setattr(_cpu_backward, "SHORT", 64)
    in_double(rng, *inputs(rng, 64, 64, heads=1, heads_k=1), mask=mask)
    assert sum(given) == tiles


# Packed sequences


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("lengths", [(40, 3, 0, 21), (16, 16, 16, 5), (30, 30, 30, 30)], ids=str)
def test_packed_sequences(lengths: tuple[int, ...], rng: np.random.Generator) -> None:
    """They have the gradients of each alone, but that of a bias, which they share."""
    ends = np.cumsum([0, *lengths])
    q, k, v = (x[0] for x in inputs(rng, ends[-1] + 2, ends[-1] + 2, batch=1))
    dout, dlse = normal(rng, *q.shape[:2], 12), normal(rng, 4, len(q))
    for x in (q, k, v, dout):
        x[ends[-1] :] = np.nan
    wide = [x.astype(np.float64) for x in (dout, dlse, q, k, v)]
    longest = max(lengths)
    cu_seqlens = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    for extra in (
        {"attn_bias": bias(rng, 4, longest, longest), "learnable_sink": normal(rng, 4)},
        {"attn_bias": bias(rng, 1, 1, longest, longest), "dropout_p": 0.2, "rng_state": (1, 2)},
        {"attn_bias": normal(rng, 4, 1, longest), "seqused_k": np.array([7, 3, 0, 4])},
        {"attn_bias": normal(rng, 4, 4, longest, 1), "seqused_q": np.array([9, 0, 0, 4])},
        {"attn_bias": normal(rng, 4, 1, 1), "alibi_slopes": np.abs(normal(rng, 4, 4))},
    ):
        grads = check_in_double(*wide, causal=True, **cu_seqlens, **extra)
        for gradient in grads[:3]:
            assert not gradient[ends[-1] :].any()


def test_equal_sequences_are_one_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many short sequences cost what their tokens cost."""
    given: list[int] = []
    add_block = _cpu_backward.add_block

    def count(queries: Any, *rest: Any) -> None:
        entries = queries.heads[0]
        given.append(entries.stop - entries.start)
        add_block(queries, *rest)

    monkeypatch.setattr(_cpu_backward, "add_block", count)
    monkeypatch.setattr(_threads, "PRODUCTS_PER_THREAD", 2**40)
    x = np.ones((4 * 64 + 9, 2, 16), np.float32)
    ends = np.array([0, 64, 128, 192, 256, 265])
    backward(x, None, x, x, x, cu_seqlens_q=ends, cu_seqlens_k=ends)
    assert given == [4, 1]


def test_values_of_cu_seqlens_lead_nowhere_else(rng: np.random.Generator) -> None:
    """Those of device arrays are not checked, and clipped."""
    q, k, v = inputs(rng, 20, 20, batch=1)
    dout, _ = seeds(rng, q, v)
    for ends in ([-5, 9, 2**31 - 1], [3, 0, 50], [0, 2**31 - 1, -(2**31)], [25, 30, 40]):
        cu_seqlens = {name: np.int32(ends) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        out, lse = np.empty_like(dout), np.empty((1, 4, 20), np.float32)
        options = {"band": Band(), "scale": 0.2, "attn_bias": normal(rng, 1, 4, 6, 6)}
        _cpu.attention(q, k, v, out, lse, **options, **cu_seqlens)
        results = [Strided.output(x.shape, np.float32, "packed") for x in (q, k, v)]
        held = [x.storage[~x.inside] for x in results]
        dbias = np.full((1, 4, 6, 6), np.nan, np.float32)
        grads = [*(x.host for x in results), dbias, None]
        _cpu_backward.attention_backward(
            q, k, v, out, lse, dout, None, *grads, **options, **cu_seqlens
        )
        for x, before in zip(results, held, strict=True):
            assert (x.storage[~x.inside] == before).all()
            assert np.isfinite(x.host).all()
        assert np.isfinite(dbias).all()


# The order of sums, threads, memory


@pytest.mark.usefixtures("threads", "small_tiles")
@pytest.mark.parametrize("dtype", [np.float32, bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [None, (53,), (37, 1), (37, 53), (4, 37, 53), (2, 1, 37, 53), (2, 4, 37, 53)], ids=str
)
def test_the_bits_do_not_depend_on_threads(
    shape: Any, dtype: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = inputs(rng, dtype=dtype)
    dout, dlse = seeds(rng, arrays[0], arrays[2])
    options: dict[str, Any] = {"learnable_sink": normal(rng, 4), "window_size": (30, 20)}
    if shape is not None:
        options["attn_bias"] = normal(rng, *shape, dtype=dtype)
    several = [backward(dout, dlse, *arrays, **options) for _ in range(3)]
    monkeypatch.setattr(_threads, "MAX_THREADS", 1)
    alone = backward(dout, dlse, *arrays, **options)
    for grads in several:
        for name, x, y in zip(alone._fields, grads, alone, strict=True):
            assert (x is y is None) or same_bits(x, y), name


@pytest.mark.usefixtures("threads", "small_tiles")
@pytest.mark.parametrize("modifier", ["nothing", "everything", "prefix and window", "segments"])
def test_modifier_in_threads(modifier: str, rng: np.random.Generator) -> None:
    in_double(rng, *inputs(rng), **MODIFIERS[modifier](rng))


@pytest.mark.usefixtures("threads", "small_tiles")
def test_concurrent_calls(rng: np.random.Generator) -> None:
    calls = []
    for n in range(4):
        arrays = inputs(rng, 60 + n, 50 + 3 * n)
        calls.append((*seeds(rng, arrays[0], arrays[2]), *arrays))
    expected = [backward(*call, causal=True) for call in calls]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda n: backward(*calls[n % 4], causal=True), range(24)))
    for n, grads in enumerate(results):
        for x, y in zip(grads[:3], expected[n % 4], strict=False):
            assert same_bits(x, y)


@pytest.mark.usefixtures("threads", "small_tiles")
@pytest.mark.parametrize("failing", [0, 1, 7])
def test_an_error_lets_those_go_that_wait_for_their_turn(
    failing: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = inputs(rng, 200, 300, batch=1, heads=1, heads_k=1)
    dout, dlse = seeds(rng, arrays[0], arrays[2])
    end, ended = _threads.Turns.end, iter(range(2**30))

    def fail(turns: Any, numbers: Any, at: int) -> None:
        if next(ended) >= failing:
            raise ZeroDivisionError
        end(turns, numbers, at)

    with monkeypatch.context() as patch:
        patch.setattr(_threads.Turns, "end", fail)
        with pytest.raises(ZeroDivisionError):
            backward(dout, dlse, *arrays)
    check_in_double(*(x.astype(np.float64) for x in (dout, dlse, *arrays)))


def test_memory_is_linear_in_the_length() -> None:
    length = 16384
    rng = np.random.default_rng(0)
    q, k, v, dout = (normal(rng, 1, length, 1, 64, dtype=np.float16) for _ in range(4))
    keys = np.broadcast_to(rng.random(length) < 0.9, (1, 1, length, length))
    addend = normal(rng, length)
    options = {"attn_mask": keys, "attn_bias": np.broadcast_to(addend, (1, 1, length, length))}
    options |= {"band": Band(256, 0), "scale": 0.125}
    out, lse = np.empty_like(q), np.empty((1, 1, length), np.float32)
    _cpu.attention(q, k, v, out, lse, **options)
    grads = [np.empty_like(x) for x in (q, k, v)]
    dbias = np.empty((1, 1, 1, length), np.float32)
    tracemalloc.start()
    try:
        _cpu_backward.attention_backward(
            q, k, v, out, lse, dout, None, *grads, dbias, None, **options
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # dQ in fp32, twice the bytes of q, and tiles of 0.5 MiB.
    assert peak < 6 * q.nbytes, f"{peak / 2**20:.1f} MiB beside {q.nbytes / 2**20:.1f} of q"
    rows, seen = slice(length - 100, length), slice(length - 400, length)
    part = [q[:, rows], k[:, seen], v[:, seen]]
    own = {"window_size": (256, 0), "attn_mask": keys[0, 0, :1, seen]}
    own["attn_bias"] = np.broadcast_to(addend[seen], (1, 400))
    found = (grads[0][:, rows], None, None, None, None)
    result = gradients_verdict(found, dout[:, rows], *part, **own)
    assert result.ok, result.message


def test_small_problems_start_no_thread(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_threads, "ThreadPoolExecutor", None)
    arrays = inputs(rng, 100, 100)
    backward(*seeds(rng, arrays[0], arrays[2]), *arrays)


def test_no_warning_and_no_floating_point_error(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng)
    dout, dlse = seeds(rng, q, v)
    q[0, 0], k[0, 0], v[0, 0], v[1, 1], dout[0, 3] = 1e30, 1e30, np.inf, np.nan, -np.inf
    with np.errstate(all="raise"):
        size = np.getbufsize()
        backward(dout, dlse, q, k, v, causal=True, softcap=1e-3, attn_mask=np.zeros((37, 53), bool))
        backward(dout, dlse, q, k, v, learnable_sink=np.float32([np.inf] * 4))
        huge = {"attn_bias": np.zeros(53, np.float16), "learnable_sink": np.zeros(4, np.float16)}
        grads = backward(np.zeros_like(dout), np.full_like(dlse, 1e6), *inputs(rng), **huge)
        assert np.isposinf(grads.dsink).all()
        assert np.isinf(grads.dbias).any()
        assert np.geterr()["over"] == "raise"
        assert np.getbufsize() == size


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("sink", [math.inf, -math.inf, 1e30, -1e30], ids=str)
def test_a_sink_of_any_value_has_the_gradient_of_rows_without_keys(
    sink: float, rng: np.random.Generator
) -> None:
    arrays = inputs(rng)
    dout, dlse = seeds(rng, arrays[0], arrays[2])
    options = {"seqused_k": np.int32([0, 0]), "learnable_sink": np.full(4, sink, np.float32)}
    grads = backward(dout, dlse, *arrays, **options)
    for gradient in grads[:3]:
        assert not gradient.any()
    expected = dlse.sum(axis=(0, 2), dtype=float) if sink != -math.inf else np.zeros(4)
    np.testing.assert_allclose(grads.dsink, expected, rtol=1e-6)


# By the public functions


def test_the_cpu_path_is_chosen_and_the_oracle_only_by_name(rng: np.random.Generator) -> None:
    arrays = inputs(rng)
    dout, dlse = seeds(rng, arrays[0], arrays[2])
    (out, lse), pullback = cupyflash.attention_vjp(*arrays, causal=True, return_lse=True)
    expected = backward(dout, dlse, *arrays, causal=True)
    call = {"dlse": dlse, "causal": True}
    named = cupyflash.attention_backward(dout, *arrays, out, lse, kernel="cpu", **call)
    for grads in (pullback(dout, dlse), named):
        for x, y in zip(grads[:3], expected[:3], strict=True):
            assert same_bits(x, y)
    by_oracle = cupyflash.attention_backward(dout, *arrays, out, lse, kernel="reference", **call)
    assert not same_bits(by_oracle.dq, expected.dq)
