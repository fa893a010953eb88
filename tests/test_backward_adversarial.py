"""Gradients where kernels have been seen to fail: edges, exact answers, memory of others."""

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from gradients import HOST, ON_EMULATOR, ON_GPU, check, judge, run, seeds_of
from harness import same_bits
from test_reference_backward import DIFFERENCE, slope

import cupyflash
from cupyflash import _kernels
from cupyflash._array import Array, contiguous_strides
from cupyflash._problem_backward import describe_backward
from cupyflash.masks import Segments

FAST = ["cpu", *ON_GPU]
BOUNDS = ("cu_seqlens_q", "cu_seqlens_k")
kernels = pytest.mark.parametrize("kernel", FAST)
and_emulated = pytest.mark.parametrize("kernel", [*FAST, *ON_EMULATOR])


def normal(seed: int, *shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def draw(
    len_q: int, len_k: int, heads_q: int = 1, heads_k: int = 1, dim: int = 64
) -> tuple[np.ndarray, ...]:
    """Draw q, k, v and dout of one batch entry."""
    q, dout = (normal(n, 1, len_q, heads_q, dim) for n in (0, 3))
    k, v = (normal(n, 1, len_k, heads_k, dim) for n in (1, 2))
    return q, k, v, dout


def cancelled(dout: np.ndarray, v: np.ndarray, scaled: np.ndarray) -> float:
    """Return a bound of a sum of P (dP - D) k where all dP of a row are D.

    D is one more sum of the products of dP, in another order: each is off by half an ulp a product.
    """
    products = np.abs(dout.astype(float)).max() * np.abs(v.astype(float)).sum(axis=-1).max()
    rows = dout.shape[1] if dout.ndim == 4 else dout.shape[0]
    left = 2 * v.shape[-1] * 2.0**-24 * products
    return left * np.abs(scaled.astype(float)).max() * rows


# Exact answers


@and_emulated
def test_many_queries_of_which_the_last_sees_a_key(kernel: str) -> None:
    q, k, v = normal(0, 256, 1, 32), normal(1, 3, 1, 32), normal(2, 3, 1, 32)
    bounds = {"cu_seqlens_q": np.array([0, 76, 110, 256]), "cu_seqlens_k": np.array([0, 1, 2, 3])}
    dout = np.ones((256, 1, 32), np.float16)
    grads = run(kernel, q, k, v, dout, None, causal=True, softmax_scale=1.0, **bounds)
    assert (grads.dv == 1).all()
    rows = [75, 109, 255]
    assert not np.delete(grads.dq, rows, axis=0).any()
    assert np.abs(grads.dq.astype(float)).max() <= cancelled(dout[:1], v, k)
    assert np.abs(grads.dk.astype(float)).max() <= cancelled(dout[:1], v, q)


@kernels
@pytest.mark.parametrize("more", [0, 1, 8])
@pytest.mark.parametrize("length", [8, 16, 32, 64])
def test_ones_everywhere(length: int, more: int, kernel: str) -> None:
    q, k = np.ones((1, length + more, 1, 16), np.float16), np.ones((1, length, 1, 16), np.float16)
    grads = run(kernel, q, k, k, q, None, causal=True)
    seen = np.arange(length + more) + 1 - more
    shares = np.where(seen > np.arange(length)[:, None], 1 / np.maximum(seen, 1), 0).sum(axis=1)
    dv = grads.dv[0, :, 0].astype(float).T
    # Half an ulp of fp16 each is lost in P and in the sum; what fp32 loses is less than a 100th.
    assert np.all(np.abs(dv - shares) <= 1.01 * 2.0**-10 * shares)
    assert np.abs(grads.dq.astype(float)).max() <= cancelled(q[:, :1], k, k)
    assert np.abs(grads.dk.astype(float)).max() <= cancelled(q, k, q)


IDS = np.zeros((1, 140), np.int32), np.repeat([[0, 7]], [128, 132], axis=1).astype(np.int32)


@and_emulated
@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (5, 5), "alignment": "top_left"},
        {"mask": Segments(*IDS)},
        {"seqused_k": np.array([100], np.int32)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_keys_that_nobody_sees_have_gradients_of_zero(options: dict[str, Any], kernel: str) -> None:
    """So have queries that see none: no memory is left as it was."""
    q, k, v, dout = draw(140, 260)
    dlse = normal(4, 1, 1, 140, dtype=np.float32)
    grads = run(kernel, q, k, v, dout, dlse, **options)
    judge(grads, q, k, v, dout, dlse, **options)
    assert not grads.dk[:, 146:].any()
    assert not grads.dv[:, 146:].any()
    assert grads.dk[:, :100].any()
    options = {"causal": True}
    grads = run(kernel, q, k[:, :20], v[:, :20], dout, dlse, **options)
    judge(grads, q, k[:, :20], v[:, :20], dout, dlse, **options)
    assert not grads.dq[:, :120].any()


@kernels
@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_all(p: float, kernel: str) -> None:
    q, k, v, dout = draw(70, 90, 2, 1)
    bias = normal(5, 2, 70, 90, dtype=np.float32)
    plain = run(kernel, q, k, v, dout, None, attn_bias=bias)
    grads = run(kernel, q, k, v, dout, None, attn_bias=bias, dropout_p=p, rng_state=(7, 0))
    for name, gradient, expected in zip(grads._fields, grads, plain, strict=True):
        if gradient is None:
            continue
        if p:
            assert not gradient.any(), name
        elif name != "dq" or kernel in HOST:  # the sums into dq have no order on a GPU
            assert same_bits(gradient, expected), name


# Memory that no gradient depends on


@and_emulated
@pytest.mark.parametrize("packed", [False, True])
def test_what_lies_beyond_the_lengths_reaches_nothing(packed: bool, kernel: str) -> None:
    q, k, v, dout = draw(150, 140, 2, 1)
    dlse = normal(4, 1, 2, 150, dtype=np.float32)
    options: dict[str, Any] = {
        "seqused_q": np.array([70], np.int32), "seqused_k": np.array([65], np.int32),
        "causal": True,
    }  # fmt: skip
    if packed:
        bounds = np.array([0, 140], np.int32)
        options |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        q, k, v, dout, dlse = (x[0] for x in (q, k, v, dout, dlse))
    clean = run(kernel, q, k, v, dout, dlse, **options)
    rows = slice(None) if packed else 0
    for x, used in ((q, 70), (dout, 70), (k, 65), (v, 65)):
        x[rows][used:] = np.nan
    dlse[..., 70:] = np.nan
    dirty = run(kernel, q, k, v, dout, dlse, **options)
    for name, x, y in zip(clean._fields, dirty, clean, strict=True):
        if x is not None:
            used = 70 if name == "dq" else 65
            assert np.isfinite(x).all(), name
            assert not x[rows][used:].any(), name
            if name != "dq" or kernel == "cpu":  # whose sums have no order on a GPU
                assert same_bits(x, y), name


@kernels
def test_a_sequence_without_rows_changes_no_other(kernel: str) -> None:
    q, k, v, dout = (x[0] for x in draw(200, 220, 2, 1))
    ends = [0, 130, 130, 200], [0, 90, 90, 220]
    with_it = dict(zip(BOUNDS, map(np.array, ends), strict=True))
    without = {name: np.delete(x, 1) for name, x in with_it.items()}
    found = [run(kernel, q, k, v, dout, None, causal=True, **x) for x in (with_it, without)]
    assert all(map(same_bits, *(grads[1:3] for grads in found)))
    judge(found[0], q, k, v, dout, None, causal=True, **with_it)


@kernels
def test_nan_stays_in_its_row_of_queries(kernel: str) -> None:
    q, k, v, dout = draw(70, 90, 2, 2)
    q[0, 2, 1] = np.nan
    grads = run(kernel, q, k, v, dout, None)
    assert np.isnan(grads.dq[0, 2, 1]).all()
    clean = np.delete(grads.dq[0, :, 1], 2, axis=0)
    assert np.isfinite(clean).all()
    assert all(np.isfinite(x[:, :, 0]).all() for x in (grads.dq, grads.dk, grads.dv))
    assert np.isnan(grads.dk[:, :, 1]).all()
    assert np.isnan(grads.dv[:, :, 1]).all()


# Head dims, strides, heads


@kernels
@pytest.mark.parametrize(
    "dim", [1, 2, 3, 5, 7, 9, 33, 40, 56, 72, 80, 88, 96, 100, 104, 112, 160, 192, 224, 256]
)
def test_every_column_of_every_head_dim(dim: int, kernel: str) -> None:
    q, k, v, _ = draw(130, 130, 2, 1, dim)
    q[..., :-1] *= 0.1  # the last column decides most
    grads = check(kernel, q, k, v, causal=True)
    for gradient in grads[:3]:
        assert gradient[..., -1].any()


@kernels
def test_an_expanded_key_gets_a_gradient_for_each_head(kernel: str) -> None:
    q, k, v, dout = draw(40, 50, 4, 1)
    wide = [np.broadcast_to(x, (1, 50, 4, 64)) for x in (k, v)]
    each = run(kernel, q, *wide, dout, None, causal=True)
    judge(each, q, *wide, dout, None, causal=True)
    one = run(kernel, q, k, v, dout, None, causal=True)
    judge(one, q, k, v, dout, None, causal=True)
    assert each.dk.shape == wide[0].shape
    assert not same_bits(each.dk[:, :, 0], each.dk[:, :, 1])


@kernels
def test_packed_gradients_are_those_of_each_sequence(kernel: str) -> None:
    """The log-sum-exp is (heads, total), which has been taken for (total, heads)."""
    q, k, v, dout = (x[0] for x in draw(8, 8, 2, 2))
    bounds = {name: np.array([0, 5, 8]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    grads = run(kernel, q, k, v, dout, None, **bounds)
    judge(grads, q, k, v, dout, None, **bounds)
    assert all(x.any() for x in grads[:3])


@kernels
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_repeat(deterministic: bool, kernel: str) -> None:
    """Those of keys and values always, to the last bit; of queries where that is asked for."""
    ends = dict.fromkeys(BOUNDS, np.array([0, 1, 1, 301, 365]))
    for heads_k, options in itertools.product(
        (4, 1),
        ({"window_size": (32, 0)}, {"causal": True}, ends),
    ):
        q, k, v, dout = draw(365, 365, 4, heads_k)
        if "cu_seqlens_q" in options:
            q, k, v, dout = (x[0] for x in (q, k, v, dout))
        first, *others = (
            run(kernel, q, k, v, dout, None, deterministic=deterministic, **options)
            for _ in range(4)
        )
        for other in others:
            assert all(map(same_bits, other[1:3], first[1:3]))
            if deterministic or kernel in HOST:
                assert same_bits(other.dq, first.dq)
        judge(first, q, k, v, dout, None, **options)


@kernels
def test_each_option_reaches_the_gradients(kernel: str) -> None:
    q, k, v, dout = draw(64, 64, 2, 2)
    plain = run(kernel, q, k, v, dout, None)
    for options in (
        {"causal": True},
        {"softmax_scale": 0.5},
        {"window_size": (9, 4)},
        {"softcap": 0.5},
        {"alibi_slopes": np.array([0.5, 0.2], np.float32)},
        {"attn_mask": np.tri(64, dtype=bool)},
        {"dropout_p": 0.5, "rng_state": (1, 2)},
    ):
        grads = run(kernel, q, k, v, dout, None, **options)
        judge(grads, q, k, v, dout, None, **options)
        assert not any(map(same_bits, grads[:3], plain[:3])), options


@kernels
@pytest.mark.parametrize(
    "shape", [(5,), (4, 5), (1, 1, 5), (1, 1, 1, 5), (2, 1, 1, 5), (2, 3, 4, 5), (3, 4, 1)], ids=str
)
def test_the_gradient_of_a_bias_of_any_rank(shape: tuple[int, ...], kernel: str) -> None:
    q, k, v = normal(0, 2, 4, 3, 16), normal(1, 2, 5, 3, 16), normal(2, 2, 5, 3, 16)
    grads = check(kernel, q, k, v, attn_bias=normal(3, *shape, dtype=np.float32), causal=True)
    assert grads.dbias.shape == shape


@kernels
def test_a_bias_between_zero_and_almost_the_lowest(kernel: str) -> None:
    q, k, v = normal(0, 4, 64, 4, 32), normal(1, 4, 64, 4, 32), normal(2, 4, 64, 4, 32)
    bias = np.where(normal(3, 1, 4, 64, 64) < 0.5, 0, -1e9).astype(np.float32)
    grads = check(kernel, q, k, v, attn_bias=bias)
    assert all(np.isfinite(x).all() for x in grads[:4])


# Finite differences


@pytest.mark.parametrize("p", [0.0, 0.25])
def test_finite_differences_of_the_cpu_path(p: float) -> None:
    """Of a loss by output and log-sum-exp, in fp64."""
    q, k, v = (normal(n, 1, 5, heads, 4, dtype=np.float64) for n, heads in ((0, 2), (1, 1), (2, 1)))
    own = {"attn_bias": normal(5, 2, 5, 5, dtype=np.float64),
           "learnable_sink": normal(6, 2, dtype=np.float64)}  # fmt: skip
    options = own | {"causal": True, "softcap": 2.0, "dropout_p": p, "rng_state": (7, 0)}
    dout, dlse = seeds_of(q, v)

    def loss() -> float:
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        return (out * dout).sum() + (lse * dlse).sum()

    grads = run("cpu", q, k, v, dout, dlse, **options)
    for name, gradient, x in zip(grads._fields, grads, (q, k, v, *own.values()), strict=True):
        np.testing.assert_allclose(gradient, slope(loss, x), err_msg=name, **DIFFERENCE)


# Memory


def test_no_scratch_grows_with_pairs() -> None:
    """Of 32768 queries and keys, all pairs in 16 bits are 2 GB."""
    records = {
        name: Array(0, shape, contiguous_strides(shape), dtype, 0, "no", False, None)
        for name, shape, dtype in (
            *((name, (1, 32768, 1, 64), "float16") for name in ("dout", "q", "k", "v", "out")),
            ("lse", (1, 1, 32768), "float32"),
        )
    }
    for deterministic in (False, True):
        call = describe_backward(records, arch=90, deterministic=deterministic)
        rows = [row for row in _kernels.KERNELS if row.op == "backward" and row.steps is not None]
        for row in rows:
            if row.refusal(call[0]) is None:
                assert row.steps is not None
                assert row.steps(*call).scratch < 100e6, row.name


def test_the_cpu_path_stores_no_scores() -> None:
    q, k, v, dout = draw(4096, 4096)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    tracemalloc.start()
    try:
        cupyflash.attention_backward(dout, q, k, v, out, lse)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4096 * 4096 * 2  # the scores in 16 bits
