"""What the calls of every operation do with the facts that a plan is found by.

A call's *facts* are all that its plan depends on: shapes, strides, dtypes, devices, the alignment
of the pointers, and the scalar arguments. They are looked up before anything is checked. Values of
lengths that lie in host memory are no facts: each call checks them, and copies them to the GPU.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ._array import HOST, Adapter, Array, adapter_of, contiguous_strides, device_guard
from ._array.host import host_view
from ._launch import Launch
from ._philox import seed_offset
from ._problem import (
    DESCALES,
    LAYOUTS,
    Extent,
    Form,
    Problem,
    host_metadata,
    is_metadata,
    recheck,
)
from ._scalars import random_state, recorded_state
from ._views import permuted
from .errors import InvalidArgument

__all__ = [
    "NONE", "SCALARS", "Allocation", "Extras", "Words", "contiguous", "copied", "extras_of",
    "is_plain", "kept", "layout_of", "lse_shape", "named_places", "same_kind", "scalars_key",
    "uneven", "uploaded",
]  # fmt: skip

# The arguments that are no arrays, in the order in which calls take them.
SCALARS = (
    "softmax_scale",
    "causal",
    "window_size",
    "alignment",
    "softcap",
    "dropout_p",
    "layout",
    "deterministic",
    "kernel",
)
# Types whose equal values mean the same, always: a tensor equals itself after it has changed.
PLAIN = {type(None), bool, int, float, str, tuple, np.bool_, np.float64, np.float32}

Allocation = tuple[tuple[int, ...], tuple[int, ...], str, int]  # for `Adapter.empty_strided`
Words = dict[str, tuple[int, ...]]


class Extras(NamedTuple):
    """The arguments beyond those that every call has, as a plan takes them."""

    facts: tuple[Any, ...]
    words: Words  # by name: an address, or 0 and the random state
    hosted: dict[str, Array]  # metadata in host memory

    def beside(self, adapter: Adapter, copies: Mapping[str, Any]) -> "Extras":
        """Return these with the addresses of copies of what lies in host memory."""
        there = {name: (adapter.pointer(x),) for name, x in copies.items()}
        return self._replace(words=self.words | there)


NONE = Extras((), {}, {})


def scalars_key(scalars: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values of `SCALARS` with all that distinguishes them, as a part of a key."""
    scale, causal, (left, right), _, softcap, dropout_p, _, deterministic, _ = scalars
    # True and 1.0 equal 1: an argument of a wrong type must not meet the plan of a right one.
    numbers = type(scale), type(left), type(right), type(softcap), type(dropout_p)
    return scalars, (*numbers, type(causal), type(deterministic))


def is_plain(scalars: Iterable[Any]) -> bool:
    """Whether equal scalars mean the same, always."""
    return PLAIN.issuperset(map(type, scalars))


def same_kind(adapter: Adapter, kind: type, x: Any) -> bool:
    """Whether an array is one of q's adapter: of q's class, or another that is as plain."""
    return type(x) is kind or type(x) in adapter.plain


def extras_of(adapter: Adapter, kind: type, extras: Mapping[str, Any]) -> Extras:
    """Return what a plan needs of the other arguments; TypeError where there can be no plan."""
    facts: list[Any] = []
    words: Words = {}
    hosted: dict[str, Array] = {}
    for name, x in extras.items():
        if same_kind(adapter, kind, x) and adapter.device(x) != HOST:
            at = adapter.pointer(x)
            facts.append((name, adapter.facts(x), at if name in DESCALES else at & 7))
            words[name] = (at,)
        elif name == "rng_state":
            facts.append(name)
            words[name] = (0, *_pair(x))
        elif is_metadata(name):
            x = host_metadata(x, name)
            hosted[name] = record = adapter_of(x, name).array(x, name)
            if record.device != HOST:
                raise TypeError("metadata of another framework")
            facts.append((name, record.shape, record.dtype))
        else:
            raise TypeError("an array of another framework, or a number")
    return Extras(tuple(facts), words, hosted)


def _pair(rng_state: Any) -> tuple[int, int]:
    """Return a random state of host memory."""
    if type(rng_state) is tuple:
        return seed_offset(rng_state)
    state = random_state(recorded_state(rng_state), True, HOST)
    if isinstance(state, Array) or state is None:
        raise TypeError("a state of another framework on a GPU")
    return state


def copied(
    adapter: Adapter,
    problem: Problem,
    extents: Iterable[Extent],
    hosted: Mapping[str, Array],
    device: int,
) -> dict[str, Any]:
    """Check the metadata of host memory for a plan's problem, and copy it to the plan's device."""
    recheck(problem, extents, hosted)
    with device_guard(device):
        return uploaded(adapter, hosted, device)


def uploaded(adapter: Adapter, hosted: Mapping[str, Array], device: int) -> dict[str, Any]:
    """Copy metadata to a device, which is current, on the caller's stream."""
    if hosted and adapter.capturing(device):
        name = min(hosted)
        raise InvalidArgument(
            f"`{name}` is in host memory, whose values a CUDA graph capture cannot copy: "
            f"pass it as an array on device {device}"
        )
    return {name: adapter.upload(host_view(x), device) for name, x in hosted.items()}


def uneven(records: Mapping[str, Array], names: Iterable[str]) -> list[str]:
    """Return which of these arrays the kernels of a GPU read a copy of; ranks are not checked."""
    return [name for name in names if records[name].strides[-1:] not in ((), (1,))]


def contiguous(record: Array) -> Array:
    """Return the record of a C-contiguous copy that is not there yet."""
    return record._replace(pointer=0, strides=contiguous_strides(record.shape))


def kept(adapter: Adapter, x: Any, device: int) -> Any:
    """Return an array that ends with a call, after having it kept for a graph that captures it."""
    if adapter.capturing(device):
        adapter.keep(x)
    return x


def layout_of(
    problem: Problem, array: Array, layout: str
) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Return shape, strides and dtype of a view of (batch, length, heads, dim) as the caller's."""
    view = permuted(array, LAYOUTS[layout])
    return view.shape[problem.packed :], view.strides[problem.packed :], view.dtype


def named_places(launch: Launch, masks: Iterable[Form]) -> tuple[tuple[str, int], ...]:
    """Return where a launch's Params hold the addresses of arguments, by their names."""
    arrays = [name for form in masks for name in form.names]
    return tuple((x if isinstance(x, str) else arrays[x], at) for x, at in launch.places)


def lse_shape(problem: Problem) -> tuple[int, ...]:
    """Return the shape of the log-sum-exp."""
    shape = (problem.heads_q, problem.len_q)
    return shape if problem.packed else (problem.batch, *shape)
