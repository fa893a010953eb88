"""What autograd keeps of a call, and what it makes of that."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from .. import _backward, _call
from .._kernels import backward_name
from .._problem import Form
from .._problem_backward import EXTRA, INPUTS, refuse_float8
from .._scalars import no_gradient
from ..errors import UnsupportedProblem

__all__ = ["Call", "gradients", "keep", "refuse", "refuse_forward_mode", "refuse_second"]


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
        By the names of `_facts.SCALARS`.
    masks : tuple of Form
        What names and others have the arrays of.
    """

    names: tuple[str, ...]
    others: dict[str, Any]
    scalars: dict[str, Any]
    masks: tuple[Form, ...]

    def forward(self, tensors: Sequence[Any]) -> tuple[Any, Any]:
        """Return out and lse."""
        arrays = self.others | dict(zip(self.names, tensors, strict=True))
        q, k, v = (arrays.pop(name) for name in ("q", "k", "v"))
        scalars = tuple(self.scalars.values())
        return _call.call(q, k, v, None, True, scalars, arrays, self.masks, settled=True)

    def backward(
        self, wanted: Sequence[str], tensors: Sequence[Any], results: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Return the gradients of these names, from the tensors and out, lse, dout and dlse."""
        import torch

        named = dict(zip(("out", "lse", "dout", "dlse"), results, strict=True))
        arrays = self.others | dict(zip(self.names, tensors, strict=True)) | named
        if arrays["dlse"] is None:
            del arrays["dlse"]
        always = torch.are_deterministic_algorithms_enabled()
        scalars = self.scalars | {
            "deterministic": self.scalars["deterministic"] or always,
            "kernel": backward_name(self.scalars["kernel"]),
        }
        extra = tuple(name for name in EXTRA if name in wanted)
        found = _backward.call(arrays, tuple(scalars.values()), self.masks, extra)
        return tuple(getattr(found, name) for name in wanted)


def keep(ctx: Any, call: Any, tensors: Sequence[Any], output: Sequence[Any]) -> None:
    """Keep what `gradients` needs on autograd's context."""
    ctx.call = call
    ctx.set_materialize_grads(False)  # an lse that the loss does not depend on costs nothing
    ctx.save_for_backward(*tensors, *output)


def gradients(
    ctx: Any, dout: Any, dlse: Any, needed: Collection[str], compute: Callable[..., tuple[Any, ...]]
) -> dict[str, Any]:
    """Return the gradients of the needed arguments by their names, of what `keep` kept.

    Parameters
    ----------
    ctx
        Autograd's context.
    dout, dlse : tensor or None
        What comes in.
    needed : collection of str
        The arguments that want a gradient.
    compute : callable
        (call, wanted, tensors, (out, lse, dout, dlse)) -> what `Call.backward` returns.
    """
    import torch

    wanted = tuple(name for name, argument in INPUTS.items() if argument in needed)
    if not wanted or (dout is None and dlse is None):
        return {}
    *tensors, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout.resolve_neg()
    dlse = dlse if dlse is None else dlse.resolve_neg()
    found = compute(ctx.call, wanted, tensors, (out, lse, dout, dlse))
    return {INPUTS[name]: x for name, x in zip(wanted, found, strict=True)}


def refuse(wanted: Iterable[str], dtype: Any) -> None:
    """Raise where an argument that wants a gradient has none, in a call of a dtype."""
    for name in wanted:
        if name not in INPUTS.values():
            raise no_gradient(name)
        if dtype.itemsize == 1:
            refuse_float8(str(dtype).removeprefix("torch."))


def refuse_second(*_: Any) -> NoReturn:
    """Raise where gradients are to be differentiated."""
    raise UnsupportedProblem(
        "attention has no second derivatives: differentiate it once, without create_graph=True"
    )


def refuse_forward_mode(*_: Any) -> NoReturn:
    """Raise where a derivative is to be computed beside the output."""
    raise UnsupportedProblem(
        "attention has no derivative in forward mode (torch.func.jvp, torch.autograd.forward_ad): "
        "use reverse mode, as backward() and torch.func.vjp do"
    )
