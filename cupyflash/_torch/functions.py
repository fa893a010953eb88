"""The call as a function that autograd differentiates, and torch.func transforms."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from . import operators, vmap
from .record import Call, gradients, keep, refuse_forward_mode, refuse_second

__all__ = ["function", "is_traced"]


def function(transformed: bool) -> Any:
    """Return what ``apply(call, *tensors)`` makes (out, lse) of, also under torch.func."""
    return _functions()[transformed]


def is_traced(arrays: Iterable[Any]) -> bool:
    """Whether someone has to see a call as one operator: a mode, a trace, a class of tensors."""
    modes, plain = _unseen()
    return bool(modes()) or not plain.issuperset(map(type, arrays))


def forward(call: Call, tensors: Sequence[Any]) -> tuple[Any, Any]:
    """Return out and lse of a call, of which nothing wants a gradient."""
    return (operators.forward if is_traced(tensors) else Call.forward)(call, tensors)


def backward(
    call: Call, wanted: Sequence[str], tensors: Sequence[Any], results: Sequence[Any]
) -> tuple[Any, ...]:
    """Return what `Call.backward` does."""
    compute = operators.backward if is_traced((*tensors, *results)) else Call.backward
    return compute(call, wanted, tensors, results)


@functools.cache
def _unseen() -> tuple[Any, frozenset[type]]:
    """Return what counts the modes that watch, and the classes that see no operators."""
    import torch

    plain = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})
    return torch._C._len_torch_dispatch_stack, plain


@functools.cache
def _functions() -> tuple[Any, Any]:
    """Return the functions of autograd alone, whose call costs less, and of torch.func."""
    import torch

    class Gradient(torch.autograd.Function):
        """The gradients of a call, from its tensors and out, lse, dout and dlse."""

        backward, jvp = staticmethod(refuse_second), staticmethod(refuse_second)

        @staticmethod
        def forward(call: Call, wanted: tuple[str, ...], *arrays: Any) -> tuple[Any, ...]:
            return backward(call, wanted, arrays[:-4], arrays[-4:])

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            """Keep nothing."""

        @staticmethod
        def vmap(info: Any, in_dims: Any, call: Call, wanted: Any, *arrays: Any) -> Any:
            names = (*call.names, "out", "lse", "dout", "dlse")
            apply = functools.partial(Gradient.apply, call, wanted)
            return vmap.mapped(apply, call, names, arrays, in_dims[2:], info.batch_size, wanted)

    class Attention(torch.autograd.Function):
        """Out and lse of a call, from its tensors."""

        jvp = staticmethod(refuse_forward_mode)

        @staticmethod
        def forward(ctx: Any, call: Call, *tensors: Any) -> tuple[Any, Any]:
            output = forward(call, tensors)
            keep(ctx, call, tensors, output)
            return output

        @staticmethod
        def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
            names, wants = ctx.call.names, ctx.needs_input_grad[1:]
            needed = [name for name, wanted in zip(names, wants, strict=True) if wanted]
            found = gradients(ctx, dout, dlse, needed, compute)
            return None, *map(found.get, names)

    class Transformed(torch.autograd.Function):
        """The same in the form that torch.func transforms."""

        backward: Any = staticmethod(Attention.backward)
        jvp = staticmethod(refuse_forward_mode)

        @staticmethod
        def forward(call: Call, *tensors: Any) -> tuple[Any, Any]:
            return forward(call, tensors)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            call, *tensors = inputs
            keep(ctx, call, tensors, output)

        @staticmethod
        def vmap(info: Any, in_dims: Any, call: Call, *tensors: Any) -> Any:
            apply = functools.partial(Transformed.apply, call)
            return vmap.mapped(apply, call, call.names, tensors, in_dims[1:], info.batch_size)

    def compute(
        call: Call, wanted: Sequence[str], tensors: Sequence[Any], results: Sequence[Any]
    ) -> tuple[Any, ...]:
        if any(x is not None and is_batched(x) for x in results[2:]):
            return operators.backward(call, wanted, tensors, results)
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return Gradient.apply(call, wanted, *tensors, *results)
        return backward(call, wanted, tensors, results)

    is_batched = torch._C._functorch.is_legacy_batchedtensor
    return Attention, Transformed
