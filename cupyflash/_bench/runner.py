"""One implementation ready to be called on one case; its arrays; and cupyflash's own.

A builder takes a `Case` and its inputs, and returns a `Runner`: a call without arguments on arrays
that are already where they belong.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._attention import attention
from .case import Case
from .timing import Call, CupyClock, HostClock, JaxClock, TorchClock

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


class Unfit(Exception):
    """The peer cannot compute this case; the text says why."""


@dataclass(frozen=True)
class Runner:
    """One implementation on one case, ready to be called."""

    call: Call
    clock: HostClock
    host: Callable[[Any], np.ndarray]  # the call's result as (batch, len_q, heads, head_dim_v)
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    options: dict[str, Any] = field(default_factory=dict)


# --- arrays on the device, made once per case ---


@functools.cache
def clock(name: str) -> HostClock:
    """Return the one clock of a kind; its flush buffer is large."""
    return {"torch": TorchClock, "cupy": CupyClock, "jax": JaxClock, "host": HostClock}[name]()


def torch_arrays(arrays: Arrays, device: str) -> list[Any]:
    """Copy NumPy arrays (bf16 as ml_dtypes) into torch tensors."""
    import torch

    def tensor(x: np.ndarray) -> Any:
        if x.dtype.name == "bfloat16":
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device)
        return torch.from_numpy(x).to(device)

    return [tensor(x) for x in arrays]


@functools.cache
def torch_sees_gpu() -> bool:
    """Whether torch is installed, built for CUDA, and finds a GPU."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def torch_clock(device: str) -> HostClock:
    """Return the clock of torch tensors on a device."""
    return clock("host" if device == "cpu" else "torch")


def torch_host(tensor: Any) -> np.ndarray:
    """Copy a torch tensor to a float64 NumPy array."""
    return first(tensor).detach().double().cpu().numpy()


def cupy_array(x: np.ndarray) -> Any:
    """Copy a NumPy array (bf16 as ml_dtypes) into a CuPy array."""
    import cupy

    if x.dtype.name == "bfloat16":
        return cupy.asarray(x.view(np.uint16)).view(x.dtype)
    return cupy.asarray(x)


def cupy_host(array: Any) -> np.ndarray:
    """Copy a CuPy array to a NumPy array of its dtype."""
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16).get().view(array.dtype)
    return array.get()


def first(result: Any) -> Any:
    """Return the output of a call that may return (output, lse, ...)."""
    return result[0] if isinstance(result, (tuple, list)) else result


# --- cupyflash ---


def own_framework(device: str) -> str:
    """Return whose arrays cupyflash is timed on: those that the peers take where torch is there."""
    if device == "cpu":
        return "numpy"
    return "torch" if torch_sees_gpu() else "cupy"


def cupyflash(
    case: Case, arrays: Arrays, device: str, *, kernel: str | None = None, framework: str = ""
) -> Runner:
    """Build cupyflash's own call, on arrays of one framework."""
    framework = framework or own_framework(device)
    host: Callable[[Any], np.ndarray] = np.asarray
    kind = "host" if device == "cpu" else framework
    q, k, v = arrays
    if framework == "torch":
        q, k, v = torch_arrays(arrays, device)
        host = torch_host
    elif framework == "cupy":
        q, k, v = map(cupy_array, arrays)
        host = cupy_host
    call = functools.partial(attention, q, k, v, **case.options, kernel=kernel)
    return Runner(call, clock(kind), host, options={"framework": framework})
