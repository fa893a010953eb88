"""What torch.compile traces in the place of functions that read memory: a call of an operator.

Dynamo follows ``_torchdynamo_inline`` of a function as it does that of its own wrappers. What it
cannot have in a graph, arrays that are no tensors for one, it leaves the graph for.
"""

from collections.abc import Callable
from typing import Any

from .._array.torch_arrays import Dynamo
from .._call import call
from .._facts import SCALARS
from .._problem import DESCALES, LAYOUTS, METADATA, forms
from .._problem_backward import INPUTS
from .._scalars import drawn_state, hint
from ..masks import ALIGNMENTS, Mask
from . import operators, words

__all__ = ["attach", "lowered"]

CAST = ("torch.float16", "torch.bfloat16", "torch.float32")  # what autocast converts
NUMBERS = ("softmax_scale", "softcap", "dropout_p")
FLAGS = ("causal", "deterministic", "return_lse")
NUMBER = (int, float)


def attach() -> None:
    """Tell Dynamo what to trace."""
    twins: dict[Callable[..., Any], Callable[..., Any]] = {
        call: _call, forms: _forms, drawn_state: _drawn_state, hint: _hint
    }  # fmt: skip
    for function, twin in twins.items():
        function._torchdynamo_inline = twin  # type: ignore[attr-defined]
    _state._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _state() -> str:
    """Make ready for a graph, and return why there cannot be one; Dynamo runs this as it is."""
    import torch

    operators.operators()
    Dynamo.hide()
    levels = torch._C._functorch.get_interpreter_stack() or ()
    if any(level.key() != torch._C._functorch.TransformType.Vmap for level in levels):
        return "torch.func differentiates it"
    return ""


def lowered(x: Any) -> Any:
    """Return q, k or v in the dtype that autocast has on its device, if it is on there."""
    import torch

    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or str(x.dtype) not in CAST:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _call(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    return_lse: bool,
    scalars: tuple[Any, ...],
    extras: dict[str, Any],
    masks: Any = (),
) -> Any:
    """Compute attention in a graph; `masks` are those of `_forms`."""
    import torch

    values = dict(zip(SCALARS, scalars, strict=True))
    reason = _state() or _refusal(torch, (q, k, v), values | {"return_lse": return_lse}, extras)
    if reason or out is not None:
        _leave(torch, reason or "`out` is written")
    arguments = dict(masks) if masks else {}
    for name, x in extras.items():
        given = isinstance(x, torch.Tensor)
        arguments[name] = x if given else words.tensor(name, x, q.device)
    left, right = values["window_size"]
    values["window_size"] = [-1 if left is None else left, -1 if right is None else right]
    values["kernel_name"] = values.pop("kernel")
    q, k, v = lowered(q), lowered(k), lowered(v)
    result, lse = torch.ops.cupyflash.attention(q, k, v, **arguments, **values)
    return (result, lse) if return_lse else result


def _leave(torch: Any, reason: str) -> None:
    """Leave the graph: Dynamo calls what it was tracing as it is."""
    torch._dynamo.graph_break(msg=f"cupyflash leaves the graph: {reason}")


def _refusal(
    torch: Any, inputs: tuple[Any, ...], values: dict[str, Any], extras: dict[str, Any]
) -> str:
    """Return why a call cannot be in a graph, or nothing."""
    for x in inputs:
        if not isinstance(x, torch.Tensor):
            return "q, k and v must be tensors"
    for name in FLAGS:
        if not isinstance(values[name], bool):
            return f"`{name}` must be a bool"
    for name in NUMBERS:
        x = values[name]
        if not isinstance(x, NUMBER) and (x is not None or name != "softmax_scale"):
            return f"`{name}` must be a number of Python"
    if values["layout"] not in LAYOUTS or values["alignment"] not in ALIGNMENTS:
        return "`layout` or `alignment` is unknown"
    window = values["window_size"]
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        return "`window_size` must be a pair"
    for x in window:
        if not isinstance(x, (int, type(None))):
            return "`window_size` must hold integers"
    for name, x in extras.items():
        if isinstance(x, torch.Tensor):
            if x.requires_grad and name not in INPUTS.values() and torch.is_grad_enabled():
                return f"`{name}` requires a gradient"
        elif name == "rng_state":
            if not isinstance(x, (tuple, list)) or len(x) != 2:
                return "`rng_state` must be a pair of integers, or a tensor"
        elif not (name in METADATA or (name in DESCALES and isinstance(x, NUMBER))):
            return f"`{name}` must be a tensor"
    return ""


def _forms(mask: Any = None, segment_ids: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return masks as arguments of the operator, which have their arrays."""
    import torch

    if mask is not None and not isinstance(mask, Mask):
        _leave(torch, "`mask` must be a mask")
    parts = () if mask is None else mask.parts
    integers: list[Any] = []
    written = [words.word(part, integers) for part in parts]
    arrays = [x for part in parts for x in part.arrays]
    if segment_ids is not None:
        pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        written.append(words.SEGMENTS)
        arrays += pair
    tensors = [torch.as_tensor(x) for x in arrays]
    return words.arguments(written, tensors, integers), {}


def _drawn_state(q: Any, dropout_p: Any) -> Any:
    """Draw a random state in a graph, where one is needed."""
    import torch

    if not isinstance(dropout_p, NUMBER) or round(65536 * dropout_p) == 0:
        return None
    return torch.randint(2**63 - 1, (2,), device=q.device)


def _hint(name: str, value: Any) -> None:
    """Take a hint."""
