"""Calls of attention on tensors, which graphs and operators of PyTorch must hold as they are."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyflash.masks import Band, PrefixLM, Segments

torch = pytest.importorskip("torch")

LENGTH = 9
IDS = torch.arange(LENGTH) // 4

# Arguments beside q, k and v of (2, LENGTH, 2, 8), or what its name says.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"causal": True, "softmax_scale": 0.7},
    "window": lambda: {"window_size": [3, None], "alignment": "top_left"},
    "softcap": lambda: {"softcap": 1.5, "deterministic": True, "kernel": "cpu"},
    "heads_first": lambda: {"layout": "bhsd", "causal": True},
    "dropout": lambda: {"dropout_p": 0.5, "rng_state": (2**64 - 1, 3)},
    "drawn": lambda: {"dropout_p": 0.5},
    "alibi": lambda: {"alibi_slopes": torch.tensor([0.5, 0.1])},
    "mask": lambda: {"attn_mask": torch.arange(81).reshape(9, 9) % 3 > 0},
    "seqused": lambda: {"seqused_k": torch.tensor([3, 9]), "seqused_q": [2, 9]},
    "band": lambda: {"mask": Band(2, None, alignment="top_left"), "causal": True},
    "prefix": lambda: {"mask": PrefixLM(np.array([1, 4]), alignment="top_left")},
    "number": lambda: {"mask": PrefixLM(3)},
    "segments": lambda: {"segment_ids": IDS},
    "pair": lambda: {"segment_ids": (IDS, IDS.flip(0))},
    "masks": lambda: {"mask": PrefixLM([1, 4]) & Segments(IDS) & Band(5, 3), "segment_ids": IDS},
}


def inputs(*shape: int, **options: Any) -> tuple[Any, Any, Any]:
    """Return q, k and v that want a gradient."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(shape or (2, LENGTH, 2, 8), generator=generator) for _ in range(3)]
    q, k, v = (x.to(**options).requires_grad_() for x in draws)
    return q, k, v


def inputs_for(name: str) -> tuple[Any, Any, Any]:
    """Return them for a name of `OPTIONS`."""
    return inputs(2, 2, LENGTH, 8) if name == "heads_first" else inputs()


def same_results(first: Callable[..., Any], second: Callable[..., Any], *arrays: Any) -> None:
    """Assert that two functions have the same bits, strides and gradients, from the same seed."""
    found = []
    for function in (first, second):
        torch.manual_seed(5)
        results = function(*arrays)
        results = results if isinstance(results, tuple) else (results,)
        wanted = [x for x in arrays if x.requires_grad]
        loss = sum(x[x.isfinite()].square().sum() for x in results)
        found.append([*results, *torch.autograd.grad(loss, wanted)])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)
        assert (x.dtype, x.device, x.stride()) == (y.dtype, y.device, y.stride())
