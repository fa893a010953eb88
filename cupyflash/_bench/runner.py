"""One implementation ready to be called on one case; its arrays; and cupyflash's own.

A builder takes a `Case` and its inputs, and returns a `Runner`: a call without arguments on arrays
that are already where they belong.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from .. import _attention, _explain, _kernels
from ..errors import CupyflashError
from .case import Case, normal
from .modifiers import Place
from .timing import Call, CupyClock, HostClock, JaxClock, TorchClock

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


class Unfit(Exception):
    """The peer cannot compute this case; the text says why."""


@dataclass(frozen=True)
class Runner:
    """One implementation on one case, ready to be called."""

    call: Call
    clock: HostClock
    view: Callable[[Any], Any]  # the call's result in the shape of the case's output, in place
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    options: dict[str, Any] = field(default_factory=dict)
    kernel: str | None = None  # of ours: the row of the dispatch table
    own_numbers: bool = False  # drops by other random numbers than ours


# --- arrays on the device, made once per case ---


@functools.cache
def clock(name: str) -> HostClock:
    """Return the one clock of a kind; its flush buffer is large."""
    return {"torch": TorchClock, "cupy": CupyClock, "jax": JaxClock, "host": HostClock}[name]()


class OnDevice:
    """The inputs of one case as torch tensors, made once for all that are timed on them."""

    def __init__(self) -> None:
        self._key: tuple[Arrays, str] | None = None
        self._tensors: list[Any] = []
        self._leaves: list[Any] | None = None

    def __call__(self, arrays: Arrays, device: str) -> list[Any]:
        """Return copies of NumPy arrays (those of ml_dtypes too) on a device."""
        if self._key is None or self._key[0] is not arrays or self._key[1] != device:
            self._tensors.clear()  # before others are allocated
            self._tensors[:] = (torch_tensor(x).to(device) for x in arrays)
            self._key = arrays, device
        if self._leaves is not None:
            self._leaves[:] = (x.detach().requires_grad_() for x in self._tensors)
            return list(self._leaves)
        return list(self._tensors)

    def operand(self, x: Any) -> Any:
        """Return a tensor beside the inputs, which requires grad where they do and it can."""
        if self._leaves is not None and x.is_floating_point():
            self._leaves.append(x.requires_grad_())
        return x

    @contextlib.contextmanager
    def differentiable(self) -> Iterator[list[Any]]:
        """Hand out tensors that require grad, and list them."""
        leaves: list[Any] = []
        self._leaves = leaves
        try:
            yield leaves
        finally:
            self._leaves = None


torch_arrays = OnDevice()


def extended(dtype: np.dtype) -> bool:
    """Whether a dtype is one of ml_dtypes, whose arrays frameworks take as integers only."""
    return hasattr(ml_dtypes, dtype.name)


def torch_tensor(x: np.ndarray) -> Any:
    """Return a torch tensor on the memory of a NumPy array."""
    import torch

    if not extended(x.dtype):
        return torch.from_numpy(x)
    words = torch.from_numpy(x.view(f"i{x.itemsize}"))
    return words.view(getattr(torch, x.dtype.name))


def torch_operand(x: np.ndarray, device: str) -> Any:
    """Return a copy of a NumPy array as a torch tensor on a device."""
    return torch_arrays.operand(torch_tensor(np.ascontiguousarray(x)).to(device))


@functools.lru_cache(maxsize=2)
def normal_torch(dtype: str, shape: tuple[int, ...], seed: int, device: str) -> Any:
    """Return standard normal numbers as a tensor, only to be read."""
    return torch_operand(normal(dtype, math.prod(shape), seed).reshape(shape), device)


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


def to_host(x: Any) -> np.ndarray:
    """Copy an array of any framework to NumPy; a torch tensor's elements become fp64."""
    if hasattr(x, "detach"):
        return x.detach().double().cpu().numpy()
    return cupy_host(x) if hasattr(x, "get") else np.asarray(x)


def cupy_array(x: np.ndarray) -> Any:
    """Copy a NumPy array (those of ml_dtypes too) into a CuPy array."""
    import cupy

    if not extended(x.dtype):
        return cupy.asarray(x)
    # CuPy views memory as any dtype.
    return cupy.asarray(x.view(f"u{x.itemsize}")).view(x.dtype)


def cupy_host(array: Any) -> np.ndarray:
    """Copy a CuPy array to a NumPy array of its dtype."""
    if not extended(array.dtype):
        return array.get()
    return array.view(f"u{array.itemsize}").get().view(array.dtype)


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
    kind = "host" if device == "cpu" else framework
    place: Place = np.asarray
    q, k, v = arrays
    if framework == "torch":
        place = functools.partial(torch_operand, device=device)
        q, k, v = torch_arrays(arrays, device)
    elif framework == "cupy":
        place = cupy_array
        q, k, v = map(cupy_array, arrays)
    arguments = case.arguments(place)
    function = getattr(_attention, "attention_varlen" if case.lengths else "attention")
    return Runner(
        functools.partial(function, q, k, v, **arguments, kernel=kernel),
        clock(kind),
        first,
        options={"framework": framework},
        kernel=kernel_name((q, k, v), {**arguments, "kernel": kernel}),
    )


def kernel_name(arrays: tuple[Any, Any, Any], arguments: dict[str, Any]) -> str | None:
    """Return the row of the dispatch table that a call takes, if any."""
    try:
        request = _explain.resolve(arrays, {}, arguments)
        return _kernels.select(request.problem, request.kernel).name
    except CupyflashError:
        return None
