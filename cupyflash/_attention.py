"""The public functions, with their documentation; what they do is elsewhere."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from . import _explain, _kernels, _torch, _versions
from ._call import call
from ._explain import Explanation
from ._kernels import KernelInfo
from ._problem import Form, forms
from ._scalars import architecture, drawn_state, hint, integer
from .masks import Mask

if TYPE_CHECKING:
    from ._emulator import Session

__all__ = [
    "attention",
    "attention_varlen",
    "emulate",
    "explain",
    "kernels",
    "show_versions",
    "supports",
    "warmup",
]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
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
    seqused_q: Any = None,
    seqused_k: Any = None,
    learnable_sink: Any = None,
    dropout_p: float = 0.0,
    rng_state: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    out: Any = None,
    deterministic: bool = False,
    kernel: str | None = None,
) -> Any:
    """Compute exact attention, ``softmax(scale * q k^T) v``, without ever storing the scores.

    Arrays of PyTorch, JAX, CuPy or NumPy, or of any library that exports DLPack, go in; the result
    is of the same library, on the same device. Arrays on a GPU are computed there, on the caller's
    current stream; arrays in host memory by the CPU path.

    Parameters
    ----------
    q : array (batch, len_q, heads_q, head_dim)
        Queries: float16, bfloat16 or float32; in host memory also float64. On Hopper and in host
        memory also float8_e4m3fn and float8_e5m2.
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
    window_size : (left, right) or None
        Query i sees the keys ``i + d - left <= j <= i + d + right``; a side of -1 or None is
        unbounded, and None instead of a pair is both.
    alignment : {"bottom_right", "top_left"}
        Which corner of the score matrix the diagonal ends or begins in.
    softcap : float
        If not 0, scores become ``softcap * tanh(score / softcap)``.
    alibi_slopes : float32 array (heads_q,) or (batch, heads_q), optional
        Adds ``-slope * abs(i + d - j)`` to the scores.
    attn_bias : float array, optional
        Added to the scores; broadcastable to (batch, heads_q, len_q, len_k).
    attn_mask : bool array, optional
        True where a query sees a key; broadcastable likewise. All masks intersect.
    mask : Mask, optional
        One of `cupyflash.masks`, or several combined with ``&``; each has a diagonal of its own.
    segment_ids : integer array (batch, length) or pair of arrays, optional
        A query sees the keys of its own segment; a pair has the ids of queries and of keys, of one
        dtype. Ids may come in any order; where each segment is in one piece, blocks of keys of
        others are left out.
    seqused_q, seqused_k : integer array (batch,), optional
        Lengths in use of each batch entry; what lies beyond never influences anything. On the host
        or on the GPU: values of the host are checked and copied, others are clipped to what is
        there. The same holds for the arrays of masks.
    learnable_sink : float array (heads_q,), optional
        A logit of each head that takes its share of the softmax and adds nothing to the output.
    dropout_p : float
        Probability that an attention weight is dropped.
    rng_state : (seed, offset) or integer array, optional
        Of the dropout; the same state gives the same mask (see `dropout_mask`). PyTorch draws one
        from its generator where it is None; elsewhere dropout needs it, from JAX for example
        ``jax.random.key_data(key)``.
    q_descale, k_descale, v_descale : float or float32 array, optional
        What fp8 inputs are multiplied by; arrays are broadcastable to (batch, heads_k), and
        ``q_descale`` is of the query heads that share a head of k.
    layout : {"bshd", "bhsd"}
        The order of dimensions of q, k, v and out; "bhsd" is (batch, heads, length, head_dim).
    return_lse : bool
        Whether to return also the log-sum-exp of the scores.
    out : array, optional
        Where to write the output, instead of into a new array.
    deterministic : bool
        Whether gradients must have the same bits whenever they are computed; the output always has.
    kernel : str, optional
        Name of the kernel to use, one of `kernels`.

    Returns
    -------
    out : array (batch, len_q, heads_q, head_dim_v)
        In q's layout and dtype, bfloat16 for fp8. A query that sees no key gets 0.
    lse : array (batch, heads_q, len_q)
        Only with ``return_lse``: natural logarithm, float32 (float64 if q is); -inf where a query
        sees no key.

    Raises
    ------
    InvalidArgument, InvalidType
        An argument is wrong; the message says what was expected.
    UnsupportedProblem
        No kernel computes this on this device; the message gives each kernel's reason.

    Notes
    -----
    Nothing waits for the GPU. A CUDA graph may capture a call whose kernel is loaded, by `warmup`
    or an earlier call of its kind. What it captures owns a counter of the tiles of its output, so
    that different captures may run at once; instances of one graph must run one after the other.
    """
    if window_size is None:
        window_size = (-1, -1)
    if rng_state is None and (dropout_p.__class__ is not float or dropout_p):
        rng_state = drawn_state(q, dropout_p)
    extras: dict[str, Any] = {}
    masks: tuple[Form, ...] = ()
    if not (
        alibi_slopes is None
        and attn_bias is None
        and attn_mask is None
        and mask is None
        and segment_ids is None
        and seqused_q is None
        and seqused_k is None
        and learnable_sink is None
        and rng_state is None
        and q_descale is None
        and k_descale is None
        and v_descale is None
    ):
        named = {
            "alibi_slopes": alibi_slopes,
            "attn_bias": attn_bias,
            "attn_mask": attn_mask,
            "seqused_q": seqused_q,
            "seqused_k": seqused_k,
            "learnable_sink": learnable_sink,
            "rng_state": rng_state,
            "q_descale": q_descale,
            "k_descale": k_descale,
            "v_descale": v_descale,
        }
        extras = {name: value for name, value in named.items() if value is not None}
        if not (mask is None and segment_ids is None):
            masks, arrays = forms(mask, segment_ids)
            extras |= arrays
    scalars = (
        softmax_scale, causal, window_size, alignment, softcap, dropout_p, layout, deterministic,
        kernel,
    )  # fmt: skip
    result = call(q, k, v, out, return_lse, scalars, extras, masks)
    if result is NotImplemented:
        return _torch.attention(q, k, v, out, return_lse, scalars, extras, masks)
    return result


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    alignment: str = "bottom_right",
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    attn_bias: Any = None,
    attn_mask: Any = None,
    mask: Mask | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    learnable_sink: Any = None,
    dropout_p: float = 0.0,
    rng_state: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    return_lse: bool = False,
    out: Any = None,
    deterministic: bool = False,
    kernel: str | None = None,
) -> Any:
    """Compute `attention` of sequences that lie one after the other, each with its own keys.

    Sequence b has the rows from ``cu_seqlens_q[b]`` up to ``cu_seqlens_q[b + 1]`` of q and of the
    output, and likewise of k and v; either may be none. What is not explained here is as in
    `attention`, where a batch entry is a sequence.

    Parameters
    ----------
    q : array (total_q, heads_q, head_dim)
        Queries.
    k : array (total_k, heads_k, head_dim)
        Keys.
    v : array (total_k, heads_k, head_dim_v)
        Values.
    cu_seqlens_q, cu_seqlens_k : integer array (batch + 1,)
        Where the sequences begin, and where the last ends. Lists or arrays of the host are checked
        and copied; values on the GPU are never read by the host, and clipped to what is there.
    max_seqlen_q, max_seqlen_k : int, optional
        Hints, of which no result depends: no sequence is cut there.
    softmax_scale, causal, window_size, alignment, softcap
        As in `attention`; the diagonal is that of each sequence.
    alibi_slopes : float32 array (heads_q,) or (batch, heads_q), optional
        As in `attention`.
    attn_bias : float array, optional
        Added to the scores, by position in the sequence: (batch, heads_q, longest_q, longest_k),
        where each size may be 1, and the last two may be larger. What a score beyond
        its end is given is not defined.
    attn_mask : bool array, optional
        True where a query sees a key; by position likewise.
    mask : Mask, optional
        As in `attention`; ``Segments`` are by position in the sequence.
    seqused_q, seqused_k : integer array (batch,), optional
        How many rows of each sequence are in use, its first ones.
    learnable_sink, dropout_p, rng_state, q_descale, k_descale, v_descale
        As in `attention`.
    return_lse : bool
        Whether to return also the log-sum-exp of the scores.
    out : array, optional
        Where to write the output, instead of into a new array.
    deterministic : bool
        Whether gradients must have the same bits whenever they are computed; the output always has.
    kernel : str, optional
        Name of the kernel to use, one of `kernels`.

    Returns
    -------
    out : array (total_q, heads_q, head_dim_v)
        Rows that are of no sequence, or not in use, get 0.
    lse : array (heads_q, total_q)
        Only with ``return_lse``; -inf in those rows.

    Raises
    ------
    InvalidArgument, InvalidType, UnsupportedProblem
        As `attention` does.
    """
    hint("max_seqlen_q", max_seqlen_q)
    hint("max_seqlen_k", max_seqlen_k)
    if window_size is None:
        window_size = (-1, -1)
    if rng_state is None:
        rng_state = drawn_state(q, dropout_p)
    named = {
        "alibi_slopes": alibi_slopes,
        "attn_bias": attn_bias,
        "attn_mask": attn_mask,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
        "learnable_sink": learnable_sink,
        "rng_state": rng_state,
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
    }
    extras = {name: value for name, value in named.items() if value is not None}
    masks, arrays = forms(mask)
    extras |= arrays | {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    scalars = (
        softmax_scale, causal, window_size, alignment, softcap, dropout_p, "bshd", deterministic,
        kernel,
    )  # fmt: skip
    result = call(q, k, v, out, return_lse, scalars, extras, masks)
    if result is NotImplemented:
        return _torch.attention(q, k, v, out, return_lse, scalars, extras, masks)
    return result


def emulate(*, seed: int = 0, arch: int | str = 90) -> "AbstractContextManager[Session]":
    """Let the CUDA kernels compute arrays in host memory, on a GPU that is emulated.

    Inside of ``with cupyflash.emulate() as session:``, in this thread, `attention` takes the rows
    of the dispatch table that a GPU would take (those of the host where ``kernel=`` names them).
    Their CUDA sources are compiled by g++, which must be there, and run thread by thread, in an
    order and with a timing that are chosen to break kernels. That is thousands of times slower than
    a GPU, and meant for small arrays.

    Parameters
    ----------
    seed : int
        Chooses the order of blocks and threads, and when asynchronous copies arrive.
    arch : int or str
        Compute capability of the GPU, 90 or "sm_90" for 9.0.

    Returns
    -------
    context manager of Session
        ``session.stats`` says, for each kernel by name, what its launches did: bytes moved from
        global memory, matrix products, barriers.

    Raises
    ------
    DeviceUnavailable
        There is no g++.
    KernelFault
        From `attention`: a kernel did what it must not; the message names the line.
    """
    from . import _emulator

    return _emulator.session(integer("seed", seed), architecture(arch))


def explain(q: Any = None, k: Any = None, v: Any = None, **arguments: Any) -> Explanation:
    """Say which kernel a call of `attention` takes and with what resources, or why there is none.

    Parameters
    ----------
    q, k, v : array, optional
        The arrays of the call. Without them sizes describe it, and no GPU is needed.
    batch, len_q, len_k, heads_q, heads_k, head_dim, head_dim_v : int, optional
        The sizes: len_q and head_dim at least; batch and heads_q are 1 by default, and len_k,
        heads_k and head_dim_v follow the others. With ``cu_seqlens_q`` and ``cu_seqlens_k`` the
        batch is the number of sequences, and len_q and len_k are the rows of all of them.
    dtype : str or dtype, optional
        The element type, bfloat16 by default; only with sizes.
    arch : int, str or None, optional
        Compute capability of the GPU, 90 or "sm_90" for 9.0 (the default), or None for arrays in
        host memory; only with sizes.
    backward : bool, optional
        Whether to speak of the gradients of the call, as `attention_backward` computes them.
    **arguments : object
        Options as `attention` and `attention_varlen` take them; with sizes, True stands for an
        optional array, also for those of a mask: ``PrefixLM(True)``, ``Segments(True)``.

    Returns
    -------
    Explanation
        Its ``str`` is a page for people.
    """
    return _explain.explain(_explain.resolve((q, k, v), *_explain.split(arguments)))


def supports(q: Any = None, k: Any = None, v: Any = None, **arguments: Any) -> bool:
    """Return whether some kernel computes a call of `attention`, or its gradients.

    Parameters
    ----------
    q, k, v : array, optional
        The arrays of the call.
    **arguments : object
        Sizes, dtype, arch, options and ``backward``, as `explain` takes them.

    Returns
    -------
    bool
        False where the call would raise UnsupportedProblem; wrong arguments raise here too.
    """
    return _explain.supports((q, k, v), arguments)


def warmup(q: Any = None, k: Any = None, v: Any = None, **arguments: Any) -> None:
    """Compile and load the kernel of a call of `attention`, so that a graph capture may contain it.

    One kernel serves every batch and number of heads and all scales above 0; on Hopper one serves
    all lengths up to 512 under a mask and one all others, elsewhere one serves every length.

    Parameters
    ----------
    q, k, v : array, optional
        The arrays of the call.
    device : int, optional
        CUDA ordinal of the GPU, 0 by default; only with sizes.
    **arguments : object
        Sizes, dtype, options and ``backward``, as `explain` takes them; sizes mean C-contiguous
        arrays. With ``backward=True`` the kernels of the gradients alone are loaded.
    """
    _explain.warmup((q, k, v), arguments)


def kernels() -> tuple[KernelInfo, ...]:
    """Return the rows of the dispatch table, best first: their names are what ``kernel=`` takes.

    Returns
    -------
    tuple of KernelInfo
        Of each its name, operation, architectures, and what it needs.
    """
    return tuple(kernel.info for kernel in _kernels.KERNELS)


def show_versions() -> None:
    """Print the versions of all that a result may depend on, for a bug report."""
    print(_versions.report())
