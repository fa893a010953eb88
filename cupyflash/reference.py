"""The oracle: exact attention and its gradients in plain fp64 NumPy, the truth of every test.

For one sequence and one query head, with query i, key j and the diagonal d (Sk - Sq; top_left: 0):

    t_ij = scale (q_i . k_j)                               scale
    c_ij = softcap tanh(t_ij / softcap)                    softcap
    s_ij = c_ij - slope |i + d - j| + bias_ij              ALiBi, bias
    s_ij = -inf  where the band or a mask hides it         mask
    l_i  = log(sum_j exp(s_ij) + exp(sink))                sink; l is the LSE
    P_ij = exp(s_ij - l_i)                                 softmax
    o_i  = sum_j P_ij Z_ij v_j                             dropout (Z: 0 or the rescale), times V

and backwards, from do = dL/do and dl = dL/dl:

    dv_j  = sum_i P_ij Z_ij do_i                           dP_ij = Z_ij (do_i . v_j)
    ds_ij = P_ij (dP_ij - D_i + dl_i) = dbias_ij           D_i   = sum_j P_ij dP_ij
    dt_ij = ds_ij (1 - tanh(t_ij / softcap)^2)             dsink = sum_i e^(sink - l_i) (dl_i - D_i)
    dq_i  = scale sum_j dt_ij k_j                          dk_j  = scale sum_i dt_ij q_i

A pair is hidden iff s_ij = -inf, and every sum runs over the visible pairs alone: what a hidden row
of k or v holds (nan, inf) reaches nothing. Inside, all arrays are packed: (total, heads, dim).
"""

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ._packed import Block, Options, Packed, operand
from .errors import InvalidArgument, InvalidType, shown

__all__ = [
    "Gradients",
    "Options",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "output_dtype",
    "plain",
    "plain_backward",
    "rms",
    "rms_backward",
    "score_sizes",
    "sink_errors",
]


class Gradients(NamedTuple):
    """The gradients, each in the shape of its input; None for an input that was not given.

    Of attn_bias there is ``dbias``, of learnable_sink ``dsink``.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    dsink: Any


def attention(q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return exact attention and its log-sum-exp in fp64.

    Parameters
    ----------
    q, k, v : array
        (B, Sq, H, D), (B, Sk, Hk, D) and (B, Sk, Hk, Dv); heads second with ``layout="bhsd"``.
    **options
        See `Options`.

    Returns
    -------
    out : (B, Sq, H, Dv), in the layout of `q`
    lse : (B, H, Sq)
    """
    packed = Packed(q, k, v, options)
    out, lse = _forward(packed, EXACT)
    return packed.unpack(out, packed.shape_q), packed.unpack_lse(lse)


def attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Packed `attention`: q (total_q, H, D) gives out (total_q, H, Dv) and lse (H, total_q)."""
    return attention(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)


def attention_backward(
    dout: Any, q: Any, k: Any, v: Any, *, dlse: Any = None, **options: Any
) -> Gradients:
    """Return the exact gradients of sum(out * dout) + sum(lse * dlse) in fp64."""
    return _backward(Packed(q, k, v, options), dout, dlse, EXACT)[0]


def attention_varlen_backward(
    dout: Any, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **options: Any
) -> Gradients:
    """Packed `attention_backward`."""
    options = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, **options}
    return attention_backward(dout, q, k, v, **options)


def plain(q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the accuracy rule's same-dtype `attention`, out rounded to the output dtype.

    Scores and modifiers in X (fp32; fp64 for fp64), P rounded to the dtype of `q`, P V summed in X
    over chunks of 64 keys in order; lse in X. For fp8 each row of P is rounded to e4m3 where its
    largest weight is 2^8, as FlashAttention-3 does: e4m3 ends at 448, and below at 2^-9.
    """
    packed = Packed(q, k, v, options)
    out, lse = _forward(packed, _same_dtype(packed.dtype))
    return packed.unpack(_cast(out, output_dtype(packed.dtype)), packed.shape_q), packed.unpack_lse(
        lse
    )


def plain_backward(
    dout: Any, q: Any, k: Any, v: Any, *, dlse: Any = None, **options: Any
) -> Gradients:
    """Return the same-dtype gradients, from out and lse as the forward pass rounds them.

    P is exp(s - lse) with the lse in X, of scores that were summed in another order, and D is of
    the rounded out; P and dt are rounded as P in `plain`.
    """
    packed = Packed(q, k, v, options)
    grads, _ = _backward(packed, dout, dlse, _same_dtype(packed.dtype))
    dq, dk, dv, dbias, dsink = grads
    if dbias is not None:
        dbias = _cast(dbias, np.asarray(packed.options.attn_bias).dtype)
    if dsink is not None:
        dsink = _cast(dsink, np.asarray(packed.options.learnable_sink).dtype)
    dtype = output_dtype(packed.dtype)
    return Gradients(_cast(dq, dtype), _cast(dk, dtype), _cast(dv, dtype), dbias, dsink)


def rms(q: Any, k: Any, v: Any, **options: Any) -> np.ndarray:
    """Return sqrt(sum_j (P_ij Z_ij v_j)^2), in the shape of out."""
    packed = Packed(q, k, v, options)
    return packed.unpack(_forward(packed, EXACT, power=2)[0], packed.shape_q)


def rms_backward(
    dout: Any, q: Any, k: Any, v: Any, *, dlse: Any = None, **options: Any
) -> Gradients:
    """Return, for every gradient, the root of the summed squares of the terms it is a sum of.

    dP, D and dl are terms each: between them they may cancel.
    """
    return _backward(Packed(q, k, v, options), dout, dlse, EXACT, power=2)[0]


def sink_errors(
    dout: Any, q: Any, k: Any, v: Any, *, dlse: Any = None, **options: Any
) -> np.ndarray:
    """Return the root of the summed squares of what `plain_backward` errs by in terms of dsink.

    There is one of each query, and of their sum but one of each head.
    """
    packed = Packed(q, k, v, options)
    exact, plain = (_backward(packed, dout, dlse, a)[1] for a in (EXACT, _same_dtype(packed.dtype)))
    off = exact - plain
    return np.sqrt((np.where(np.isfinite(off), off, 0) ** 2).sum(axis=1))


@np.errstate(all="ignore")
def score_sizes(q: Any, k: Any, v: Any, **options: Any) -> np.ndarray:
    """Return max_j sum_d |scale q_id k_jd| over the keys j that a query i sees, as (B, H, Sq)."""
    packed = Packed(q, k, v, options)
    sizes = np.zeros(packed.q.shape[1::-1])
    for at in packed.blocks():
        q, k, _ = packed.load(at, np.float64)
        s, _ = _scores(packed, at, q, k, EXACT)
        terms = abs(packed.scale) * (np.abs(q) @ np.abs(k).T)
        visible = np.isfinite(s) & np.isfinite(terms)
        sizes[at.h, at.rows] = np.where(visible, terms, 0).max(axis=1, initial=0)
    return packed.unpack_lse(sizes)


def output_dtype(dtype: Any) -> np.dtype:
    """Return the dtype of out: that of the inputs, bfloat16 for fp8."""
    try:
        dtype = np.dtype(dtype)
    except (TypeError, ValueError):
        raise InvalidType(f"`dtype` must be a dtype of NumPy's, got {shown(dtype)}") from None
    return np.dtype(ml_dtypes.bfloat16) if dtype.itemsize == 1 else dtype


class Arithmetic(NamedTuple):
    """The rounding of one computation."""

    compute: Any  # dtype of every step
    store: Any = None  # dtype that P, dt and out are rounded to; None: they are not
    chunk: int = 2**62  # terms summed at a time
    order: slice = slice(None)  # of the terms of a sum
    largest: float | None = None  # of a row as it is stored; None: as it is

    def round(self, x: np.ndarray) -> np.ndarray:
        """Return `x` as it reads after having been stored."""
        if self.store is None:
            return x
        if self.largest is None:
            return x.astype(self.store).astype(self.compute)
        top = np.abs(x).max(axis=-1, keepdims=True, initial=0)
        unit = np.where(top == 0, 1, top / self.compute(self.largest))
        return (x / unit).astype(self.store).astype(self.compute) * unit


EXACT = Arithmetic(np.float64)


def _same_dtype(dtype: Any) -> Arithmetic:
    """Return the arithmetic of `plain`; fp64 sums run backwards, unlike the oracle's."""
    if dtype == np.float64:
        return Arithmetic(np.float64, dtype, chunk=64, order=slice(None, None, -1))
    if dtype.itemsize == 1:
        return Arithmetic(np.float32, ml_dtypes.float8_e4m3fn, chunk=64, largest=2.0**8)
    return Arithmetic(np.float32, dtype, chunk=64)


@np.errstate(all="ignore")
def _forward(packed: Packed, a: Arithmetic, power: int = 1) -> tuple[np.ndarray, np.ndarray]:
    out = np.zeros((*packed.q.shape[:2], packed.v.shape[2]), a.compute)
    lse = np.full(packed.q.shape[1::-1], -np.inf, a.compute)
    for at in packed.blocks():
        q, k, v = packed.load(at, a.compute)
        s, _ = _scores(packed, at, q, k, a)
        visible, p, lse[at.h, at.rows], _ = _softmax(s, packed.sink[at.h])
        pz = a.round(p) * packed.keep(at)
        out[at.rows, at.h] = _visible_sum(pz, v, visible, a, power) * packed.rescale**power
    return out if power == 1 else np.sqrt(out), lse


@np.errstate(all="ignore")
def _backward(
    packed: Packed, dout: Any, dlse: Any, a: Arithmetic, power: int = 1
) -> tuple[Gradients, np.ndarray]:
    """Return the gradients and the terms of dsink (heads, total_q)."""
    dq, dk, dv = (np.zeros(x.shape, a.compute) for x in (packed.q, packed.k, packed.v))
    dbias, sinks = (np.zeros(x, a.compute) for x in (packed.bias.shape, packed.q.shape[1::-1]))
    scale, rescale = packed.scale**power, packed.rescale**power
    shape = (*packed.q.shape[:2], packed.v.shape[2])
    dout = _like("dout", dout, packed.unpack(np.empty(shape), packed.shape_q))
    if dlse is not None:
        dlse = _like("dlse", dlse, packed.unpack_lse(np.empty(packed.q.shape[1::-1])))
    dout, dlse = packed.pack(dout), packed.pack_lse(dlse)
    for at in packed.blocks():
        q, k, v = packed.load(at, a.compute)
        do, dl = (x.astype(a.compute) for x in (dout[at.rows, at.h], dlse[at.h, at.rows]))
        s, dcap = _scores(packed, at, q, k, a)
        visible, p, _, sink = _softmax(s, packed.sink[at.h])
        if a.store is not None:
            p, sink = _recomputed(packed, at, q, k, a, s, sink)
        keep = packed.keep(at)
        pz = a.round(p) * keep
        dp = np.where(visible, keep * (do @ v.T) * packed.rescale, 0)
        delta = (p * dp).sum(axis=1)
        if a.store is not None:
            out = _visible_sum(pz, v, visible, a) * packed.rescale
            delta = (do * a.round(out)).sum(axis=1)
        row = dl - delta
        ds = np.where(visible, p * (dp + row[:, None]), 0)
        if power == 2:
            row = np.sqrt(dl**2 + delta**2)
            ds = np.where(visible, p * np.sqrt(dp**2 + row[:, None] ** 2), 0)
        dt = a.round(np.where(visible, ds * dcap, 0))
        dv[at.keys, at.h_k] += _visible_sum(pz.T, do, visible.T, a, power) * rescale
        dq[at.rows, at.h] = _visible_sum(dt, k, visible, a, power) * scale
        dk[at.keys, at.h_k] += _visible_sum(dt.T, q, visible.T, a, power) * scale
        sinks[at.h, at.rows] += (sink * row) ** power
        tile = at.tile(dbias)
        broadcast = tuple(axis for axis in (0, 1) if tile.shape[axis] == 1)
        tile += (ds**power).sum(axis=broadcast, keepdims=True)
    dsink = sinks.sum(axis=1)
    if power == 2:
        dq, dk, dv, dbias, dsink = (np.sqrt(grad) for grad in (dq, dk, dv, dbias, dsink))
    o = packed.options
    grads = Gradients(
        packed.unpack(dq, packed.shape_q),
        packed.unpack(dk, packed.shape_k),
        packed.unpack(dv, packed.shape_k),
        None if o.attn_bias is None else dbias.reshape(np.shape(o.attn_bias)),
        None if o.learnable_sink is None else dsink,
    )
    return grads, sinks


def _like(name: str, x: Any, like: np.ndarray) -> np.ndarray:
    """Return a gradient as an array of the shape of what it belongs to."""
    array = operand(name, x)
    if array.shape != like.shape:
        raise InvalidArgument(f"`{name}` must have shape {like.shape}, got {array.shape}")
    return array


def _scores(
    packed: Packed, at: Block, q: np.ndarray, k: np.ndarray, a: Arithmetic
) -> tuple[np.ndarray, Any]:
    """Return s and dc/dt."""
    o, X = packed.options, a.compute
    s, dcap = X(packed.scale) * (q[:, a.order] @ k[:, a.order].T), X(1)
    if o.softcap:
        tanh = np.tanh(s / X(o.softcap))
        s, dcap = X(o.softcap) * tanh, 1 - tanh**2
    distance = (np.array(at.i, float) + at.diagonal)[:, None] - np.arange(at.len_k)
    if o.alibi_slopes is not None:
        s = s - X(packed.slopes[at.b, at.h]) * np.abs(distance).astype(X)
    s = s + at.tile(packed.bias).astype(X)
    sides = o.window_size or (None, None)
    left, right = (math.inf if n in (None, -1) else min(n, 2**53) for n in sides)
    right = min(right, 0) if o.causal else right
    seen = (-right <= distance) & (distance <= left) & at.tile(packed.mask) & packed.sees(at)
    return np.where(seen, s, X(-np.inf)), dcap


def _softmax(s: np.ndarray, sink: Any) -> tuple[np.ndarray, ...]:
    """Return which pairs are visible, their P, the lse and the sink's weight."""
    visible, sink = s != -np.inf, s.dtype.type(sink)
    m = np.maximum(s.max(axis=1, initial=-np.inf), sink)
    m = np.where(m == -np.inf, 0, m)  # a row that sees nothing and has no sink
    e, e_sink = np.exp(s - m[:, None]), np.exp(sink - m)
    total = e.sum(axis=1) + e_sink
    safe = np.where(total == 0, 1, total)
    # Of a row that sees nothing, the sink is all, even where it is no finite number.
    blind = ~visible.any(axis=1)
    lse = np.where(blind, sink, m + np.log(total))
    e_sink = np.where(blind, sink != -np.inf, e_sink / safe)
    return visible, np.where(visible, e / safe[:, None], 0), lse, e_sink


def _recomputed(
    packed: Packed, at: Block, q: np.ndarray, k: np.ndarray, a: Arithmetic, s: np.ndarray, sink: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return P and the sink's weight by an lse, of a forward pass whose scores rounded otherwise.

    `sink` is the weight without that; it stays in rows that see nothing.
    """
    other = a._replace(order=slice(None, None, -(a.order.step or 1)))
    visible, _, lse, _ = _softmax(_scores(packed, at, q, k, other)[0], packed.sink[at.h])
    weight = np.exp(s.dtype.type(packed.sink[at.h]) - lse)
    p = np.where(visible, np.exp(s - lse[:, None]), 0)
    return p, np.where(visible.any(axis=1), weight, sink)


def _visible_sum(
    weights: np.ndarray, values: np.ndarray, visible: np.ndarray, a: Arithmetic, power: int = 1
) -> np.ndarray:
    """Return ``weights**power @ values**power``, over the visible pairs alone."""
    if power != 1:
        weights, values = weights**power, values**power
    finite = np.isfinite(values).all(axis=1)
    clean = np.where(finite[:, None], values, 0)
    total = np.zeros((len(weights), values.shape[1]), a.compute)
    for first in range(0, len(values), a.chunk):
        part = slice(first, first + a.chunk)
        total += weights[:, part][:, a.order] @ clean[part][a.order]
    for j in np.flatnonzero(~finite):  # 0 * nan is nan: these rows count where they are visible
        total += np.where(visible[:, j, None], weights[:, j, None] * values[j], 0)
    return total


def _cast(x: np.ndarray, dtype: Any) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x.astype(dtype)
