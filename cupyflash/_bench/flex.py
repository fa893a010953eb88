"""torch's FlexAttention, compiled: masks as block masks, scores as functions of a score."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .case import Case
from .modifiers import Documents, Prefix
from .runner import Arrays, Runner, Unfit, torch_arrays, torch_clock, torch_operand

WORDS = 300  # of a reason, in letters
FEATURES = ("softcap", "alibi", "bias", "mask", "sink", "documents", "prefix", "packed")


def flex(case: Case, arrays: Arrays, device: str) -> Runner:
    """Build FlexAttention; packed sequences are documents of one long sequence."""
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    q, k, v = (
        (x[None] if case.lengths else x).transpose(1, 2) for x in torch_arrays(arrays, device)
    )
    place = functools.partial(torch_operand, device=device)
    operands = case.modified.arguments(case, place)
    options: dict[str, Any] = {
        "score_mod": score_mod(case, operands),
        "block_mask": None,
        "enable_gqa": case.heads_q != case.heads_k,
    }
    if (sees := mask_mod(case, operands, place)) is not None:
        batch = case.batch if "documents" in case.features else None
        sizes = q.shape[2], k.shape[2]
        options["block_mask"] = create_block_mask(sees, batch, None, *sizes, device=device)
    sink: Any = operands.get("learnable_sink")

    def attend(q: Any, k: Any, v: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise Unfit("torch.compile leaves it to run as it is written")
        if sink is None:
            return flex_attention(q, k, v, **options)
        out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
        return out * torch.sigmoid(aux.lse - sink[:, None])[..., None].to(out.dtype)

    compiled = compile_whole(attend)
    try:
        compiled(q, k, v)
    except torch._dynamo.exc.Unsupported as reason:
        words = " ".join(str(reason).split())
        raise Unfit(f"torch.compile does not take it whole: {words[:WORDS]}") from None
    return Runner(
        functools.partial(compiled, q, k, v),
        torch_clock(device),
        lambda out: out.transpose(1, 2)[0] if case.lengths else out.transpose(1, 2),
    )


def compile_whole(function: Any) -> Callable:
    """Compile a function for the sizes of its first call; no part of it may run uncompiled.

    Dynamo keeps what it has compiled by code object, and gives up where one has eight sizes: each
    function has a copy of its code.
    """
    import torch

    function.__code__ = function.__code__.replace()
    return torch.compile(function, dynamic=False, fullgraph=True)


def score_mod(case: Case, operands: dict[str, Any]) -> Callable | None:
    """Return a case's score modifier as FlexAttention takes it, if it has one."""
    import torch

    d = case.band.diagonal(case.len_q, case.len_k)
    cap, slopes = operands.get("softcap"), operands.get("alibi_slopes")
    bias = operands.get("attn_bias")
    if cap is not None:
        return lambda score, b, h, i, j: cap * torch.tanh(score / cap)
    if slopes is not None:
        return lambda score, b, h, i, j: score - slopes[h] * (i + d - j).abs()
    if bias is not None:
        return lambda score, b, h, i, j: score + bias[0, 0, i, j]
    return None


def mask_mod(case: Case, operands: dict[str, Any], place: Callable) -> Callable | None:
    """Return a case's mask as FlexAttention takes it, None where everything is seen."""
    if isinstance(case.modified, Prefix):
        prefix = int(case.modified.value)
        return lambda b, h, i, j: (j < prefix) | (j <= i)
    parts: list[Callable] = []
    if case.mask != "full":
        parts.append(band(case))
    if "attn_mask" in operands:
        mask = operands["attn_mask"]
        parts.append(lambda b, h, i, j: mask[0, 0, i, j])
    if isinstance(case.modified, Documents):
        ids = operands["segment_ids"]
        parts.append(lambda b, h, i, j: ids[b, i] == ids[b, j])
    if case.lengths:
        sequences = place(np.repeat(np.arange(case.batch, dtype=np.int32), case.lengths))
        parts.append(lambda b, h, i, j: sequences[i] == sequences[j])
    if not parts:
        return None
    return functools.reduce(both, parts)


def both(one: Callable, other: Callable) -> Callable:
    """Return the intersection of two masks."""
    return lambda b, h, i, j: one(b, h, i, j) & other(b, h, i, j)


def band(case: Case) -> Callable:
    """Return the case's band; packed sequences, which are square, lie on the diagonal."""
    band, d = case.band, case.band.diagonal(case.len_q, case.len_k)
    everything = case.len_q + case.len_k
    left = everything if band.left is None else band.left
    right = everything if band.right is None else band.right
    return lambda b, h, i, j: (j >= i + d - left) & (j <= i + d + right)
