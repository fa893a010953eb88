"""Gradients of the kernels against the oracle, and what the public functions take and return."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import ALONE, EDGES, MEMORY, MIXED, SHAPES, SMOKE, VARLEN, Case
from gradients import HOST, ON_GPU, check, judge, run, seeds_of
from harness import same_bits

import cupyflash
from cupyflash import InvalidArgument, InvalidType, UnsupportedProblem, reference
from cupyflash.errors import CupyflashError

CASES = (*SMOKE, *SHAPES[::3], *EDGES, *MEMORY[::5], *ALONE, *MIXED[::4], *VARLEN[::3])
LARGE = 3_000_000  # pairs of a query and a key, of which the oracle takes seconds

kernels = pytest.mark.parametrize("kernel", [*HOST, *ON_GPU])


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


Q, K, V = normal(0, 2, 3, 4, 8), normal(1, 2, 5, 2, 8), normal(2, 2, 5, 2, 6)
DOUT = normal(3, 2, 3, 4, 6)
OUT, LSE = cupyflash.attention(Q, K, V, return_lse=True)


def size(case: Case) -> int:
    return case.batch * case.heads_q * case.len_q * case.len_k


@kernels
@pytest.mark.parametrize(
    "case", [case for case in CASES if size(case) < LARGE], ids=lambda case: case.id
)
def test_case(kernel: str, case: Case) -> None:
    check(kernel, *case.arrays(), **case.options)


@kernels
def test_fp64(kernel: str) -> None:
    if kernel not in ("cpu", "reference"):
        pytest.skip("GPUs have no kernel of fp64")
    arrays = [x.astype(np.float64) for x in (Q, K, V)]
    check(kernel, *arrays, causal=True, learnable_sink=normal(4, 4, dtype=np.float64))


@kernels
def test_a_single_key_has_no_gradient_but_of_its_value(kernel: str) -> None:
    q, k, v, dout = (normal(n, 1, 1, 1, 16, dtype=np.float16) for n in range(4))
    grads = run(kernel, q, k, v, dout, None, softmax_scale=1.0)
    # P (dP - D) is 0 but for two sums of the same 16 products in different orders.
    left = 2 * 16 * 2.0**-24 * np.abs(dout.astype(float) * v).sum()
    assert np.all(np.abs(grads.dq) <= left * np.abs(k.astype(float)))
    assert np.all(np.abs(grads.dk) <= left * np.abs(q.astype(float)))
    assert same_bits(grads.dv, dout)


@kernels
def test_without_a_gradient_of_the_lse(kernel: str) -> None:
    dout, _ = seeds_of(Q, V)
    judge(run(kernel, Q, K, V, dout, None, causal=True), Q, K, V, dout, None, causal=True)


# What comes in and out, on the host


def pulled(*arrays: Any, **options: Any) -> cupyflash.Gradients:
    _, pullback = cupyflash.attention_vjp(*arrays, **options)
    return pullback(DOUT)


def test_vjp_returns_the_output_and_its_pullback() -> None:
    options = {"causal": True, "softcap": 2.0, "learnable_sink": normal(4, 4)}
    out, pullback = cupyflash.attention_vjp(Q, K, V, **options)
    expected, lse = cupyflash.attention(Q, K, V, return_lse=True, **options)
    assert same_bits(out, expected)
    direct = cupyflash.attention_backward(DOUT, Q, K, V, expected, lse, **options)
    assert all(map(same_bits, pullback(DOUT)[:3], direct[:3]))
    assert direct.dbias is None
    assert same_bits(pullback(DOUT).dsink, direct.dsink)


def test_vjp_with_the_lse() -> None:
    dlse = normal(5, 2, 4, 3)
    (_, lse), pullback = cupyflash.attention_vjp(Q, K, V, return_lse=True)
    np.testing.assert_array_equal(lse, LSE)
    judge(pullback(DOUT, dlse), Q, K, V, DOUT, dlse)
    with_it, without = pullback(DOUT, dlse=dlse), pullback(DOUT)
    assert not same_bits(with_it.dq, without.dq)
    assert same_bits(with_it.dv, without.dv)


def test_vjp_of_packed_sequences() -> None:
    bounds = {"cu_seqlens_q": [0, 2, 3], "cu_seqlens_k": [0, 1, 5], "max_seqlen_q": 2}
    out, pullback = cupyflash.attention_vjp(Q[0], K[0], V[0], **bounds, causal=True)
    assert same_bits(out, cupyflash.attention_varlen(Q[0], K[0], V[0], **bounds, causal=True))
    del bounds["max_seqlen_q"]
    judge(pullback(DOUT[0]), Q[0], K[0], V[0], DOUT[0], None, causal=True, **bounds)


def test_vjp_takes_the_kernel_of_both_passes() -> None:
    for name in ("reference", "cpu"):
        _, pullback = cupyflash.attention_vjp(Q, K, V, kernel=name)
        judge(pullback(DOUT), Q, K, V, DOUT, None)


@pytest.mark.parametrize("name", ["out", "q_descale", "scale", "dout"])
def test_vjp_refuses_other_options(name: str) -> None:
    with pytest.raises(InvalidType, match=rf"^`{name}` is no option of attention_vjp"):
        cupyflash.attention_vjp(Q, K, V, **{name: OUT})
    with pytest.raises(InvalidType, match=r"^`segment_ids` is no option.*attention_varlen"):
        cupyflash.attention_vjp(Q, K, V, cu_seqlens_q=[0], segment_ids=Q)
    with pytest.raises(InvalidType, match=r"^`cu_seqlens_k` must be an array"):
        cupyflash.attention_vjp(Q[0], K[0], V[0], cu_seqlens_q=[0, 3])


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3)], ids=str)
def test_gradients_lie_in_memory_as_their_inputs(axes: tuple[int, ...]) -> None:
    back = np.argsort(axes)
    arrays = [np.ascontiguousarray(x.transpose(axes)).transpose(back) for x in (Q, K, V)]
    grads = pulled(*arrays)
    for gradient, x in zip(grads, arrays, strict=False):
        assert gradient.strides == x.strides
    spread = np.zeros((2, 3, 4, 16), np.float32)[..., ::2]
    assert pulled(spread, K, V).dq.flags.c_contiguous


def test_gradients_of_heads_first() -> None:
    arrays = [x.swapaxes(1, 2) for x in (Q, K, V)]
    _, pullback = cupyflash.attention_vjp(*arrays, layout="bhsd", causal=True)
    swapped = pullback(DOUT.swapaxes(1, 2))
    for gradient, expected in zip(swapped, pulled(Q, K, V, causal=True), strict=False):
        if expected is not None:
            np.testing.assert_array_equal(gradient.swapaxes(1, 2), expected)


@pytest.mark.parametrize(
    "shape", [(), (5,), (3, 1), (4, 3, 5), (2, 1, 3, 5), (1, 4, 1, 1), (2, 4, 3, 5)], ids=str
)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_the_gradient_of_a_bias_has_its_shape_and_dtype(shape: tuple[int, ...], dtype: Any) -> None:
    check("reference", Q, K, V, attn_bias=normal(6, *shape, dtype=dtype))
    grads = pulled(Q, K, V, attn_bias=normal(6, *shape, dtype=dtype))
    assert (grads.dbias.shape, grads.dbias.dtype) == (shape, dtype)


def test_the_gradient_of_an_expanded_bias_is_not_summed() -> None:
    bias = np.broadcast_to(normal(6, 3, 5), (2, 4, 3, 5))
    grads = pulled(Q, K, V, attn_bias=bias)
    assert grads.dbias.shape == bias.shape
    summed = pulled(Q, K, V, attn_bias=bias[0, 0])
    np.testing.assert_allclose(grads.dbias.sum((0, 1)), summed.dbias, atol=1e-5)


def test_heads_of_an_expanded_key_add_up() -> None:
    wide = np.broadcast_to(K[:, :, :1], K.shape)
    each = pulled(Q, wide, V)
    one = pulled(Q, K[:, :, :1], np.broadcast_to(V[:, :, :1], (2, 5, 1, 6)))
    assert each.dk.shape == K.shape
    assert one.dk.shape == (2, 5, 1, 8)


def test_a_gradient_of_zero_strides() -> None:
    dout = np.broadcast_to(np.float32(0.5), DOUT.shape)
    grads = cupyflash.attention_backward(dout, Q, K, V, OUT, LSE)
    judge(grads, Q, K, V, dout, None)
    scattered = np.repeat(LSE, 2, axis=-1)[..., ::2]
    dlse = np.broadcast_to(np.float32(2), LSE.shape)
    grads = cupyflash.attention_backward(dout, Q, K, V, OUT, scattered, dlse=dlse)
    judge(grads, Q, K, V, dout, dlse)


def test_inputs_may_be_read_only() -> None:
    given = [x.copy() for x in (DOUT, Q, K, V, OUT, LSE)]
    for x in given:
        x.flags.writeable = False
    judge(cupyflash.attention_backward(*given), Q, K, V, DOUT, None)


def test_lists_and_scalars_of_any_type_go_in() -> None:
    options = {"seqused_k": [5, 5], "window_size": None, "softmax_scale": np.float64(0.5)}
    out, lse = cupyflash.attention(Q, K, V, return_lse=True, **options)
    grads = cupyflash.attention_backward(DOUT, Q, K, V, out, lse, **options)
    judge(grads, Q, K, V, DOUT, None, softmax_scale=0.5)


# What is refused


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"dout": None}, InvalidType, "must be an array .*got None"),
        ({"dout": DOUT[:1]}, InvalidArgument, r"has batch 1 and `q` has 2"),
        ({"dout": DOUT[0]}, InvalidArgument, "must have shape .batch, len_q, heads_q, head_dim_v"),
        ({"dout": DOUT[..., :5]}, InvalidArgument, "has head_dim_v 5 and `v` has 6"),
        ({"dout": DOUT.astype(np.float64)}, InvalidType, "has dtype float64: expected float32"),
        ({"out": OUT.astype(np.float16)}, InvalidType, "has dtype float16: expected float32"),
        ({"out": OUT[:, :2]}, InvalidArgument, "has len_q 2 and `q` has 3"),
        ({"lse": None}, InvalidType, "must be an array .*got None"),
        ({"lse": LSE.astype(np.float64)}, InvalidType, "has dtype float64: expected float32"),
        ({"lse": LSE.swapaxes(1, 2)}, InvalidArgument, "has heads_q 3 and `q` has 4"),
        ({"lse": LSE[0]}, InvalidArgument, r"must have shape \(batch, heads_q, len_q\), got"),
        ({"dlse": LSE[..., :1]}, InvalidArgument, "has len_q 1 and `q` has 3"),
        ({"dlse": LSE.astype(np.float16)}, InvalidType, "has dtype float16: expected float32"),
        ({"dlse": 1.0}, InvalidType, "must be an array"),
        ({"deterministic": 1}, InvalidType, "must be a bool, got int"),
        ({"deterministic": None}, InvalidType, "must be a bool, got NoneType"),
        ({"kernel": "attention_fwd_sm80"}, InvalidArgument, "must be None or one of"),
        ({"kernel": ["cpu"]}, InvalidArgument, "must be None or one of"),
        ({"dropout_p": 0.5}, InvalidArgument, "is None and `dropout_p` is not 0: pass"),
        ({"k": K[:, :4]}, InvalidArgument, "has len_k 5 and `k` has 4"),
        ({"max_seqlen_q": -1}, InvalidArgument, "must be a length from 0 on"),
        ({"segment_ids": np.zeros((2, 4), int)}, InvalidArgument, "must broadcast to"),
    ],
    ids=lambda x: str(x)[:40] if isinstance(x, str) else "",
)
def test_wrong_arguments(changes: dict[str, Any], error: type, words: str) -> None:
    given = {"dout": DOUT, "q": Q, "k": K, "v": V, "out": OUT, "lse": LSE} | changes
    (name,) = changes
    name = {"dropout_p": "rng_state", "k": "v"}.get(name, name)
    with pytest.raises(error, match=rf"^`{name}` ?.*{words}") as caught:
        cupyflash.attention_backward(**given)
    assert isinstance(caught.value, CupyflashError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_is_refused(dtype: str) -> None:
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    refusal = f"^`q` has dtype {dtype}, of which no gradients"
    with pytest.raises(UnsupportedProblem, match=refusal):
        cupyflash.attention_backward(out, q, k, v, out, lse)
    with pytest.raises(UnsupportedProblem, match=refusal):  # before the forward pass runs
        cupyflash.attention_vjp(q, k, v)


def test_packed_sequences_have_one_layout() -> None:
    arrays = [x[0] for x in (DOUT, Q, K, V, OUT)]
    bounds = {"cu_seqlens_q": [0, 3], "cu_seqlens_k": [0, 5]}
    with pytest.raises(InvalidArgument, match=r"^`layout` must be 'bshd' for packed sequences"):
        cupyflash.attention_backward(*arrays, LSE[0], **bounds, layout="bhsd")
    with pytest.raises(InvalidArgument, match=r"^`cu_seqlens_k` is missing"):
        cupyflash.attention_backward(*arrays, LSE[0], cu_seqlens_q=[0, 3])


def test_deterministic_is_a_bool_of_the_forward_pass_too() -> None:
    assert same_bits(cupyflash.attention(Q, K, V, deterministic=True), OUT)
    with pytest.raises(InvalidType, match=r"^`deterministic` must be a bool, got int"):
        cupyflash.attention(Q, K, V, deterministic=1)


def test_the_oracle_is_the_row_named_reference() -> None:
    bias = normal(6, 4, 1, 5)
    options = {"attn_bias": bias, "causal": True, "dropout_p": 0.5, "rng_state": (1, 2)}
    out, lse = cupyflash.attention(Q, K, V, return_lse=True, **options)
    grads = cupyflash.attention_backward(DOUT, Q, K, V, out, lse, kernel="reference", **options)
    expected = reference.attention_backward(DOUT, Q, K, V, **options)
    for gradient, x in zip(grads[:4], expected[:4], strict=True):
        np.testing.assert_array_equal(gradient, x.astype(gradient.dtype))
