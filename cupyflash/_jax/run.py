"""What XLA calls back: a call's kernel on XLA's buffers and stream.

Under ``vmap`` the buffers have the mapped dimensions in front: they join the batch where strides
allow that, otherwise the items run one by one.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import _jit
from .._array import HOST, ITEMSIZES, Array, adapter_of, contiguous_strides, device_guard, dlpack
from .._array.base import dtype_name
from .._array.host import host_view
from .._kernels import select
from .._launch import Bound, bind
from .._problem import DESCALES, METADATA, Form, Problem, describe

CORE = ("q", "k", "v")
ALIGNMENT = 16  # bytes of the widest access

Records = dict[str, Array]
# By name: shape, strides, dtype, and bytes past a multiple of ALIGNMENT.
Views = tuple[tuple[str, tuple[int, ...], tuple[int, ...], str, int], ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """All of a call but its arrays, hashable: JAX compiles each once."""

    problem: Problem
    ranks: tuple[tuple[str, int], ...]  # of the arrays in order, without what `vmap` adds
    layout: str
    return_lse: bool
    kernel: str | None
    masks: tuple[Form, ...]

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that are no arrays, as `describe` takes them."""
        problem = self.problem
        return {
            "softmax_scale": problem.scale,
            "alignment": problem.band.alignment,
            "softcap": problem.softcap,
            "dropout_p": problem.dropout_p,
            "layout": self.layout,
            "masks": (Form("mask", problem.band, ()), *self.masks),
        }


def compute(call: Call, context: Any, results: Any, *buffers: Any) -> None:
    """Compute from XLA's buffers into others of its."""
    names = [name for name, _ in call.ranks]
    records = dict(zip(names, map(_buffer, buffers), strict=True))
    records |= zip(("out", "lse"), map(_buffer, results), strict=False)
    packed = call.problem.packed
    ranks = {**dict(call.ranks), "out": 3 if packed else 4, "lse": 2 if packed else 3}
    device = records["q"].device
    if device == HOST:
        for item in _items(records, ranks):
            _on_host(call, item)
    else:
        with device_guard(device):
            for item in _items(records, ranks):
                _on_gpu(call, item, context.stream)


def _buffer(buffer: Any) -> Array:
    """Return the record of one of XLA's buffers, which lives as long as the callback runs."""
    if buffer.__dlpack_device__()[0] == dlpack.CPU:
        x = np.asarray(buffer)
        return adapter_of(x, "buffer").array(x, "buffer")
    return Array(
        pointer=dlpack.address(buffer.__dlpack__()),  # its other interface knows no fp8
        shape=buffer.shape,
        strides=contiguous_strides(buffer.shape),
        dtype=dtype_name(buffer.dtype, "buffer"),
        device=buffer.__dlpack_device__()[1],
        framework="jax",
        readonly=False,
        owner=buffer,
    )


def _items(records: Records, ranks: dict[str, int]) -> Iterator[Records]:
    """Yield the calls to make: one, if there are no mapped dimensions or they join the batch."""
    mapped = records["out"].shape[: -ranks["out"]]
    if not mapped:
        yield records
        return
    if records.keys() <= {*CORE, "out", "lse"}:
        folded = {name: _fold(x, ranks[name], mapped) for name, x in records.items()}
        if all(folded.values()):
            yield {name: x for name, x in folded.items() if x is not None}
            return
    for index in np.ndindex(mapped):
        yield {name: _item(x, ranks[name], index) for name, x in records.items()}


def _fold(x: Array, rank: int, mapped: tuple[int, ...]) -> Array | None:
    """Return an array with the mapped dimensions in its batch, or None if no stride does that."""
    own, (batch, *rest) = x.shape[:-rank], x.shape[-rank:]
    strides = x.strides[-rank:]
    if own != mapped:
        if batch != 1 or math.prod(own) != 1:
            return None
        strides = (0, *strides[1:])
    return x._replace(shape=(math.prod(mapped) * batch, *rest), strides=strides)


def _item(x: Array, rank: int, index: tuple[int, ...]) -> Array:
    """Return one item of an array; dimensions of size 1 repeat."""
    own = len(x.shape) - rank  # dimensions that `vmap` has added: all of them, of a number
    steps = zip(x.shape[:own], x.strides, index, strict=False)
    offset = sum(stride * i for size, stride, i in steps if size > 1)
    return x._replace(
        pointer=x.pointer + offset * ITEMSIZES[x.dtype],
        shape=x.shape[own:],
        strides=x.strides[own:],
    )


def _on_host(call: Call, item: Records) -> None:
    """Compute one item in host memory."""
    lse, state = item.pop("lse", None), item.pop("rng_state", None)
    # Values that nobody could check before are not refused now: the kernels clip them.
    lengths: dict[str, Any] = {name: item[name] for name in METADATA if name in item}
    unread = {name: x._replace(pointer=0) for name, x in lengths.items()}
    problem, operands = describe(
        item | unread,
        arch=None,
        rng_state=None if state is None else host_view(state),
        **call.options,
    )
    kernel = select(problem, call.kernel)
    assert kernel.run is not None
    sums = None if lse is None else host_view(lse)
    if sums is not None and problem.packed:
        sums = sums[None]
    kernel.run(problem, operands._replace(**lengths), sums)


def _on_gpu(call: Call, item: Records, stream: int) -> None:
    """Launch one item; its device is current."""
    q, k, v, out = (item[name].pointer for name in (*CORE, "out"))
    lse = item["lse"].pointer if "lse" in item else 0
    device = item["q"].device
    if any(name in item for name in DESCALES):  # a launch holds their addresses
        records = {name: x for name, x in item.items() if name != "lse"}
        bound, places = _bound(records, call)
    else:
        bound, places = bound_of(call, views_of(item), device)
    words = tuple((at, (item[name].pointer,)) for name, at in places)
    bound(q, k, v, out, lse, stream, words)


def views_of(records: Records) -> Views:
    """Return what a launch depends on of all arrays but the outputs, whose addresses count."""
    shift = math.gcd(ALIGNMENT, *(records[x].pointer for x in (*CORE, "out") if x in records))
    return tuple(
        (
            *(name, x.shape, x.strides, x.dtype),
            shift % ALIGNMENT if name in CORE else x.pointer % ALIGNMENT,
        )
        for name, x in records.items()
        if name not in ("out", "lse")
    )


Places = tuple[tuple[str, int], ...]  # where Params hold the addresses of other arrays, by name


@functools.lru_cache(maxsize=1024)
def bound_of(call: Call, views: Views, device: int) -> tuple[Bound, Places]:
    """Return the launch of a call's kernel, loaded, for arrays of these facts."""
    records = {
        name: Array(shift, shape, strides, dtype, device, "jax", True, None)
        for name, shape, strides, dtype, shift in views
    }
    return _bound(records, call)


def _bound(records: Records, call: Call) -> tuple[Bound, Places]:
    """Return the launch of a call's kernel, loaded, and what moves with a call's arrays."""
    device = records["q"].device
    arch = _jit.compute_capability(device)
    arrays = {name: x for name, x in records.items() if name != "rng_state"}
    problem, operands = describe(
        arrays, arch=arch, rng_state=records.get("rng_state"), **call.options
    )
    kernel = select(problem, call.kernel)
    assert kernel.launch is not None
    launch = kernel.launch(problem, operands)
    numbered = [name for form in call.masks for name in form.names]
    places = ((x if isinstance(x, str) else numbered[x], at) for x, at in launch.places)
    with device_guard(device):
        return bind(launch, device), tuple(places)
