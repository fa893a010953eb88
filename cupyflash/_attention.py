"""The public functions, with their documentation; what they do is elsewhere."""

from typing import Any

from ._call import call

__all__ = ["attention"]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    alignment: str = "bottom_right",
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    attn_bias: Any = None,
    attn_mask: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    learnable_sink: Any = None,
    dropout_p: float = 0.0,
    rng_state: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    out: Any = None,
    kernel: str | None = None,
) -> Any:
    """Compute exact attention, ``softmax(scale * q k^T) v``, without ever storing the scores.

    Arrays of PyTorch, JAX, CuPy or NumPy, or of any library that exports DLPack, go in; the result
    is of the same library, on the same device. Arrays on a GPU are computed there, on the caller's
    current stream; arrays in host memory by the CPU path.

    Parameters
    ----------
    q : array (batch, len_q, heads_q, head_dim)
        Queries: float16, bfloat16 or float32; in host memory also float64.
    k : array (batch, len_k, heads_k, head_dim)
        Keys. ``heads_q`` is a multiple of ``heads_k``; query head h reads head
        ``h // (heads_q // heads_k)``.
    v : array (batch, len_k, heads_k, head_dim_v)
        Values.
    softmax_scale : real number, optional
        Factor of the scores; ``1 / sqrt(head_dim)`` by default.
    causal : bool
        Whether query i sees only the keys ``j <= i + d``. The diagonal d is
        ``len_k - len_q``, or 0 with ``alignment="top_left"``.
    window_size : (left, right)
        Query i sees the keys ``i + d - left <= j <= i + d + right``; -1 or None is unbounded.
    alignment : {"bottom_right", "top_left"}
        Which corner of the score matrix the diagonal ends or begins in.
    softcap : float
        If not 0, scores become ``softcap * tanh(score / softcap)``.
    alibi_slopes : float32 array (heads_q,) or (batch, heads_q), optional
        Adds ``-slope * abs(i + d - j)`` to the scores.
    attn_bias : float array, optional
        Added to the scores; broadcastable to (batch, heads_q, len_q, len_k).
    attn_mask : bool array, optional
        True where a query sees a key; broadcastable likewise.
    seqused_q, seqused_k : integer array (batch,), optional
        Lengths in use of each batch entry; what lies beyond never influences anything.
    learnable_sink : float array (heads_q,), optional
        A logit of each head that takes its share of the softmax and adds nothing to the output.
    dropout_p : float
        Probability that an attention weight is dropped.
    rng_state : (seed, offset) or integer array, optional
        Of the dropout; the same state gives the same mask (see `dropout_mask`).
    layout : {"bshd", "bhsd"}
        The order of dimensions of q, k, v and out; "bhsd" is (batch, heads, length, head_dim).
    return_lse : bool
        Whether to return also the log-sum-exp of the scores.
    out : array, optional
        Where to write the output, instead of into a new array.
    kernel : str, optional
        Name of the kernel to use, one of `kernels`.

    Returns
    -------
    out : array (batch, len_q, heads_q, head_dim_v)
        In q's layout and dtype. A query that sees no key gets 0.
    lse : array (batch, heads_q, len_q)
        Only with ``return_lse``: natural logarithm, float32 (float64 if q is); -inf where a query
        sees no key.

    Raises
    ------
    InvalidArgument, InvalidType
        An argument is wrong; the message says what was expected.
    UnsupportedProblem
        No kernel computes this on this device; the message gives each kernel's reason.
    """
    extras = {}
    if not (
        alibi_slopes is None
        and attn_bias is None
        and attn_mask is None
        and seqused_q is None
        and seqused_k is None
        and learnable_sink is None
        and rng_state is None
    ):
        named = {
            "alibi_slopes": alibi_slopes,
            "attn_bias": attn_bias,
            "attn_mask": attn_mask,
            "seqused_q": seqused_q,
            "seqused_k": seqused_k,
            "learnable_sink": learnable_sink,
            "rng_state": rng_state,
        }
        extras = {name: value for name, value in named.items() if value is not None}
    scalars = (
        softmax_scale, causal, window_size, alignment, softcap, dropout_p, layout, kernel
    )  # fmt: skip
    return call(q, k, v, out, return_lse, scalars, extras)
