"""The oracle's gradients against finite differences, closed forms and PyTorch's math path."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyflash import reference

INF, NAN = math.inf, math.nan
ROUNDING = {"rtol": 1e-11, "atol": 1e-11}  # of fp64
# Central differences err by step^2 f''' / 6 and by roundings over the step: both near 1e-9 here.
STEP, DIFFERENCE = 1e-5, {"rtol": 1e-6, "atol": 1e-7}


def same(actual: Any, expected: Any, **tolerance: float) -> None:
    np.testing.assert_allclose(actual, expected, **(ROUNDING | tolerance))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def slope(function: Callable[[], float], x: np.ndarray) -> np.ndarray:
    """Return the central differences of `function` in every element of `x`."""
    gradient = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        value = x[at]
        x[at] = value + STEP
        above = function()
        x[at] = value - STEP
        gradient[at] = (above - function()) / (2 * STEP)
        x[at] = value
    return gradient


def check_by_differences(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, lse_shape: tuple[int, ...], **options: Any
) -> reference.Gradients:
    dout, dlse = normal(90, *q.shape[:-1], v.shape[-1]), normal(91, *lse_shape)

    def loss() -> float:
        out, lse = reference.attention(q, k, v, **options)
        return (out * dout).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum()

    grads = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    inputs = q, k, v, options.get("attn_bias"), options.get("learnable_sink")
    for name, grad, x in zip(grads._fields, grads, inputs, strict=True):
        if x is None:
            assert grad is None
        else:
            assert grad.shape == x.shape
            np.testing.assert_allclose(grad, slope(loss, x), err_msg=name, **DIFFERENCE)
    return grads


DROPOUT = {"dropout_p": 0.4, "rng_state": (5, 6)}
COMBINATIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"causal": True},
    "top_left": {"causal": True, "alignment": "top_left"},
    "window, negative scale": {"window_size": (1, 2), "softmax_scale": -0.7},
    "softcap": {"softcap": 0.7, "softmax_scale": 1.5},
    "ALiBi": {"alibi_slopes": normal(10, 2, 4) ** 2},
    "mask": {"attn_mask": normal(11, 4, 3, 5) > 0},
    "bias": {"attn_bias": normal(12, 2, 4, 3, 5)},
    "bias over rows": {"attn_bias": normal(13, 4, 3, 1)},
    "bias over keys": {"attn_bias": normal(14, 5), "softcap": 0.7},
    "bias over all": {"attn_bias": normal(15, 1, 1, 1, 1)},
    "bias of a batch entry": {"attn_bias": normal(16, 2, 1, 1, 5), **DROPOUT},
    "sink": {"learnable_sink": normal(17, 4), "causal": True, "alignment": "top_left"},
    "sink of empty rows": {"learnable_sink": normal(17, 4), "attn_mask": np.zeros((3, 1), bool)},
    "dropout": DROPOUT,
    "used lengths": {"seqused_q": [3, 2], "seqused_k": [0, 4], "causal": True},
    "heads second": {"layout": "bhsd", "causal": True, "attn_bias": normal(18, 3, 5)},
    "everything": {
        "causal": True,
        "window_size": (2, 0),
        "softcap": 0.9,
        "alibi_slopes": normal(19, 4) ** 2,
        "attn_bias": normal(20, 4, 1, 5),
        "attn_mask": normal(21, 3, 5) > -1,
        "learnable_sink": normal(22, 4),
        "seqused_k": [4, 5],
        **DROPOUT,
    },
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_gradients_are_the_slopes(name: str) -> None:
    options = COMBINATIONS[name]
    q, k, v = normal(1, 2, 3, 4, 2), normal(2, 2, 5, 2, 2), normal(3, 2, 5, 2, 3)
    if options.get("layout") == "bhsd":
        q, k, v = (x.swapaxes(1, 2).copy() for x in (q, k, v))
    check_by_differences(q, k, v, (2, 4, 3), **options)


def test_gradients_of_packed_sequences_are_the_slopes() -> None:
    q, k, v = normal(1, 9, 2, 2), normal(2, 11, 1, 2), normal(3, 11, 1, 3)
    cu_seqlens = {"cu_seqlens_q": [0, 3, 3, 4, 7], "cu_seqlens_k": [0, 2, 5, 5, 9]}
    options = {"causal": True, "attn_bias": normal(4, 4, 1, 5, 4), "learnable_sink": normal(5, 2)}
    grads = check_by_differences(q, k, v, (2, 9), **options, **cu_seqlens, **DROPOUT)
    assert not grads.dq[7:].any()  # rows in no sequence
    assert not grads.dk[9:].any()
    assert not grads.dk[2:5].any()  # keys of a sequence without queries
    assert not grads.dv[2:5].any()
    assert not grads.dbias[:, :, 4].any()  # past every length
    named = reference.attention_varlen_backward(np.ones((9, 2, 3)), q, k, v, *cu_seqlens.values())
    assert named.dq.shape == q.shape


# Closed forms


def test_single_key() -> None:
    q, k, v, dout = (normal(n, 1, 1, 1, 16) for n in range(4))
    assert (reference.attention(q, k, v)[0] == v).all()
    grads = reference.attention_backward(dout, q, k, v)
    assert not grads.dq.any()
    assert not grads.dk.any()
    assert (grads.dv == dout).all()


def test_many_queries_of_which_the_last_sees_the_only_key() -> None:
    cu_q, cu_k = [0, 76, 110, 256], [0, 1, 2, 3]
    q, k, v = normal(1, 256, 1, 32), normal(2, 3, 1, 32), normal(3, 3, 1, 32)
    out, _ = reference.attention_varlen(q, k, v, cu_q, cu_k, causal=True)
    last = [75, 109, 255]
    assert (out[last] == v).all()
    assert not np.delete(out, last, axis=0).any()
    grads = reference.attention_varlen_backward(np.ones_like(out), q, k, v, cu_q, cu_k, causal=True)
    assert not grads.dq.any()
    assert not grads.dk.any()
    assert (grads.dv == 1).all()


@pytest.mark.parametrize("more", [0, 1, 8])
@pytest.mark.parametrize("len_k", [8, 16, 64])
def test_equal_scores(len_k: int, more: int) -> None:
    q, k = np.ones((1, len_k + more, 1, 4)), np.ones((1, len_k, 1, 4))
    out, _ = reference.attention(q, k, k, causal=True)
    count = np.maximum(np.arange(len_k + more) - more + 1, 0)
    same(out[0, :, 0, 0], np.minimum(count, 1))
    grads = reference.attention_backward(np.ones_like(q), q, k, k, causal=True)
    same(grads.dq, 0)
    same(grads.dk, 0)
    same(grads.dv[0, :, 0, 0], [sum(1 / n for n in count if n > j) for j in range(len_k)])


def test_gradients_of_a_group_are_summed() -> None:
    q, k, v = normal(1, 1, 3, 4, 8), normal(2, 1, 3, 1, 8), normal(3, 1, 3, 1, 8)
    dout = np.broadcast_to(1.0, q.shape)
    grads = reference.attention_backward(dout, q, k, v)
    apart = reference.attention_backward(dout, q, k.repeat(4, axis=2), v.repeat(4, axis=2))
    same(grads.dq, apart.dq)
    same(grads.dk, apart.dk.sum(axis=2, keepdims=True))
    same(grads.dv, apart.dv.sum(axis=2, keepdims=True))
    same(grads.dv.sum(axis=1), 3 * 4)


def test_gradient_through_the_lse_alone() -> None:
    q, k, v = normal(1, 1, 4, 1, 8), normal(2, 1, 4, 1, 8), normal(3, 1, 4, 1, 8)
    grads = reference.attention_backward(np.zeros_like(q), q, k, v, dlse=np.ones((1, 1, 4)))
    p = reference.attention(q, k, np.eye(4)[None, :, None])[0][0, :, 0]
    scale = 8**-0.5
    same(grads.dq[0, :, 0], scale * p @ k[0, :, 0])
    same(grads.dk[0, :, 0], scale * p.T @ q[0, :, 0])
    assert not grads.dv.any()


def test_sink_of_an_empty_row_has_the_gradient_of_the_lse() -> None:
    q, k = normal(1, 1, 2, 1, 4), normal(2, 1, 1, 1, 4)
    dlse = np.array([[[3.0, 0.0]]])
    options = {"causal": True, "learnable_sink": np.array([0.7])}
    grads = reference.attention_backward(np.zeros_like(q), q, k, k, dlse=dlse, **options)
    assert grads.dsink == 3
    assert not grads.dq.any()


def test_finite_minimum_hides_and_its_gradients_are_zero() -> None:
    q, k, v, dout = (normal(n, 1, 20, 1, 8) for n in range(4))
    bias = np.where(np.arange(20) < 6, float(np.finfo(np.float32).min), 0)
    grads = reference.attention_backward(dout, q, k, v, attn_bias=bias)
    alone = reference.attention_backward(dout, q, k[:, 6:], v[:, 6:])
    same(grads.dq, alone.dq)
    for grad, expected in ((grads.dk, alone.dk), (grads.dv, alone.dv)):
        assert not grad[:, :6].any()
        same(grad[:, 6:], expected)


def test_nan_reaches_only_the_gradients_that_it_meets() -> None:
    q, k, v, dout = (normal(n, 1, 6, 1, 4) for n in range(4))
    q[0, 2] = NAN
    grads = reference.attention_backward(dout, q, k, v, causal=True)
    assert (np.isnan(grads.dq[0, :, 0, 0]) == [0, 0, 1, 0, 0, 0]).all()
    for grad in (grads.dk, grads.dv):
        assert (np.isnan(grad[0, :, 0, 0]) == [1, 1, 1, 0, 0, 0]).all()


# PyTorch


@pytest.mark.frameworks
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "bias"])
@pytest.mark.parametrize("heads_k", [4, 2, 1])
def test_like_the_math_path_of_torch(heads_k: int, mask: str) -> None:
    torch = pytest.importorskip("torch")
    arrays = normal(1, 2, 4, 7, 8), normal(2, 2, heads_k, 9, 8), normal(3, 2, heads_k, 9, 5)
    q, k, v = (torch.tensor(array, requires_grad=True) for array in arrays)
    given = {"bool": normal(4, 4, 7, 9) > -1, "bias": normal(5, 4, 1, 9)}.get(mask)
    tensor = None if given is None else torch.tensor(given, requires_grad=mask == "bias")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=tensor, is_causal=mask == "causal", enable_gqa=True
        )
    dout = torch.tensor(normal(6, *expected.shape))
    expected.backward(dout)

    options: dict[str, Any] = {
        "layout": "bhsd",
        "causal": mask == "causal",
        "alignment": "top_left",
    }
    if given is not None:
        options["attn_mask" if mask == "bool" else "attn_bias"] = given
    same(reference.attention(*arrays, **options)[0], expected.detach().numpy())
    grads = reference.attention_backward(dout.numpy(), *arrays, **options)
    same(grads.dq, q.grad.numpy())
    same(grads.dk, k.grad.numpy())
    same(grads.dv, v.grad.numpy())
    if mask == "bias":
        same(grads.dbias, tensor.grad.numpy())


@pytest.mark.frameworks
def test_like_autograd_through_every_smooth_modifier() -> None:
    torch = pytest.importorskip("torch")
    values = [normal(1, 2, 6, 3, 4), normal(2, 2, 8, 3, 4), normal(3, 2, 8, 3, 5)]
    values += [normal(4, 3, 1, 8), normal(5, 3)]
    q, k, v, bias, sink = (torch.tensor(value, requires_grad=True) for value in values)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 0.6
    distance = torch.arange(6)[:, None] + 2 - torch.arange(8)
    slopes = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64)
    scores = 1.1 * torch.tanh(scores / 1.1) - slopes[:, None, None] * distance.abs() + bias
    scores = scores.masked_fill(distance < 0, -INF)
    column = sink[:, None, None].expand(2, 3, 6, 1)
    lse = torch.cat([scores, column], dim=-1).logsumexp(-1)
    out = torch.einsum("bhij,bjhd->bihd", (scores - lse[..., None]).exp(), v)
    dout, dlse = torch.tensor(normal(6, *out.shape)), torch.tensor(normal(7, *lse.shape))
    ((out * dout).sum() + (lse * dlse).sum()).backward()

    options = {"softmax_scale": 0.6, "softcap": 1.1, "alibi_slopes": slopes.numpy(), "causal": True}
    options |= {"attn_bias": values[3], "learnable_sink": values[4]}
    actual, actual_lse = reference.attention(*values[:3], **options)
    same(actual, out.detach().numpy())
    same(actual_lse, lse.detach().numpy())
    grads = reference.attention_backward(dout.numpy(), *values[:3], dlse=dlse.numpy(), **options)
    for grad, x in zip(grads, (q, k, v, bias, sink), strict=True):
        same(grad, x.grad.numpy())
