"""A call that PyTorch makes its own: gradients, autocast, transforms, modes and traces.

`_call.call` hands over what only PyTorch can do (it returns NotImplemented); what comes back to it
are plain tensors of which nothing wants a gradient.
"""

from typing import Any

import numpy as np

from .. import _call
from .._array import HOST, adapter_of
from .._array.host import host_view
from .._facts import SCALARS
from .._problem import DESCALES, Form, host_metadata
from .._scalars import factor, flag, number, random_state, recorded_state
from ..errors import InvalidArgument
from . import operators
from .functions import function, is_traced
from .graph import lowered
from .record import Call, refuse

__all__ = ["attention", "cast"]


def attention(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    return_lse: bool,
    scalars: tuple[Any, ...],
    extras: dict[str, Any],
    masks: tuple[Form, ...] = (),
) -> Any:
    """Compute attention of tensors as PyTorch wants it; the arguments are those of `_call.call`.

    Returns
    -------
    out, or (out, lse)
    """
    import torch

    q, k, v = cast(q, k, v)
    named = {"q": q, "k": k, "v": v, **extras}
    tensors = {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}
    wanted = _wanted(torch, tensors if out is None else tensors | {"out": out})
    refuse(wanted, q.dtype)
    transformed = torch._C._are_functorch_transforms_active()
    traced = is_traced(tensors.values())
    if not (wanted or transformed or traced):
        return _call.call(q, k, v, out, return_lse, scalars, extras, masks, settled=True)
    if out is not None:
        raise InvalidArgument(
            "`out` must be None where PyTorch differentiates, transforms or records the call: use "
            "the result, or call it under torch.no_grad()"
        )
    others = {name: _kept(name, x) for name, x in named.items() if name not in tensors}
    call = Call(tuple(tensors), others, _settled(scalars), masks)
    if _functionalizes(torch) if transformed else not wanted:
        results = operators.forward(call, [*tensors.values()])
    else:
        results = function(transformed).apply(call, *tensors.values())
    return results if return_lse else results[0]


def cast(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """Return q, a tensor, k and v as autocast has them where it is on for q's device."""
    import torch

    if not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    return tuple(lowered(x) if isinstance(x, torch.Tensor) else x for x in (q, k, v))


def _wanted(torch: Any, arrays: dict[str, Any]) -> list[str]:
    """Return what PyTorch would differentiate a call by, backward or forward."""
    wanted = []
    if torch.is_grad_enabled():
        wanted += [name for name, x in arrays.items() if x.requires_grad]
    forward = torch.autograd.forward_ad
    if forward._current_level >= 0:
        unpacked = {name: forward.unpack_dual(x) for name, x in arrays.items()}
        wanted += [name for name, x in unpacked.items() if x.tangent is not None]
    return wanted


def _functionalizes(torch: Any) -> bool:
    """Whether the innermost transform is that of what writes, which only takes operators."""
    functorch = torch._C._functorch
    kind = functorch.peek_interpreter_stack().key()
    return bool(kind == functorch.TransformType.Functionalize)


def _settled(scalars: tuple[Any, ...]) -> dict[str, Any]:
    """Return the scalars by name, as values that do not change before the backward pass."""
    values = dict(zip(SCALARS, scalars, strict=True))
    for name in ("softmax_scale", "softcap", "dropout_p"):
        if values[name] is not None and type(values[name]) is not float:
            values[name] = number(name, values[name])
    for name in ("causal", "deterministic"):
        if type(values[name]) is not bool:
            values[name] = flag(name, values[name])
    window = values["window_size"]
    if isinstance(window, tuple | list):
        values["window_size"] = tuple(-1 if side is None else side for side in window)
    return values


def _kept(name: str, x: Any) -> Any:
    """Return a copy of an argument that is no tensor: metadata of the host, or the random state."""
    if name == "rng_state":
        return random_state(recorded_state(x), True, HOST)
    if name in DESCALES and factor(name, x) is not None:
        return x
    x = host_metadata(x, name)
    record = adapter_of(x, name).array(x, name)
    return np.array(host_view(record)) if record.device == HOST else x
