"""The scalar arguments of a call, each as a plain Python number: any real scalar type goes in."""

import functools
import math
import numbers
import operator
import re
from typing import Any

import numpy as np

from ._array import HOST, Adapter, Array, adapter_of, host_dtype
from ._array.host import host_view
from ._philox import seed_offset, threshold
from .errors import InvalidArgument, InvalidType, UnsupportedProblem, shown

__all__ = [
    "architecture",
    "drawn_state",
    "factor",
    "flag",
    "hint",
    "integer",
    "is_array",
    "no_gradient",
    "number",
    "random_state",
    "recorded_state",
    "refuse_gradient",
    "scalars",
]

# Kernels compute in fp32 with the scale times log2(e), which must not overflow either.
FLOAT32_LIMIT = float(np.finfo(np.float32).max) / 2
ARRAYS = ("shape", "__dlpack__", "__cuda_array_interface__")  # what has one of these is an array


def scalars(
    softmax_scale: Any, softcap: Any, dropout_p: Any, head_dim: int, dtype: str
) -> dict[str, float]:
    """Return the checked scale, softcap and dropout_p; no head dim at all makes every score 0."""
    limit = math.inf if dtype == "float64" else FLOAT32_LIMIT
    if softmax_scale is None:
        scale = 1 / math.sqrt(head_dim) if head_dim else 1.0
    else:
        scale = _finite("softmax_scale", softmax_scale, limit)
    cap = _finite("softcap", softcap, limit)
    if cap < 0:
        raise InvalidArgument(f"`softcap` must be positive, or 0.0 for none, got {cap}")
    if cap:  # scores are divided by it, in their type: a smaller one would be 0 there
        cap = max(cap, float(np.finfo("float64" if dtype == "float64" else "float32").tiny))
    p = number("dropout_p", dropout_p)
    if not 0 <= p <= 1:
        raise InvalidArgument(f"`dropout_p` must be a probability from 0 to 1, got {p}")
    return {"scale": scale, "softcap": cap, "dropout_p": p if threshold(p) else 0.0}


def random_state(rng_state: Any, needed: bool, device: int) -> tuple[int, int] | Array | None:
    """Return the state of dropout as (seed, offset), an Array of that device, or None if unused."""
    if rng_state is None and needed:
        raise InvalidArgument(
            "`rng_state` is None and `dropout_p` is not 0: pass rng_state=(seed, offset)"
        )
    if isinstance(rng_state, Array) and rng_state.device != HOST:
        if rng_state.device != device:
            raise InvalidArgument(
                f"`rng_state` is on CUDA device {rng_state.device}, `q` is not: "
                "pass two integers (seed, offset)"
            )
        like = np.broadcast_to(np.zeros((), host_dtype(rng_state.dtype)), rng_state.shape)
        seed_offset(like)  # refuses other types and shapes
        if rng_state.strides != (1,):
            raise InvalidArgument(
                f"`rng_state` must be contiguous, got stride {rng_state.strides[0]}: pass a copy"
            )
        return rng_state
    if rng_state is None:
        return None
    return seed_offset(host_view(rng_state) if isinstance(rng_state, Array) else rng_state)


def recorded_state(rng_state: Any) -> Any:
    """Return the state of dropout as `random_state` takes it: of an array, the record."""
    if not is_array(rng_state):  # `random_state` refuses what is no pair either
        return rng_state
    return adapter_of(rng_state, "rng_state").array(rng_state, "rng_state")


def drawn_state(q: Any, dropout_p: Any) -> Any:
    """Return a new state of dropout where it is needed and q's framework has a generator."""
    adapter = adapter_of(q, "q")
    if adapter.draw is None or not threshold(number("dropout_p", dropout_p)):
        return None
    return adapter.draw(q)


def architecture(arch: Any) -> int:
    """Return a compute capability, 90 for 9.0, given so or as NVRTC's name of it."""
    if isinstance(arch, int | np.integer) and not isinstance(arch, bool) and arch > 0:
        return int(arch)
    match = re.fullmatch(r"(?:sm_)?(\d{2,3})[af]?", arch) if isinstance(arch, str) else None
    if match is None:
        raise InvalidArgument(
            f"`arch` must be a compute capability like 90 or 'sm_90', got {shown(arch)}"
        )
    return int(match[1])


def integer(name: str, value: Any) -> int:
    """Return an integer of any library's type as Python's."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise InvalidType(f"`{name}` must be an integer, got {shown(value)}") from None


def hint(name: str, value: Any) -> None:
    """Check a length that no result depends on."""
    if value is not None and integer(name, value) < 0:
        raise InvalidArgument(f"`{name}` must be a length from 0 on, or None, got {shown(value)}")


def number(name: str, value: Any) -> float:
    """Return a real scalar as a float: a Python or NumPy number, or a 0-d array of the host."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    elif hasattr(value, "shape") and not isinstance(value, np.generic):
        value = _element(name, value)
    if not _is_real(value):
        raise InvalidType(f"`{name}` must be a real number, got {shown(value)}: pass a float")
    try:
        return float(value)
    except OverflowError:  # an integer beyond every float
        return math.inf


def factor(name: str, value: Any) -> float | None:
    """Return a number that fp8 inputs are multiplied by, or None where it is an array."""
    if not isinstance(value, np.generic) and is_array(value):
        return None
    return _finite(name, value, float(np.finfo(np.float32).max))


def refuse_gradient(adapter: Adapter, x: Any, name: str, function: str = "attention") -> None:
    """Raise where the caller's framework would differentiate through an argument."""
    if adapter.grad_needed(x):
        raise no_gradient(name, function)


def no_gradient(name: str, function: str = "attention") -> UnsupportedProblem:
    """Return the error where an argument requires a gradient that is not computed."""
    return UnsupportedProblem(
        f"`{name}` requires a gradient, which {function} does not compute: pass "
        f"`{name}.detach()` or call it under torch.no_grad()"
    )


def flag(name: str, value: Any) -> bool:
    """Return a bool of Python or NumPy as Python's."""
    if not isinstance(value, bool | np.bool_):
        raise InvalidType(f"`{name}` must be a bool, got {type(value).__name__}: use True or False")
    return bool(value)


def is_array(value: Any) -> bool:
    """Return whether an argument is an array of some library, or a record of one."""
    return any(map(functools.partial(hasattr, value), ARRAYS))


def _is_real(value: Any) -> bool:
    if isinstance(value, np.generic):  # the kind of ml_dtypes' floats is V
        return value.dtype.kind in "fiu" or "float" in value.dtype.name
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _element(name: str, value: Any) -> Any:
    """Return the element of another framework's 0-d array, if it lies in host memory."""
    adapter = adapter_of(value, name)
    array = adapter.array(value, name)
    refuse_gradient(adapter, value, name)
    if array.shape != () or array.device != HOST:
        place = "in host memory" if array.device == HOST else f"on CUDA device {array.device}"
        raise InvalidType(
            f"`{name}` must be a real number, got an array of shape {array.shape} {place}: "
            "pass a float"
        )
    return host_view(array)[()]


def _finite(name: str, value: Any, limit: float) -> float:
    result = number(name, value)
    if not abs(result) <= limit or math.isinf(result):
        raise InvalidArgument(
            f"`{name}` must be finite in the type of the scores, got {shown(value)}"
        )
    return result
