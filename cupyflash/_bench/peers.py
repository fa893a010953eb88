"""The peers: every other implementation that cupyflash is timed against, one small builder each.

A builder raises `Unfit` with a sentence where the peer cannot compute the case, and ImportError
where it is not installed. All take arrays that lie as (batch, length, heads, head_dim); those who
want the heads first get a transposed view, so that nobody pays for a copy.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidArgument
from .case import Case
from .runner import (
    Arrays,
    Runner,
    Unfit,
    clock,
    first,
    torch_arrays,
    torch_clock,
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
    if backend == "EFFICIENT_ATTENTION" and case.heads_q != case.heads_k:
        raise Unfit("the memory-efficient backend takes no grouped heads")
    q, k, v = (x.transpose(1, 2) for x in torch_arrays(arrays, device))
    causal, grouped = case.mask == "causal", case.heads_q != case.heads_k

    def call() -> Any:
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=grouped
        )

    def context() -> contextlib.AbstractContextManager:
        return sdpa_kernel(getattr(SDPBackend, backend)) if backend else contextlib.nullcontext()

    return Runner(
        call,
        torch_clock(device),
        lambda out: out.transpose(1, 2),
        context,
    )


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


def flex(case: Case, arrays: Arrays, device: str) -> Runner:
    """Build torch's compiled FlexAttention with the band as its block mask."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (x.transpose(1, 2) for x in torch_arrays(arrays, device))
    band, diagonal = case.band, case.band.diagonal(case.len_q, case.len_k)
    left = case.len_q + case.len_k if band.left is None else band.left
    right = case.len_q + case.len_k if band.right is None else band.right

    def sees(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j >= i + diagonal - left) & (j <= i + diagonal + right)

    block_mask = None
    if case.mask != "full":
        block_mask = create_block_mask(sees, None, None, case.len_q, case.len_k, device=device)
    call = functools.partial(
        torch.compile(flex_attention),
        q,
        k,
        v,
        block_mask=block_mask,
        enable_gqa=case.heads_q != case.heads_k,
    )
    return Runner(call, torch_clock(device), lambda out: out.transpose(1, 2))


# --- others ---


def fa3(case: Case, arrays: Arrays, device: str) -> Runner:
    """Build FlashAttention-3 (the fa3-fwd wheel: bf16 and fp8, no windows)."""
    importlib.import_module("fa3_fwd._C")  # registers the operators that the interface calls
    interface = importlib.import_module("fa3_fwd_interface")
    refuse_windows(case)
    refuse_dtypes(case, "bf16", "e4m3")
    call = functools.partial(
        interface.flash_attn_func,
        *torch_arrays(arrays, device),
        causal=case.mask == "causal",
    )
    return Runner(call, torch_clock(device), first)


def fa4(case: Case, arrays: Arrays, device: str) -> Runner:
    """Build FlashAttention-4 (CuTe DSL)."""
    interface = importlib.import_module("flash_attn.cute.interface")
    refuse_dtypes(case, "bf16", "fp16")
    options: dict[str, Any] = {"causal": case.mask == "causal"}
    if "window_size" in case.options:
        options["window_size"] = tuple(None if w < 0 else w for w in case.options["window_size"])
    call = functools.partial(interface.flash_attn_func, *torch_arrays(arrays, device), **options)
    return Runner(call, torch_clock(device), first)


def flashinfer(case: Case, arrays: Arrays, device: str) -> Runner:
    """Build FlashInfer's ragged prefill over sequences of one length."""
    import torch

    library = importlib.import_module("flashinfer")
    refuse_windows(case)
    refuse_dtypes(case, "bf16", "fp16")
    q, k, v = (x.flatten(0, 1) for x in torch_arrays(arrays, device))
    ends = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        ends * case.len_q,
        ends * case.len_k,
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
        lambda out: first(out).unflatten(0, (case.batch, case.len_q)),
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


# --- what peers refuse ---


def refuse_windows(case: Case) -> None:
    """Refuse a window on behalf of a peer that has none."""
    if case.mask not in ("full", "causal"):
        raise Unfit("it has no sliding windows")


def refuse_rectangular_causal(case: Case) -> None:
    """Refuse a causal mask whose diagonal the peer puts elsewhere."""
    if case.mask == "causal" and case.len_q != case.len_k and case.alignment != "top_left":
        raise Unfit("its causal mask is aligned to the top left")


def refuse_dtypes(case: Case, *taken: str) -> None:
    """Refuse a dtype that is not among those the peer takes."""
    if case.dtype not in taken:
        raise Unfit(f"it takes {' and '.join(taken)}, not {case.dtype}")


def _torch(backend: str | None) -> Callable[[Case, Arrays, str], Runner]:
    return functools.partial(sdpa, backend)


_GPU, _BOTH = ("cuda",), ("cuda", "cpu")
_TABLE = (
    # name, about, modules, devices, builder
    ("fa2", "FlashAttention-2 in torch's SDPA", ("torch",), _GPU, _torch("FLASH_ATTENTION")),
    ("cudnn", "cuDNN in torch's SDPA", ("torch",), _GPU, _torch("CUDNN_ATTENTION")),
    (
        "efficient",
        "mem-efficient SDPA of torch",
        ("torch",),
        _GPU,
        _torch("EFFICIENT_ATTENTION"),
    ),
    ("sdpa", "torch's SDPA, its own choice", ("torch",), _BOTH, _torch(None)),
    ("fa3", "FlashAttention-3", ("fa3_fwd", "fa3_fwd_interface"), _GPU, fa3),
    ("fa4", "FlashAttention-4", ("flash_attn.cute",), _GPU, fa4),
    ("flashinfer", "FlashInfer's ragged prefill", ("flashinfer",), _GPU, flashinfer),
    ("flex", "FlexAttention under torch.compile", ("torch",), _GPU, flex),
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
