"""The call as a function that autograd differentiates, and torch.func transforms."""

import functools
from dataclasses import dataclass
from typing import Any

from .. import _backward, _call
from .._kernels import backward_name
from .._problem import Form
from .._problem_backward import EXTRA, INPUTS
from ..errors import UnsupportedProblem
from . import vmap

__all__ = ["Call", "function"]


@dataclass(frozen=True, eq=False)
class Call:
    """A call without its tensors.

    Parameters
    ----------
    names : tuple of str
        What the tensors are, in their order; q, k and v come first.
    others : dict of str to object
        The array arguments that are no tensors, and the random state likewise.
    scalars : dict of str to object
        By the names of `_call.SCALARS`.
    masks : tuple of Form
        What names and others have the arrays of.
    """

    names: tuple[str, ...]
    others: dict[str, Any]
    scalars: dict[str, Any]
    masks: tuple[Form, ...]

    def forward(self, tensors: tuple[Any, ...]) -> tuple[Any, Any]:
        """Return out and lse."""
        arrays = self.others | dict(zip(self.names, tensors, strict=True))
        q, k, v = (arrays.pop(name) for name in ("q", "k", "v"))
        scalars = tuple(self.scalars.values())
        return _call.call(q, k, v, None, True, scalars, arrays, self.masks, settled=True)

    def backward(
        self, wanted: tuple[str, ...], tensors: tuple[Any, ...], results: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Return the gradients of these names, from the tensors and out, lse, dout and dlse."""
        import torch

        named = dict(zip(("out", "lse", "dout", "dlse"), results, strict=True))
        arrays = self.others | dict(zip(self.names, tensors, strict=True)) | named
        if arrays["dlse"] is None:
            del arrays["dlse"]
        if arrays["dout"] is None:
            arrays["dout"] = torch.zeros_like(arrays["out"])
        always = torch.are_deterministic_algorithms_enabled()
        scalars = self.scalars | {
            "deterministic": self.scalars["deterministic"] or always,
            "kernel": backward_name(self.scalars["kernel"]),
        }
        extra = tuple(name for name in EXTRA if name in wanted)
        found = _backward.call(arrays, tuple(scalars.values()), self.masks, extra)
        return tuple(getattr(found, name) for name in wanted)


def function(transformed: bool) -> Any:
    """Return what ``apply(call, *tensors)`` makes (out, lse) of, also under torch.func."""
    return _functions()[transformed]


@functools.cache
def _functions() -> tuple[Any, Any]:
    """Return the functions of autograd alone, whose call costs less, and of torch.func."""
    import torch

    class Gradient(torch.autograd.Function):
        """The gradients of a call, from its tensors and out, lse, dout and dlse."""

        @staticmethod
        def forward(call: Call, wanted: tuple[str, ...], *arrays: Any) -> tuple[Any, ...]:
            return call.backward(wanted, arrays[:-4], arrays[-4:])

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            """Keep nothing."""

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            refuse_second()

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            refuse_second()

        @staticmethod
        def vmap(info: Any, in_dims: Any, call: Call, wanted: Any, *arrays: Any) -> Any:
            names = (*call.names, "out", "lse", "dout", "dlse")
            apply = functools.partial(Gradient.apply, call, wanted)
            return vmap.mapped(apply, call, names, arrays, in_dims[2:], info.batch_size, wanted)

    class Attention(torch.autograd.Function):
        """Out and lse of a call, from its tensors."""

        @staticmethod
        def forward(ctx: Any, call: Call, *tensors: Any) -> tuple[Any, Any]:
            output = call.forward(tensors)
            keep(ctx, call, tensors, output)
            return output

        @staticmethod
        def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
            names = ctx.call.names
            needed = dict(zip(names, ctx.needs_input_grad[1:], strict=True))
            wanted = tuple(d for d, name in INPUTS.items() if needed.get(name))
            if not wanted or (dout is None and dlse is None):
                return (None,) * (1 + len(names))
            dout, dlse = (x if x is None else x.resolve_neg() for x in (dout, dlse))
            *tensors, out, lse = ctx.saved_tensors
            if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
                found = Gradient.apply(ctx.call, wanted, *tensors, out, lse, dout, dlse)
            else:
                found = ctx.call.backward(wanted, tuple(tensors), (out, lse, dout, dlse))
            by_name = {INPUTS[d]: x for d, x in zip(wanted, found, strict=True)}
            return None, *(by_name.get(name) for name in names)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise UnsupportedProblem(
                "attention has no derivative in forward mode (torch.func.jvp, "
                "torch.autograd.forward_ad): use reverse mode, as backward() and torch.func.vjp do"
            )

    class Transformed(torch.autograd.Function):
        """The same in the form that torch.func transforms."""

        backward, jvp = map(staticmethod, (Attention.backward, Attention.jvp))

        @staticmethod
        def forward(call: Call, *tensors: Any) -> tuple[Any, Any]:
            return call.forward(tensors)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            call, *tensors = inputs
            keep(ctx, call, tensors, output)

        @staticmethod
        def vmap(info: Any, in_dims: Any, call: Call, *tensors: Any) -> Any:
            apply = functools.partial(Transformed.apply, call)
            return vmap.mapped(apply, call, call.names, tensors, in_dims[1:], info.batch_size)

    def keep(ctx: Any, call: Call, tensors: Any, output: Any) -> None:
        ctx.call = call
        ctx.set_materialize_grads(False)  # an lse of no consequence costs nothing
        ctx.save_for_backward(*tensors, *output)

    return Attention, Transformed


def refuse_second() -> None:
    """Raise where gradients are to be differentiated."""
    raise UnsupportedProblem(
        "attention has no second derivatives: differentiate it once, without create_graph=True"
    )
