"""The accuracy rule accepts what it must and rejects every planted error."""

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyflash import _accuracy, reference
from cupyflash._accuracy import assert_accurate, gradients_verdict, verdict

INF, NAN = math.inf, math.nan
DTYPES = [ml_dtypes.bfloat16, np.float16, np.float32, np.float64]
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def inputs(dtype: Any, *, heads_k: int = 2, len_q: int = 40, len_k: int = 70) -> Arrays:
    rng = np.random.default_rng(11)
    q, k, v = (
        rng.standard_normal((2, length, heads, dim)).astype(dtype)
        for length, heads, dim in [(len_q, 4, 16), (len_k, heads_k, 16), (len_k, heads_k, 24)]
    )
    return q, k, v


def tiled(q: np.ndarray, k: np.ndarray, v: np.ndarray, block: int = 16) -> tuple[Any, Any]:
    """Attention by the online softmax, as a kernel computes it: right, and unlike `plain`."""
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    q32, k32, v32 = (x.astype(dtype).swapaxes(1, 2) for x in (q, k, v))
    k32, v32 = (x.repeat(q.shape[2] // k.shape[2], axis=1) for x in (k32, v32))
    m, total, out = -INF, 0.0, 0.0
    for first in range(0, k.shape[1], block):
        keys = slice(first, first + block)
        s = q32 @ k32[:, :, keys].swapaxes(2, 3) * dtype(q.shape[3] ** -0.5)
        m_new = np.maximum(m, s.max(axis=-1, keepdims=True))
        p, decay = np.exp(s - m_new), np.exp(m - m_new)
        total = total * decay + p.sum(axis=-1, keepdims=True)
        out = out * decay + p.astype(q.dtype).astype(dtype) @ v32[:, :, keys]
        m = m_new
    return (out / total).swapaxes(1, 2).astype(q.dtype), (m + np.log(total))[..., 0]


def plain_bound(out: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Any:
    """Return ref and the bound of every element, by the letter of the rule, for one head each."""
    ref, _ = reference.attention(q, k, v)
    plain = reference.plain(q, k, v)[0].astype(float)
    p = reference.attention(q, k, np.eye(k.shape[1])[None, :, None].repeat(2, 0).repeat(4, 2))[0]
    rms = np.sqrt(np.einsum("bihj,bjhd->bihd", p**2, v.astype(float) ** 2))
    worst = np.abs(plain - ref).max(axis=(1, 3), keepdims=True)
    size = (np.abs(ref) + rms).max(axis=(1, 3), keepdims=True)
    worst = (worst / size).max() * size
    unit = {2: 2.0**-8 if out.dtype == ml_dtypes.bfloat16 else 2.0**-11, 4: 2.0**-24, 8: 2.0**-53}
    return ref, 2 * worst + unit[out.dtype.itemsize] * (np.abs(ref) + rms)


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"causal": True},
    "empty rows": {"causal": True, "seqused_k": [20, 0]},
    "bhsd": {"layout": "bhsd", "window_size": (5, 3)},
    "bias": {"attn_bias": np.linspace(-3, 3, 70), "softcap": 2.0},
    "sink": {"learnable_sink": np.array([1.0, -INF, 2.0, 0.0])},
    "dropout": {"dropout_p": 0.3, "rng_state": (1, 2)},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_plain_formula_is_accepted(name: str, dtype: Any) -> None:
    q, k, v = inputs(dtype)
    if name == "bhsd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    out, lse = reference.plain(q, k, v, **OPTIONS[name])
    assert out.dtype == dtype
    result = verdict(out, lse, q, k, v, **OPTIONS[name])
    assert result.ok, result.message
    assert 0 < result.bound_ratio <= 0.5
    assert result.error > 0
    assert 0 <= result.lse_error < 1e-4
    assert_accurate(out, None, q, k, v, **OPTIONS[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_the_online_softmax_is_accepted(dtype: Any) -> None:
    for len_k in (1, 16, 70, 300):
        q, k, v = inputs(dtype, len_k=len_k)
        assert_accurate(*tiled(q, k, v), q, k, v)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_the_bound_is_the_rule(dtype: Any) -> None:
    q, k, v = inputs(dtype, heads_k=4)
    out, lse = reference.plain(q, k, v)
    ref, bound = plain_bound(out, q, k, v)
    expected = np.abs(out.astype(float) - ref) / bound
    assert verdict(out, lse, q, k, v).bound_ratio == pytest.approx(expected.max(), rel=1e-6)
    at = (1, 7, 2, 5)
    out[at] = ref[at] + 4 * bound[at]
    result = verdict(out, lse, q, k, v)
    assert not result.ok
    assert result.message.startswith("out[1, 7, 2, 5] is ")
    assert "1 of 7680 are wrong" in result.message
    assert result.bound_ratio == pytest.approx(4, rel=0.3)  # `out` is rounded
    with pytest.raises(AssertionError, match=r"out\[1, 7, 2, 5\]"):
        assert_accurate(out, lse, q, k, v)


def test_the_maximum_is_in_units_of_the_head() -> None:
    """A head of large values does not widen the bound of the others, nor does another sequence."""
    q, k, v = inputs(ml_dtypes.bfloat16, heads_k=4)
    v[0, :, 1] *= 1000
    out, lse = reference.plain(q, k, v)
    for at in [(0, 0, 0, 0), (1, 0, 1, 0)]:
        wrong = out.copy()
        wrong[at] += ml_dtypes.bfloat16(0.5)
        assert not verdict(wrong, lse, q, k, v).ok
    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    cu = {"cu_seqlens_q": [0, 40, 80], "cu_seqlens_k": [0, 70, 140]}
    wrong = out.reshape(80, 4, 24).copy()
    lse = lse.swapaxes(0, 1).reshape(4, 80)
    assert_accurate(wrong, lse, *packed, **cu)
    wrong[40, 1, 0] += ml_dtypes.bfloat16(0.5)
    result = verdict(wrong, lse, *packed, **cu)
    assert not result.ok
    assert result.message.startswith("out[40, 1, 0] ")


# Planted errors: each returns the (out, lse) of a wrong computation of plain(q, k, v, causal)


def lost_key(q: Any, k: Any, v: Any) -> Any:
    return reference.plain(q, k, v, causal=True, attn_mask=np.arange(70) != 33)


def lost_last_key(q: Any, k: Any, v: Any) -> Any:
    return reference.plain(q, k, v, causal=True, seqused_k=[70, 69])


def swapped_heads(q: Any, k: Any, v: Any) -> Any:
    out, lse = reference.plain(q, k, v, causal=True)
    out[:, :, [0, 1]] = out[:, :, [1, 0]]
    return out, lse


def interleaved_groups(q: Any, k: Any, v: Any) -> Any:
    return reference.plain(q, np.tile(k, (1, 1, 2, 1)), np.tile(v, (1, 1, 2, 1)), causal=True)


def first_batch_twice(q: Any, k: Any, v: Any) -> Any:
    out, lse = reference.plain(q, k, v, causal=True)
    out[1] = out[0]
    return out, lse


def top_left(q: Any, k: Any, v: Any) -> Any:
    return reference.plain(q, k, v, causal=True, alignment="top_left")


def not_causal(q: Any, k: Any, v: Any) -> Any:
    return reference.plain(q, k, v)


def scale_of_padded_dim(q: Any, k: Any, v: Any) -> Any:
    return reference.plain(q, k, v, causal=True, softmax_scale=24**-0.5)


def lse_of_base_two(q: Any, k: Any, v: Any) -> Any:
    out, lse = reference.plain(q, k, v, causal=True)
    return out, lse * np.float32(math.log2(math.e))


def lse_without_the_maximum(q: Any, k: Any, v: Any) -> Any:
    out, lse = reference.plain(q, k, v, causal=True)
    return out, lse - np.float32(1e-2)


def stale_row(q: Any, k: Any, v: Any) -> Any:
    out, lse = reference.plain(q, k, v, causal=True)
    out[1, 39, 3] = 0
    return out, lse


def nan_element(q: Any, k: Any, v: Any) -> Any:
    out, lse = reference.plain(q, k, v, causal=True)
    out[1, 39, 3, 23] = NAN
    return out, lse


def infinite_element(q: Any, k: Any, v: Any) -> Any:
    out, lse = reference.plain(q, k, v, causal=True)
    lse[1, 3, 39] = -INF
    return out, lse


def other_shape(q: Any, k: Any, v: Any) -> Any:
    out, lse = reference.plain(q, k, v, causal=True)
    return out[:, :, :, :-1], lse


def other_dtype(q: Any, k: Any, v: Any) -> Any:
    out, lse = reference.attention(q, k, v, causal=True)
    return out.astype(np.float32), lse.astype(np.float32)


def transposed_lse(q: Any, k: Any, v: Any) -> Any:
    out, lse = reference.plain(q, k, v, causal=True)
    return out, lse.swapaxes(1, 2)


PLANTED = [
    lost_key,
    lost_last_key,
    swapped_heads,
    interleaved_groups,
    first_batch_twice,
    top_left,
    not_causal,
    scale_of_padded_dim,
    lse_of_base_two,
    lse_without_the_maximum,
    stale_row,
    nan_element,
    infinite_element,
    other_shape,
    other_dtype,
    transposed_lse,
]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.__name__)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_planted_errors_are_rejected(planted: Callable[..., Any], dtype: Any) -> None:
    q, k, v = inputs(dtype)
    result = verdict(*planted(q, k, v), q, k, v, causal=True)
    assert not result.ok
    assert result.bound_ratio > 1
    assert result.message


def test_values_that_are_not_finite_must_stand_in_their_places() -> None:
    q, k, v = inputs(np.float16)
    q[0, 5, 2, 1], v[1, 3, 1, 7] = NAN, INF
    options: dict[str, Any] = {"causal": True, "seqused_q": [40, 30], "seqused_k": [70, 20]}
    out, lse = reference.plain(q, k, v, **options)
    assert np.isnan(out[0, 5, 2]).all()
    assert np.isinf(out).any()
    assert np.isneginf(lse[1]).any()
    assert_accurate(out, lse, q, k, v, **options)

    def rejected(array: np.ndarray, at: tuple[int, ...], value: float) -> bool:
        before = array[at]
        array[at] = value
        ok = verdict(out, lse, q, k, v, **options).ok
        array[at] = before
        return not ok

    infinite = tuple(int(n) for n in np.argwhere(np.isinf(out))[0])
    assert rejected(out, (0, 5, 2, 3), 0)  # a nan swallowed
    assert rejected(lse, (0, 2, 5), -INF)
    assert rejected(out, infinite, 65504)
    assert rejected(out, infinite, -INF)
    assert rejected(out, infinite, NAN)
    assert rejected(out, (1, 0, 0, 0), 1e-4)  # a row that sees no key
    assert rejected(lse, (1, 0, 0), INF)
    assert rejected(lse, (1, 0, 0), -49993.98)
    assert rejected(lse, (1, 0, 0), 0)
    assert rejected(out, (1, 39, 0, 0), 1e-4)  # past the used length
    assert not rejected(out, (0, 5, 2, 3), NAN)


def test_a_value_that_the_output_dtype_cannot_hold_is_infinite() -> None:
    q, v = np.zeros((1, 9, 1, 2), np.float16), np.full((1, 1, 1, 8), 60000, np.float16)
    options: dict[str, Any] = {"dropout_p": 0.5, "rng_state": (1, 0)}
    doubled = reference.attention(q, q[:, :1], v, **options)[0]
    assert set(doubled.ravel()) == {0, 120000}
    out = np.where(doubled > 0, INF, 0).astype(np.float16)
    assert_accurate(out, None, q, q[:, :1], v, **options)
    assert not verdict(np.minimum(out, 65504), None, q, q[:, :1], v, **options).ok


def test_empty_results_are_right() -> None:
    for shape in [(0, 3, 2, 4), (2, 0, 2, 4), (2, 3, 0, 4), (2, 3, 2, 0)]:
        x = np.zeros(shape, np.float32)
        result = verdict(*reference.plain(x, x, x), x, x, x)
        assert result.ok
        assert result.error == 0


# Gradients

GRADIENT_OPTIONS: dict[str, Any] = {
    "causal": True,
    "softcap": 1.5,
    "attn_bias": np.linspace(-1, 1, 4 * 70, dtype=np.float32).reshape(4, 1, 70),
    "learnable_sink": np.linspace(0, 1, 4, dtype=np.float32),
}


def gradient_inputs(dtype: Any) -> tuple[Any, Any, Arrays]:
    arrays = inputs(dtype)
    rng = np.random.default_rng(12)
    dout, dlse = rng.standard_normal((2, 40, 4, 24)), rng.standard_normal((2, 4, 40))
    return dout.astype(dtype), dlse.astype(np.float32), arrays


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_plain_gradients_are_accepted(dtype: Any) -> None:
    dout, dlse, arrays = gradient_inputs(dtype)
    grads = reference.plain_backward(dout, *arrays, dlse=dlse, **GRADIENT_OPTIONS)
    result = gradients_verdict(grads, dout, *arrays, dlse=dlse, **GRADIENT_OPTIONS)
    assert result.ok, result.message
    assert 0 < result.bound_ratio <= 0.5
    only_bias = reference.Gradients(None, None, None, grads.dbias, None)
    assert gradients_verdict(only_bias, dout, *arrays, dlse=dlse, **GRADIENT_OPTIONS).ok


def from_results(
    dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, dlse: Any, bias: Any
) -> np.ndarray:
    """Return dS in fp32 from what a forward pass gives; unlike `plain`, all sums at once."""
    out, lse = reference.attention(q, k, v, attn_bias=bias)
    lse = lse.astype(np.float32)
    q, k, v, dout, out = (
        x.astype(v.dtype).astype(np.float32).swapaxes(1, 2) for x in (q, k, v, dout, out)
    )
    k, v = (x.repeat(q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    delta = (out * dout).sum(axis=-1) - dlse
    s = np.einsum("bhid,bhjd->bhij", q, k) * np.float32(q.shape[3] ** -0.5) + bias
    p = np.exp2((s - lse[..., None]) * np.float32(np.log2(np.e)))
    return p * (np.einsum("bhid,bhjd->bhij", dout, v) - delta[..., None])


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=lambda dtype: np.dtype(dtype).name)
def test_a_head_of_one_element_is_not_judged_by_its_luck(dtype: Any) -> None:
    """Of a bias that repeats along queries and keys; the error is that of the rounded out."""
    rng = np.random.default_rng(13)
    for _ in range(5):
        dout, *arrays = (rng.standard_normal((3, n, 12, 16)).astype(dtype) for n in (9, 9, 20, 20))
        dlse, bias = (rng.standard_normal((3, 12, n, 1), np.float32) for n in (9, 1))
        ds = from_results(dout, *arrays, dlse[..., 0], bias)
        grads = (None, None, None, ds.sum(axis=(2, 3), keepdims=True), None)
        result = gradients_verdict(grads, dout, *arrays, dlse=dlse[..., 0], attn_bias=bias)
        assert result.ok, result.message


def test_the_rounding_of_the_lse_is_no_fault() -> None:
    """Where nothing else is rounded: of equal values in v, dP and D cancel."""
    rng = np.random.default_rng(14)
    for _ in range(10):
        q, k, dout = (rng.standard_normal((1, n, 2, 16), np.float32) for n in (5, 300, 5))
        v, dlse = np.zeros_like(k), rng.standard_normal((1, 2, 5), np.float32)
        bias = rng.standard_normal((1, 2, 5, 300), np.float32)
        grads = (None, None, None, from_results(dout, q, k, v, dlse, bias), None)
        result = gradients_verdict(grads, dout, q, k, v, dlse=dlse, attn_bias=bias)
        assert result.ok, result.message


def from_lse(
    dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, dlse: np.ndarray
) -> reference.Gradients:
    """Gradients by the out and lse of `tiled`, as a kernel computes them: unlike `plain`."""
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    group, scale = q.shape[2] // k.shape[2], dtype(q.shape[3] ** -0.5)
    out, lse = tiled(q, k, v)
    do, q32, k32, v32, o = (x.astype(dtype).swapaxes(1, 2) for x in (dout, q, k, v, out))
    k32, v32 = (x.repeat(group, axis=1) for x in (k32, v32))
    delta = (do * o).sum(axis=-1) - dlse.astype(dtype)
    p = np.exp(q32 @ k32.swapaxes(2, 3) * scale - lse[..., None])
    ds = p * (do @ v32.swapaxes(2, 3) - delta[..., None])
    dq, dk, dv = ds @ k32 * scale, ds.swapaxes(2, 3) @ q32 * scale, p.swapaxes(2, 3) @ do
    dk, dv = (x.reshape(len(x), -1, group, *x.shape[2:]).sum(axis=2) for x in (dk, dv))
    sums = ds.sum(axis=(0, 2), keepdims=True)[0]
    dq, dk, dv = (x.swapaxes(1, 2).astype(q.dtype) for x in (dq, dk, dv))
    return reference.Gradients(dq, dk, dv, sums.astype(np.float32), None)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("len_k", [1, 2, 70])
@pytest.mark.parametrize("heads_k", [4, 2, 1])
def test_gradients_by_the_lse_are_accepted(dtype: Any, len_k: int, heads_k: int) -> None:
    """Where a row sees one key, dP and D cancel and leave what they were rounded by."""
    q, k, v = inputs(dtype, heads_k=heads_k, len_k=len_k)
    dout, dlse, _ = gradient_inputs(dtype)
    dlse = dlse.astype(np.float64 if dtype == np.float64 else np.float32)
    grads = from_lse(dout, q, k, v, dlse)
    bias = np.zeros(grads.dbias.shape, np.float32)
    result = gradients_verdict(grads, dout, q, k, v, dlse=dlse, attn_bias=bias)
    assert result.ok, result.message
    for name in ("dq", "dk", "dv"):
        wrong = getattr(grads, name).copy()
        wrong[1, -1] *= wrong.dtype.type(1.0625)
        worse = grads._replace(**{name: wrong})
        if len_k > 1 or name == "dv":  # else they are 0 but for rounding
            assert not gradients_verdict(worse, dout, q, k, v, dlse=dlse, attn_bias=bias).ok, name


def test_the_errors_of_a_sink_are_those_of_its_terms() -> None:
    """Which are the errors of calls of one query each."""
    dout, dlse, (q, k, v) = gradient_inputs(ml_dtypes.bfloat16)
    sink = GRADIENT_OPTIONS["learnable_sink"]
    squares = np.zeros(4)
    for b, i in np.ndindex(q.shape[:2]):
        one = dout[b : b + 1, i : i + 1], q[b : b + 1, i : i + 1], k[b : b + 1], v[b : b + 1]
        call = {"dlse": dlse[b : b + 1, :, i : i + 1], "learnable_sink": sink}
        exact, plain = (
            f(*one, **call).dsink for f in (reference.attention_backward, reference.plain_backward)
        )
        np.testing.assert_allclose(
            reference.sink_errors(*one, **call), abs(plain - exact), atol=1e-7
        )
        squares += (plain - exact) ** 2
    errors = reference.sink_errors(dout, q, k, v, dlse=dlse, learnable_sink=sink)
    np.testing.assert_allclose(errors, np.sqrt(squares), rtol=1e-3)


@pytest.mark.parametrize("name", reference.Gradients._fields)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=["bfloat16", "float32"])
def test_wrong_gradients_are_rejected(dtype: Any, name: str) -> None:
    dout, dlse, arrays = gradient_inputs(dtype)
    grads = reference.plain_backward(dout, *arrays, dlse=dlse, **GRADIENT_OPTIONS)
    right = getattr(grads, name)
    one = right.copy()
    one.flat[7 % one.size] += one.dtype.type(np.abs(right.astype(float)).max() / 4)
    for wrong in (one, 0 * right, -right, right * right.dtype.type(1.25), right[..., ::-1]):
        result = gradients_verdict(
            grads._replace(**{name: wrong}), dout, *arrays, dlse=dlse, **GRADIENT_OPTIONS
        )
        assert not result.ok
        assert result.message.startswith(f"{name}[")


@pytest.mark.parametrize(
    "change", [{"softcap": 0.0}, {"causal": False}, {"dlse": None}, {"softmax_scale": 0.2}], ids=str
)
def test_gradients_of_another_problem_are_rejected(change: dict[str, Any]) -> None:
    dout, dlse, arrays = gradient_inputs(ml_dtypes.bfloat16)
    options = {"dlse": dlse} | GRADIENT_OPTIONS
    grads = reference.plain_backward(dout, *arrays, **(options | change))
    assert not gradients_verdict(grads, dout, *arrays, **options).ok


def test_the_roundoffs() -> None:
    names = [2**-8, 2**-11, 2**-24, 2**-53]
    assert [_accuracy._roundoff(dtype) for dtype in DTYPES] == names
