"""The peers: every other implementation that cupyflash is timed against, one small builder each.

A builder raises `Unfit` with a sentence where the peer cannot compute the case, and ImportError
where it is not installed. All take arrays that lie as (batch, length, heads, head_dim), or packed
as (total, heads, head_dim); those who want the heads first get a transposed view, so that nobody
pays for a copy. FlexAttention and FlashAttention-4 have files of their own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InvalidArgument
from . import flash4, flex
from .case import Case
from .modifiers import Dropout, Softcap
from .refusals import (
    refuse_dtypes,
    refuse_grouped,
    refuse_lacking,
    refuse_rectangular_causal,
    refuse_windows,
)
from .runner import (
    Arrays,
    Runner,
    clock,
    first,
    torch_arrays,
    torch_clock,
    torch_operand,
    torch_sees_gpu,
)


@dataclass(frozen=True)
class Peer:
    """An implementation that a benchmark may name."""

    name: str
    about: str
    modules: tuple[str, ...]  # importable when it is installed
    devices: tuple[str, ...]  # "cuda", "cpu"
    build: Callable[[Case, Arrays, str], Runner]
    features: tuple[str, ...] = ()  # of `Case.features`: those that the builder knows

    def runner(self, case: Case, arrays: Arrays, device: str) -> Runner:
        """Build the peer's call on a case, or raise `Unfit` where it lacks a feature."""
        refuse_lacking(case, self.features)
        return self.build(case, arrays, device)

    def installed(self, device: str) -> bool:
        """Whether its modules can be found and, for a GPU, torch sees one; JAX says so itself."""
        try:
            found = all(importlib.util.find_spec(name) is not None for name in self.modules)
        except Exception:  # a parent package that is there, but broken
            return False
        return found and (device == "cpu" or self.name == "jax" or torch_sees_gpu())


# --- torch ---


def sdpa(backend: str | None, case: Case, arrays: Arrays, device: str) -> Runner:
    """Build torch's scaled_dot_product_attention, one backend forced or its own choice."""
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    refuse_windows(case)
    refuse_rectangular_causal(case)
    if backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        refuse_dtypes(case, "bf16", "fp16")
    if backend == "EFFICIENT_ATTENTION":
        refuse_grouped(case)
    if case.lengths:
        return torch_varlen(case, arrays, device)
    q, k, v = (x.transpose(1, 2) for x in torch_arrays(arrays, device))
    options = {"enable_gqa": case.heads_q != case.heads_k, **scores(case, device)}

    def context() -> contextlib.AbstractContextManager:
        return sdpa_kernel(getattr(SDPBackend, backend)) if backend else contextlib.nullcontext()

    return Runner(
        functools.partial(functional.scaled_dot_product_attention, q, k, v, **options),
        torch_clock(device),
        lambda out: out.transpose(1, 2),
        context,
        own_numbers="dropout_p" in options,
    )


def scores(case: Case, device: str) -> dict[str, Any]:
    """Return what SDPA is told of scores and masks: a bias or a mask takes the band into itself."""
    import torch

    if case.features <= {"dropout"}:
        found: dict[str, Any] = {"is_causal": case.mask == "causal"}
        if isinstance(case.modified, Dropout):
            found["dropout_p"] = case.modified.value
        return found
    (operand,) = case.modified.arguments(
        case, functools.partial(torch_operand, device=device)
    ).values()
    if case.mask == "full":
        return {"attn_mask": operand}
    seen = torch.from_numpy(case.band.dense(case.len_q, case.len_k)).to(device)
    masked = (
        operand & seen if operand.dtype == torch.bool else operand.masked_fill(~seen, -math.inf)
    )
    return {"attn_mask": masked}


def torch_varlen(case: Case, arrays: Arrays, device: str) -> Runner:
    """Build torch's varlen_attn, FlashAttention-2 on packed sequences."""
    varlen = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    refuse_grouped(case)
    causal = case.mask == "causal"
    options: dict[str, Any] = {"window_size": (-1, 0)} if causal else {}
    if "is_causal" in inspect.signature(varlen).parameters:  # torch 2.10
        options = {"is_causal": causal}
    ends = torch_operand(case.ends, device)
    call = functools.partial(
        varlen, *torch_arrays(arrays, device), ends, ends, case.len_q, case.len_k, **options
    )
    return Runner(call, torch_clock(device), first)


def eager(case: Case, arrays: Arrays, device: str) -> Runner:
    """Build the two matrix products and the softmax as written, the scores in memory."""
    import torch

    q, k, v = (x.transpose(1, 2) for x in torch_arrays(arrays, device))
    group = case.heads_q // case.heads_k
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    scale = 1 / math.sqrt(case.head_dim)
    hidden = None
    if case.mask != "full":
        hidden = torch.from_numpy(~case.band.dense(case.len_q, case.len_k)).to(device)

    def call() -> Any:
        scores = (q @ k.transpose(-1, -2)) * scale
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        return torch.softmax(scores, -1) @ v

    return Runner(call, torch_clock(device), lambda out: out.transpose(1, 2))


# --- others ---


def fa3(case: Case, arrays: Arrays, device: str) -> Runner:
    """Build FlashAttention-3 (the fa3-fwd wheel: bf16 and fp8, no windows)."""
    importlib.import_module("fa3_fwd._C")  # registers the operators that the interface calls
    interface = importlib.import_module("fa3_fwd_interface")
    refuse_windows(case)
    refuse_dtypes(case, "bf16", "e4m3")
    options: dict[str, Any] = {"causal": case.mask == "causal"}
    if isinstance(case.modified, Softcap):
        options["softcap"] = case.modified.value
    function = interface.flash_attn_func
    if case.lengths:
        function = interface.flash_attn_varlen_func
        options |= case.packing(functools.partial(torch_operand, device=device))
    call = functools.partial(function, *torch_arrays(arrays, device), **options)
    return Runner(call, torch_clock(device), first)


def flashinfer(case: Case, arrays: Arrays, device: str) -> Runner:
    """Build FlashInfer's ragged prefill; a dense batch is sequences of one length."""
    import torch

    library = importlib.import_module("flashinfer")
    refuse_windows(case)
    refuse_dtypes(case, "bf16", "fp16")
    q, k, v = torch_arrays(arrays, device)
    ends = np.arange(case.batch + 1, dtype=np.int32)
    ends_q, ends_k = ends * case.len_q, ends * case.len_k
    if case.lengths:
        ends_q = ends_k = case.ends
    else:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        torch_operand(ends_q, device),
        torch_operand(ends_k, device),
        case.heads_q,
        case.heads_k,
        case.head_dim,
        head_dim_vo=case.head_dim_v,
        causal=case.mask == "causal",
        q_data_type=q.dtype,
    )
    return Runner(
        functools.partial(wrapper.run, q, k, v),
        torch_clock(device),
        lambda out: first(out).reshape(case.out_shape),
    )


def jax_attention(case: Case, arrays: Arrays, device: str) -> Runner:
    """Build JAX's dot_product_attention under jit: cuDNN on a GPU, XLA on a CPU."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    refuse_windows(case)
    refuse_rectangular_causal(case)
    attend = jax.jit(
        functools.partial(
            jax.nn.dot_product_attention,
            is_causal=case.mask == "causal",
            implementation="xla" if device == "cpu" else "cudnn",
        )
    )
    place = jax.devices("cpu" if device == "cpu" else "gpu")[0]
    q, k, v = (jax.device_put(x, place) for x in arrays)
    return Runner(functools.partial(attend, q, k, v), clock("jax"), first)


def _torch(backend: str | None) -> Callable[[Case, Arrays, str], Runner]:
    return functools.partial(sdpa, backend)


_GPU, _BOTH = ("cuda",), ("cuda", "cpu")
_DENSE = ("dropout", "bias", "mask")
_TABLE = (
    # name, about, modules, devices, builder, features
    (
        "fa2",
        "FlashAttention-2 in torch's SDPA",
        ("torch",),
        _GPU,
        _torch("FLASH_ATTENTION"),
        ("dropout", "packed"),
    ),
    ("cudnn", "cuDNN in torch's SDPA", ("torch",), _GPU, _torch("CUDNN_ATTENTION"), _DENSE),
    (
        "efficient",
        "mem-efficient SDPA of torch",
        ("torch",),
        _GPU,
        _torch("EFFICIENT_ATTENTION"),
        _DENSE,
    ),
    ("sdpa", "torch's SDPA, its own choice", ("torch",), _BOTH, _torch(None), _DENSE),
    (
        "fa3",
        "FlashAttention-3",
        ("fa3_fwd", "fa3_fwd_interface"),
        _GPU,
        fa3,
        ("softcap", "packed"),
    ),
    ("fa4", "FlashAttention-4", ("flash_attn.cute",), _GPU, flash4.fa4, flash4.FEATURES),
    ("flashinfer", "FlashInfer's ragged prefill", ("flashinfer",), _GPU, flashinfer, ("packed",)),
    (
        "flex",
        "FlexAttention under torch.compile",
        ("torch",),
        _GPU,
        flex.flex,
        flex.FEATURES,
    ),
    ("jax", "jax.nn.dot_product_attention", ("jax",), _BOTH, jax_attention),
    ("eager", "softmax(Q K^T) V in torch, as written", ("torch",), _BOTH, eager),
)
PEERS = {row[0]: Peer(*row) for row in _TABLE}
# Named by --vs auto: no long compile at the first call, and none twice.
AUTO = {"cuda": ("fa2", "cudnn", "efficient", "fa3", "fa4"), "cpu": ("sdpa",)}


def choose(names: str, device: str) -> list[Peer]:
    """Return the peers of a comma list, or those installed for ``auto``, ``all`` and ``none``."""
    if names == "none":
        return []
    if names in ("auto", "all"):
        wanted = AUTO[device] if names == "auto" else tuple(PEERS)
        found = (PEERS[name] for name in wanted)
        return [peer for peer in found if device in peer.devices and peer.installed(device)]
    unknown = [name for name in names.split(",") if name not in PEERS]
    if unknown:
        expected = ", ".join(("auto", "all", "none", *PEERS))
        raise InvalidArgument(f"`vs` must name peers of {expected}, got {unknown[0]!r}")
    return [PEERS[name] for name in names.split(",")]
