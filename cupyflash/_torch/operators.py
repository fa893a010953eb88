"""The call as operators of PyTorch's dispatcher: what graphs hold, and modes see.

``cupyflash::attention`` returns (out, lse) and ``cupyflash::attention_backward`` five gradients, an
empty tensor for one that there is not. Both take the arguments of a call, arrays as tensors; masks
are words beside their arrays and integers.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._facts import SCALARS
from .._problem_backward import EXTRA, INPUTS
from . import imitations, vmap, words
from .record import Call, gradients, keep, refuse, refuse_second

__all__ = ["NAMES", "backward", "forward", "operators"]

OPTIONAL = (
    "alibi_slopes", "attn_bias", "attn_mask", "seqused_q", "seqused_k", "learnable_sink",
    "q_descale", "k_descale", "v_descale", "rng_state", "cu_seqlens_q", "cu_seqlens_k",
)  # fmt: skip
TENSORS = ("q", "k", "v", *OPTIONAL)
# The others, by name: their types, and their defaults as a schema writes them and as they are.
REST: dict[str, tuple[str, str, Any]] = {
    "mask_arrays": ("Tensor[]?", "None", None),
    "mask_integers": ("SymInt[]?", "None", None),
    "masks": ("str", "''", ""),
    "softmax_scale": ("float?", "None", None),
    "causal": ("bool", "False", False),
    "window_size": ("SymInt[]", "[-1, -1]", (-1, -1)),
    "alignment": ("str", "'bottom_right'", "bottom_right"),
    "softcap": ("float", "0.0", 0.0),
    "dropout_p": ("float", "0.0", 0.0),
    "layout": ("str", "'bshd'", "bshd"),
    "deterministic": ("bool", "False", False),
    "kernel_name": ("str?", "None", None),  # Inductor has another use for "kernel"
}
DEFAULTS = dict.fromkeys(OPTIONAL) | {name: x for name, (_, _, x) in REST.items()}
NAMES = (*TENSORS, *REST)
GIVEN = "Tensor dout, Tensor? dlse, Tensor out, Tensor lse, bool dbias, bool dsink"


def operators() -> Any:
    """Return the namespace of the operators, which are defined when this is first called."""
    import torch

    with _lock:
        if not _defined:
            _defined.append(_library(torch))
    return torch.ops.cupyflash


_lock = threading.Lock()
_defined: list[Any] = []  # what a library defined ends with it


def _library(torch: Any) -> Any:
    """Define the operators."""
    library = torch.library.Library("cupyflash", "FRAGMENT")
    arguments = [f"Tensor {name}" for name in ("q", "k", "v")]
    arguments += [f"Tensor? {name}=None" for name in OPTIONAL]
    arguments += [f"{kind} {name}={default}" for name, (kind, default, _) in REST.items()]
    listed, results = ", ".join(arguments), ", ".join(f"Tensor {name}" for name in INPUTS)
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    library.define(f"attention({listed}) -> (Tensor out, Tensor lse)", tags=tags)
    library.define(f"attention_backward({GIVEN}, {listed}) -> ({results})", tags=tags)
    for name, run, imitate, mapped, differentiate, setup in (
        ("attention", _forward, _imitate, _map, _differentiate, _setup),
        ("attention_backward", _backward, _imitate_backward, _map_backward, refuse_second, None),
    ):
        library.impl(name, run, "CompositeExplicitAutograd")
        name = f"cupyflash::{name}"
        torch.library.register_fake(name, imitate, lib=library)
        torch.library.register_vmap(name, mapped, lib=library)
        torch.library.register_autograd(name, differentiate, setup_context=setup, lib=library)
    return library


def forward(call: Call, tensors: Sequence[Any]) -> tuple[Any, Any]:
    """Return out and lse of a call, by the operator."""
    out, lse = operators().attention(**_arguments(call, tensors))
    return out, lse


def backward(
    call: Call, wanted: Sequence[str], tensors: Sequence[Any], results: Sequence[Any]
) -> tuple[Any, ...]:
    """Return what `Call.backward` does, by the operator."""
    return _by_arguments(_arguments(call, tensors), wanted, results)


def _by_arguments(
    arguments: dict[str, Any], wanted: Sequence[str], results: Sequence[Any]
) -> tuple[Any, ...]:
    out, lse, dout, dlse = results
    extra = (name in wanted for name in EXTRA)
    found = operators().attention_backward(dout, dlse, out, lse, *extra, **arguments)
    return tuple(x for name, x in zip(INPUTS, found, strict=True) if name in wanted)


# Arguments of an operator to a call and back


def _named(arguments: Sequence[Any]) -> dict[str, Any]:
    """Return all arguments by name: the dispatcher drops defaults from the end."""
    return DEFAULTS | dict(zip(NAMES, arguments, strict=False))


def _call(named: dict[str, Any]) -> tuple[Call, tuple[Any, ...]]:
    """Return a call without its tensors, and these, of arguments by name."""
    tensors = {name: named[name] for name in TENSORS if named[name] is not None}
    masks, arrays = words.read(*(named[name] for name in words.ARGUMENTS))
    tensors |= arrays
    named["kernel"] = named["kernel_name"]
    scalars = {name: named[name] for name in SCALARS}
    scalars["window_size"] = tuple(scalars["window_size"])
    return Call(tuple(tensors), {}, scalars, masks), tuple(tensors.values())


def _arguments(call: Call, tensors: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, without those that are defaults."""
    given = dict(zip(call.names, tensors, strict=True))
    device = given["q"].device
    given |= {name: words.tensor(name, x, device) for name, x in call.others.items()}
    arguments = {name: given[name] for name in TENSORS if name in given}
    arguments |= words.write(call.masks, given)
    scalars = dict(call.scalars)
    scalars["kernel_name"] = scalars.pop("kernel")
    return arguments | {name: x for name, x in scalars.items() if x != DEFAULTS[name]}


# What the operators do: forward, and with (dout, dlse, out, lse, dbias, dsink) before, backward


def _forward(*arguments: Any) -> tuple[Any, Any]:
    call, tensors = _call(_named(arguments))
    return call.forward(tensors)


def _backward(
    dout: Any, dlse: Any, out: Any, lse: Any, dbias: bool, dsink: bool, *arguments: Any
) -> tuple[Any, ...]:
    call, tensors = _call(_named(arguments))
    wanted = _wanted(dbias, dsink)
    found = call.backward(wanted, tensors, (out, lse, dout, dlse))
    return _five(out, wanted, found)


def _wanted(dbias: bool, dsink: bool) -> tuple[str, ...]:
    extra = dict(zip(EXTRA, (dbias, dsink), strict=True))
    return tuple(name for name in INPUTS if extra.get(name, True))


def _five(out: Any, wanted: Sequence[str], found: Sequence[Any]) -> tuple[Any, ...]:
    """Return the gradients that were found and an empty tensor for each of the others."""
    named = dict(zip(wanted, found, strict=True))
    return tuple(named[name] if name in named else out.new_empty(0) for name in INPUTS)


def _imitate(*arguments: Any) -> tuple[Any, Any]:
    return imitations.forward(_named(arguments))


def _imitate_backward(
    dout: Any, dlse: Any, out: Any, lse: Any, dbias: bool, dsink: bool, *arguments: Any
) -> tuple[Any, ...]:
    named = _named(arguments)
    found = (imitations.gradient(name, named) for name in _wanted(dbias, dsink))
    return _five(out, _wanted(dbias, dsink), tuple(found))


@dataclass(frozen=True)
class _Arguments:
    """The arguments of an operator without tensors, as a graph has them; `Call` is of the host."""

    names: tuple[str, ...]  # of the tensors that come first; those of masks follow
    rest: dict[str, Any]

    def backward(
        self, wanted: Sequence[str], tensors: Sequence[Any], results: Sequence[Any]
    ) -> tuple[Any, ...]:
        given = dict(zip(self.names, tensors, strict=False)) | self.rest
        arrays = tensors[len(self.names) :]
        return _by_arguments(given | ({"mask_arrays": arrays} if arrays else {}), wanted, results)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    named = dict(zip(NAMES, inputs, strict=True))
    tensors = {name: named.pop(name) for name in TENSORS if named[name] is not None}
    arrays = named.pop("mask_arrays") or []
    refuse([name for name, x in tensors.items() if x.requires_grad], tensors["q"].dtype)
    rest = {name: x for name, x in named.items() if name in REST}
    ctx.mask_arrays = [None for _ in arrays] or None
    keep(ctx, _Arguments(tuple(tensors), rest), [*tensors.values(), *arrays], output)


def _differentiate(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    needed = dict(zip(NAMES, ctx.needs_input_grad, strict=False))  # without the defaults again
    names = [name for name, wanted in needed.items() if wanted is True]
    found = gradients(ctx, dout, dlse, names, _Arguments.backward)
    return tuple(map((found | {"mask_arrays": ctx.mask_arrays}).get, needed))


@dataclass(frozen=True)
class _Mapped:
    """An array and its axis of samples, or None."""

    x: Any
    dim: int | None


def _paired(arguments: Sequence[Any], dims: Sequence[Any]) -> tuple[Call, list[Any], list[Any]]:
    """Return a call without its tensors, these, and their axes of samples."""
    named, axes = _named(arguments), dict(zip(NAMES, dims, strict=False))
    for name in TENSORS:
        if named[name] is not None:
            named[name] = _Mapped(named[name], axes[name])
    if named["mask_arrays"]:
        named["mask_arrays"] = list(map(_Mapped, named["mask_arrays"], axes["mask_arrays"]))
    call, pairs = _call(named)
    return call, [pair.x for pair in pairs], [pair.dim for pair in pairs]


def _map(info: Any, in_dims: Any, *arguments: Any) -> Any:
    call, tensors, dims = _paired(arguments, in_dims)

    def apply(*tensors: Any) -> Any:
        return forward(call, tensors)

    return vmap.mapped(apply, call, call.names, tensors, dims, info.batch_size)


def _map_backward(info: Any, in_dims: Any, *arguments: Any) -> Any:
    dout, dlse, out, lse, *extra = arguments[:6]
    call, tensors, axes = _paired(arguments[6:], in_dims[6:])
    names = (*call.names, "out", "lse", "dout", "dlse")
    arrays, axes = [*tensors, out, lse, dout, dlse], [*axes, *in_dims[2:4], *in_dims[:2]]
    wanted = _wanted(*extra)

    def apply(*arrays: Any) -> tuple[Any, ...]:
        return backward(call, wanted, arrays[:-4], arrays[-4:])

    found, out_dims = vmap.mapped(apply, call, names, arrays, axes, info.batch_size, wanted)
    dims = dict(zip(wanted, out_dims, strict=True))
    return _five(out, wanted, found), tuple(map(dims.get, INPUTS))
