"""PyTorch's part in a call: gradients, autocast, transforms. Thin, over the calls of both passes.

`_call.call` hands over what only PyTorch can do (it returns NotImplemented); what comes back to it
are plain tensors of which nothing wants a gradient.
"""

from typing import Any

import numpy as np

from .. import _call
from .._array import HOST, adapter_of
from .._array.host import host_view
from .._facts import SCALARS
from .._problem import Form, host_metadata
from .._problem_backward import INPUTS, refuse_float8
from .._scalars import no_gradient, number, random_state, recorded_state
from ..errors import InvalidArgument
from .functions import Call, function

__all__ = ["attention"]

CAST = ("float16", "bfloat16", "float32")  # what autocast converts


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

    q, k, v = (_autocast(torch, x) for x in (q, k, v))
    named = {"q": q, "k": k, "v": v, **extras}
    transformed = torch._C._are_functorch_transforms_active()
    wanted = [name for name, x in {**named, "out": out}.items() if _wants(torch, x)]
    if not (wanted or transformed):
        return _call.call(q, k, v, out, return_lse, scalars, extras, masks, settled=True)
    for name in wanted:
        if name not in INPUTS.values():
            raise no_gradient(name)
    if wanted:
        refuse_float8(str(q.dtype).removeprefix("torch."))
    if out is not None:
        raise InvalidArgument(
            "`out` must be None where PyTorch differentiates or transforms the call: use the "
            "result, or call it under torch.no_grad()"
        )
    call, tensors = _taken_apart(torch, named, scalars, masks)
    output, lse = function(transformed).apply(call, *tensors)
    return (output, lse) if return_lse else output


def _autocast(torch: Any, x: Any) -> Any:
    """Return q, k or v in the dtype that autocast has on its device, if it is on there."""
    if not isinstance(x, torch.Tensor) or not torch.is_autocast_enabled(x.device.type):
        return x
    wanted = torch.get_autocast_dtype(x.device.type)
    return x.to(wanted) if str(x.dtype).removeprefix("torch.") in CAST else x


def _wants(torch: Any, x: Any) -> bool:
    """Whether PyTorch would differentiate a call through an argument, backward or forward."""
    if not isinstance(x, torch.Tensor):
        return False
    if x.requires_grad and torch.is_grad_enabled():
        return True
    forward = torch.autograd.forward_ad
    return forward._current_level >= 0 and forward.unpack_dual(x).tangent is not None


def _taken_apart(
    torch: Any, named: dict[str, Any], scalars: tuple[Any, ...], masks: tuple[Form, ...]
) -> tuple[Call, list[Any]]:
    """Return a call without its tensors, and these.

    What the caller may change before the backward pass is copied; of tensors PyTorch knows it.
    """
    tensors = {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}
    others = {name: _kept(name, x) for name, x in named.items() if name not in tensors}
    values = dict(zip(SCALARS, scalars, strict=True))
    for name in ("softmax_scale", "softcap", "dropout_p"):
        if values[name] is not None:
            values[name] = number(name, values[name])
    if isinstance(values["window_size"], list):
        values["window_size"] = tuple(values["window_size"])
    return Call(tuple(tensors), others, values, masks), list(tensors.values())


def _kept(name: str, x: Any) -> Any:
    """Return a copy of an argument that is no tensor: metadata of the host, or the random state."""
    if name == "rng_state":
        return random_state(recorded_state(x), True, HOST)
    x = host_metadata(x, name)
    record = adapter_of(x, name).array(x, name)
    return np.array(host_view(record)) if record.device == HOST else x
