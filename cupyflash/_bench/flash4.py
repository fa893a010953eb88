"""FlashAttention-4: its call, and the scores that it is given as functions in the CuTe DSL."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from .case import Case
from .refusals import refuse_dtypes
from .runner import Arrays, Runner, first, torch_arrays, torch_clock, torch_operand

FEATURES = ("softcap", "alibi", "bias", "sink", "packed")


def fa4(case: Case, arrays: Arrays, device: str) -> Runner:
    """Build FlashAttention-4; each kind of call is compiled at its first, in some seconds."""
    interface = importlib.import_module("flash_attn.cute.interface")
    refuse_dtypes(case, "bf16", "fp16")
    place = functools.partial(torch_operand, device=device)
    options: dict[str, Any] = {"causal": case.mask == "causal"}
    if "window_size" in case.options:
        options["window_size"] = tuple(None if w < 0 else w for w in case.options["window_size"])
    # `softcap` and `learnable_sink` have our names; the others are functions of a score.
    for name, value in case.modified.arguments(case, place).items():
        if name in SCORES:
            options |= {"score_mod": SCORES[name](), "aux_tensors": [value]}
        else:
            options[name] = value
    function = interface.flash_attn_func
    if case.lengths:
        function = interface.flash_attn_varlen_func
        options |= case.packing(place)
    call = functools.partial(function, *torch_arrays(arrays, device), **options)
    return Runner(call, torch_clock(device), first)


def alibi() -> Callable:
    """Return ALiBi under a causal mask, where the distance is never negative."""
    cutlass, cute = (importlib.import_module(name) for name in ("cutlass", "cutlass.cute"))

    @cute.jit
    def score_mod(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        (slopes,) = aux_tensors
        return score - slopes[h[0]] * (q_idx - kv_idx).to(cutlass.Float32)

    return score_mod


def bias() -> Callable:
    """Return the bias of a query and a key, the same for all heads and batch entries."""
    cutlass, cute = (importlib.import_module(name) for name in ("cutlass", "cutlass.cute"))

    @cute.jit
    def score_mod(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        (bias,) = aux_tensors
        return score + bias[0, 0, q_idx[0], kv_idx[0]].to(cutlass.Float32)

    return score_mod


SCORES = {"alibi_slopes": alibi, "attn_bias": bias}
