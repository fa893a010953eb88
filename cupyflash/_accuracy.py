"""The accuracy rule, in one place: no other tolerance decides anything.

An element of the output is right when nan and the infinities stand where the fp64 oracle, rounded
to the output dtype, has them, and

    |out - ref| <= 2 e(b,h) + u (|ref| + rms)

where plain is the same-dtype formula of `reference.plain`, u the unit roundoff of the output dtype,
rms = sqrt(sum_j P_ij^2 V_j^2) and e(b,h) the largest error of plain, over the (b, h) of the call,
in units of the size max(|ref| + rms) of each; a sum of nothing or of zeros is exactly 0. Gradients
likewise, without that; the (b, h) of dbias are those of its own shape. There u is not below the
roundoff of the inputs, and rms counts what cancels in dP - D + dl. docs/decisions/0004 says why the
maximum is not of one head, 0005 what is particular to gradients. For the LSE

    |lse - ref| <= 1e-5 max(1, |ref|) + 2 max_(b,h) |plain - ref|

and for fp8 inputs 2^-13 max_j sum_d |scale q_id k_jd| more, for their products are summed in fewer
bits than those of fp32. Before they are added, the tensor cores of Hopper align the 32 products of
an instruction and the sum so far to the largest of them, and cut each 13 bits below its leading
one ("DeepSeek-V3 Technical Report", 3.3.2). A score of D products of either sign is so cut D times,
by half of 2^-13 A on average and in either direction, where A, the largest sum on the way, is about
sqrt(D) products large: of sqrt(D) 2^-13 sqrt(D) products, which is 2^-13 of the sum of their sizes.
The LSE is off by no more than its scores are. Where all products have one sign they are cut in one
direction, and no such bound holds.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from . import reference
from ._packed import Packed, Span

__all__ = [
    "Expected",
    "ExpectedGradients",
    "Verdict",
    "assert_accurate",
    "expected",
    "expected_gradients",
    "gradients_verdict",
    "verdict",
]

FP8_SUMS = 2.0**-13  # what the tensor cores lose of the sizes that they add


class Verdict(NamedTuple):
    """Whether a result obeys the rule, and by how much."""

    ok: bool
    error: float  # the largest error of the output, or of any gradient
    bound_ratio: float  # the largest ratio of an error to its bound: at most 1 if ok
    lse_error: float
    message: str


class _Comparison(NamedTuple):
    error: float
    ratio: float
    fault: str  # what is wrong, or nothing


def verdict(out: Any, lse: Any, q: Any, k: Any, v: Any, **options: Any) -> Verdict:
    """Hold a result of attention against the oracle.

    Parameters
    ----------
    out, lse : ndarray
        The result, in the layout of `q`; `lse` may be None.
    q, k, v : ndarray
        The inputs of the call; bfloat16 and fp8 as the dtypes of ml_dtypes.
    **options
        The options of the call, see `reference.Options`.
    """
    return expected(q, k, v, **options).verdict(out, lse)


class Expected(NamedTuple):
    """What a call of attention should give, and how far off an element may be."""

    out: np.ndarray
    lse: np.ndarray
    dtypes: tuple[Any, Any]  # of the two
    bound: np.ndarray
    lse_bound: np.ndarray

    def verdict(self, out: Any, lse: Any) -> Verdict:
        """Hold a result against it; `lse` may be None."""
        of_out = _compare("out", out, self.out, self.dtypes[0], self.bound)
        if lse is None:
            return _conclude(of_out)
        of_lse = _compare("lse", lse, self.lse, self.dtypes[1], self.lse_bound)
        return _conclude(of_out, of_lse)._replace(error=of_out.error, lse_error=of_lse.error)


def expected(q: Any, k: Any, v: Any, **options: Any) -> Expected:
    """Return what `verdict` holds results of one call against, to judge several of them."""
    packed = Packed(q, k, v, options)
    ref, ref_lse = reference.attention(q, k, v, **options)
    plain, plain_lse = reference.plain(q, k, v, **options)
    terms = np.abs(ref) + reference.rms(q, k, v, **options)
    worst = _worst(_distance(plain, ref), terms, _of_rows(packed, packed.shape_q, packed.spans_q))
    allowed = 2 * worst + _roundoff(plain.dtype) * terms
    bound = np.where(terms == 0, 0, allowed)
    worst = _largest(packed.pack_lse(_distance(plain_lse, ref_lse)).T[..., None], packed.spans_q)
    allowed = 2 * packed.unpack_lse(worst[..., 0].T)
    lse_bound = allowed + 1e-5 * np.maximum(1, np.abs(ref_lse))
    if packed.dtype.itemsize == 1:
        lse_bound += FP8_SUMS * reference.score_sizes(q, k, v, **options)
    return Expected(ref, ref_lse, (plain.dtype, plain_lse.dtype), bound, lse_bound)


def gradients_verdict(
    gradients: Any, dout: Any, q: Any, k: Any, v: Any, *, dlse: Any = None, **options: Any
) -> Verdict:
    """Hold the gradients (dq, dk, dv, dbias, dsink) of a call against the oracle; see `verdict`.

    A gradient that is None is not judged.
    """
    return expected_gradients(dout, q, k, v, dlse=dlse, **options).verdict(gradients)


class ExpectedGradients(NamedTuple):
    """What the gradients of a call should be, and how far off an element may be; None for none."""

    refs: reference.Gradients
    dtypes: reference.Gradients
    bounds: reference.Gradients

    def verdict(self, gradients: Any) -> Verdict:
        """Hold gradients against it; one that is None is not judged."""
        return _conclude(
            *(
                _compare(name, got, *expected)
                for name, got, *expected in zip(
                    reference.Gradients._fields, gradients, *self, strict=True
                )
                if got is not None and expected[0] is not None
            )
        )


def expected_gradients(
    dout: Any, q: Any, k: Any, v: Any, *, dlse: Any = None, **options: Any
) -> ExpectedGradients:
    """Return what `gradients_verdict` holds gradients of one call against, to judge several."""
    packed = Packed(q, k, v, options)
    refs, plains, rmss = (
        function(dout, q, k, v, dlse=dlse, **options)
        for function in (
            reference.attention_backward,
            reference.plain_backward,
            reference.rms_backward,
        )
    )
    bounds: list[Any] = []
    for name, ref, plain, rms in zip(refs._fields, refs, plains, rmss, strict=True):
        if ref is None:
            bounds.append(None)
            continue
        terms, distance = np.abs(ref) + rms, _distance(plain, ref)
        if name == "dsink":
            errors = reference.sink_errors(dout, q, k, v, dlse=dlse, **options)
            distance = np.maximum(distance, errors)
        worst = 2 * _worst(distance, terms, _heads(name, packed, ref.ndim))
        # P, dt and out are kept in the dtype of the inputs, whatever that of a bias or a sink is.
        u = max(_roundoff(plain.dtype), _roundoff(plains.dq.dtype))
        bounds.append(worst + u * terms)
    dtypes = (None if plain is None else plain.dtype for plain in plains)
    return ExpectedGradients(refs, reference.Gradients(*dtypes), reference.Gradients(*bounds))


def assert_accurate(out: Any, lse: Any, q: Any, k: Any, v: Any, **options: Any) -> None:
    """Raise AssertionError, with the worst element, where `verdict` is not ok."""
    result = verdict(out, lse, q, k, v, **options)
    if not result.ok:
        raise AssertionError(result.message)


def _roundoff(dtype: Any) -> float:
    return float(ml_dtypes.finfo(dtype).eps) / 2


def _distance(x: np.ndarray, ref: np.ndarray) -> np.ndarray:
    """Return |x - ref|, 0 where either is not finite."""
    x, ref = x.astype(np.float64), ref.astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(ref)
    return np.abs(np.where(finite, x, 0) - np.where(finite, ref, 0))


Largest = Callable[[np.ndarray], np.ndarray]


def _worst(distance: np.ndarray, terms: np.ndarray, largest: Largest) -> np.ndarray:
    """Return e of the head of each element; `largest` gives the maximum of each element's head."""
    size = largest(np.where(np.isfinite(terms), terms, 0))
    share = np.divide(largest(distance), size, out=np.zeros_like(size), where=size > 0)
    return share.max(initial=0) * size


def _largest(values: np.ndarray, spans: list[Span]) -> np.ndarray:
    """Return, for every row of packed (total, heads, n), the maximum of its sequence and head."""
    largest = np.zeros((*values.shape[:2], 1))
    for first, length in spans:
        rows = slice(first, first + length)
        largest[rows] = values[rows].max(axis=(0, 2), initial=0, keepdims=True)
    return largest


def _of_rows(packed: Packed, shape: tuple[int, ...], spans: list[Span]) -> Largest:
    """Return `_largest` of arrays in the caller's layout."""
    return lambda values: packed.unpack(_largest(packed.pack(values), spans), shape)


def _heads(name: str, packed: Packed, rank: int) -> Largest:
    """Return the maximum over the elements of a gradient that are of one head."""
    if name == "dq":
        return _of_rows(packed, packed.shape_q, packed.spans_q)
    if name in ("dk", "dv"):
        return _of_rows(packed, packed.shape_k, packed.spans_k)
    axes = tuple(range(rank))[-2:] if name == "dbias" else ()
    return lambda values: values.max(axis=axes, initial=0, keepdims=True)


def _compare(name: str, got: Any, ref: np.ndarray, dtype: Any, bound: np.ndarray) -> _Comparison:
    got = np.asarray(got)
    if got.shape != ref.shape or got.dtype != dtype:
        fault = f"{name} is {got.dtype} {got.shape}, expected {np.dtype(dtype)} {ref.shape}"
        return _Comparison(math.inf, math.inf, fault)
    with np.errstate(over="ignore"):
        expected = ref.astype(dtype).astype(np.float64)
    got = got.astype(np.float64)
    distance, bound = _distance(got, ref), np.broadcast_to(bound, ref.shape)
    ratio = np.divide(distance, bound, out=np.where(distance > 0, np.inf, 0.0), where=bound > 0)
    for kind in (np.isnan, np.isposinf, np.isneginf):
        ratio[kind(got) != kind(expected)] = np.inf
    if not ratio.size:
        return _Comparison(0.0, 0.0, "")
    at = np.unravel_index(ratio.argmax(), ratio.shape)
    fault = (
        f"{name}[{', '.join(map(str, at))}] is {got[at]:.9g}, the reference {ref[at]:.9g}: error "
        f"{distance[at]:.3g}, bound {bound[at]:.3g}; {(ratio > 1).sum()} of {ratio.size} are wrong"
    )
    return _Comparison(float(distance.max()), float(ratio[at]), fault if ratio[at] > 1 else "")


def _conclude(*comparisons: _Comparison) -> Verdict:
    error = max(comparison.error for comparison in comparisons)
    ratio = max(comparison.ratio for comparison in comparisons)
    faults = "; ".join(filter(None, (comparison.fault for comparison in comparisons)))
    message = faults or f"largest error {error:.3g}, {ratio:.2f} of its bound"
    return Verdict(not faults, error, ratio, 0.0, message)
