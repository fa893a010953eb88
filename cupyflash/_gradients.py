"""The public functions that return gradients, with their documentation."""

import inspect
from collections.abc import Callable
from typing import Any

from . import _backward, _torch
from ._array import adapter_of
from ._attention import attention, attention_varlen
from ._kernels import backward_name
from ._problem import DESCALES, forms
from ._problem_backward import refuse_float8
from ._scalars import drawn_state, hint
from .errors import InvalidType
from .masks import Mask
from .reference import Gradients

__all__ = ["attention_backward", "attention_vjp"]


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    alignment: str = "bottom_right",
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    attn_bias: Any = None,
    attn_mask: Any = None,
    mask: Mask | None = None,
    segment_ids: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    learnable_sink: Any = None,
    dropout_p: float = 0.0,
    rng_state: Any = None,
    layout: str = "bshd",
    deterministic: bool = False,
    kernel: str | None = None,
) -> Gradients:
    """Compute the gradients of `attention` or `attention_varlen`, again without storing the scores.

    Arrays of any library go in, as for `attention`, and gradients of the same library come out.

    Parameters
    ----------
    dout : array like out
        The gradient of the loss by the output; any strides, also 0.
    q, k, v : array
        The inputs of the forward call; not of fp8.
    out, lse : array
        What it returned, with ``return_lse=True``.
    dlse : array like lse, optional
        The gradient of the loss by the log-sum-exp, where the loss depends on it.
    softmax_scale, causal, window_size, alignment, softcap, alibi_slopes, attn_bias, attn_mask, \
mask, segment_ids, seqused_q, seqused_k, learnable_sink, dropout_p, rng_state, layout
        As in the forward call. Dropout needs the random state.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        Those of `attention_varlen`, if that was the forward call.
    deterministic : bool
        Whether the same inputs must give the same bits whenever they are computed. Otherwise dq
        may differ in its last bits from call to call on a GPU.
    kernel : str, optional
        Name of the kernel to use, one of `kernels` of the operation "backward".

    Returns
    -------
    Gradients
        ``dq``, ``dk`` and ``dv`` in shape, dtype and order of dimensions of q, k and v; ``dbias``
        and ``dsink`` in shape and dtype of attn_bias and learnable_sink, or None without them.
        What reaches no output has a gradient of 0.

    Raises
    ------
    InvalidArgument, InvalidType, UnsupportedProblem
        As `attention` does.

    Notes
    -----
    On a GPU a call needs scratch memory, linear in the lengths, from the allocator of the arrays'
    library. That of a call which a CUDA graph captures belongs to the graph: PyTorch keeps it in
    the graph's pool, for other libraries it is kept until the process ends.
    """
    hint("max_seqlen_q", max_seqlen_q)
    hint("max_seqlen_k", max_seqlen_k)
    optional = {
        "dlse": dlse,
        "alibi_slopes": alibi_slopes,
        "attn_bias": attn_bias,
        "attn_mask": attn_mask,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
        "learnable_sink": learnable_sink,
        "rng_state": rng_state,
    }
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    arrays |= {name: x for name, x in optional.items() if x is not None}
    masks, own = forms(mask, segment_ids)
    if window_size is None:
        window_size = (-1, -1)
    scalars = (
        softmax_scale, causal, window_size, alignment, softcap, dropout_p, layout, deterministic,
        kernel,
    )  # fmt: skip
    return _backward.call(arrays | own, scalars, masks)


BOUNDS = ("cu_seqlens_q", "cu_seqlens_k")
NO_OPTIONS = {"q", "k", "v", "out", "return_lse", *DESCALES}


def attention_vjp(
    q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Any
) -> tuple[Any, Callable[..., Gradients]]:
    """Compute attention, and return with it the function from its gradient to those of the inputs.

    Parameters
    ----------
    q, k, v : array
        As `attention` takes them, but not of fp8; as `attention_varlen` does if cu_seqlens_q and
        cu_seqlens_k are among the options.
    return_lse : bool
        Whether to return also the log-sum-exp of the scores.
    **options : object
        The other options of that function, but ``out``. Dropout of PyTorch tensors draws its
        random state once, for both passes. ``kernel`` is of the forward pass, and of the backward
        pass too where it has one of that name.

    Returns
    -------
    out : array
        The output, or the pair (out, lse) with ``return_lse``.
    pullback : callable
        ``pullback(dout, dlse=None)`` returns the `Gradients`, as `attention_backward` does. It
        keeps the arrays that it needs, which must not be changed before it is called. What
        ``torch.autocast`` casts for the call is so for the pullback, wherever that is called.
    """
    options = {name: x for name, x in options.items() if name not in BOUNDS or x is not None}
    packed = any(name in options for name in BOUNDS)
    function = attention_varlen if packed else attention
    known = inspect.signature(function).parameters.keys() - NO_OPTIONS
    if unknown := options.keys() - known:
        raise InvalidType(
            f"`{min(unknown)}` is no option of attention_vjp: it takes those of "
            f"{function.__name__} but out and descales"
        )
    if packed:
        options = dict.fromkeys(BOUNDS) | options
    given = q, k, v
    if adapter_of(q, "q").framework == "torch":
        q, k, v = _torch.cast(q, k, v)
    low = q, k, v
    refuse_float8(str(getattr(q, "dtype", "")).removeprefix("torch."))
    if options.get("rng_state") is None:
        options["rng_state"] = drawn_state(q, options.get("dropout_p", 0.0))
    out, lse = function(q, k, v, return_lse=True, **options)
    name = backward_name(options.pop("kernel", None))

    def pullback(dout: Any, dlse: Any = None) -> Gradients:
        found = attention_backward(dout, q, k, v, out, lse, dlse=dlse, kernel=name, **options)
        dq, dk, dv = (
            gradient if x is cast else gradient.to(x.dtype)
            for gradient, x, cast in zip(found[:3], given, low, strict=True)
        )
        return found._replace(dq=dq, dk=dk, dv=dv)

    return ((out, lse) if return_lse else out), pullback
