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
from .._problem import DESCALES, Problem, describe

CORE = ("q", "k", "v")
ALIGNMENT = 16  # bytes of the widest access

Records = dict[str, Array]
Views = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # shapes and strides of q, k and v


@dataclasses.dataclass(frozen=True)
class Call:
    """All of a call but its arrays, hashable: JAX compiles each once."""

    problem: Problem
    ranks: tuple[tuple[str, int], ...]  # of the arrays in order, without what `vmap` adds
    layout: str
    return_lse: bool
    kernel: str | None

    @property
    def options(self) -> dict[str, Any]:
        """The scalar arguments, as `describe` takes them."""
        problem, band = self.problem, self.problem.band
        return {
            "softmax_scale": problem.scale,
            "window_size": (band.left, band.right),
            "alignment": band.alignment,
            "softcap": problem.softcap,
            "dropout_p": problem.dropout_p,
            "layout": self.layout,
        }


def compute(call: Call, context: Any, results: Any, *buffers: Any) -> None:
    """Compute from XLA's buffers into others of its."""
    names = [name for name, _ in call.ranks]
    records = dict(zip(names, map(_buffer, buffers), strict=True))
    records |= zip(("out", "lse"), map(_buffer, results), strict=False)
    ranks = {**dict(call.ranks), "out": 4, "lse": 3}
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
    mapped = records["out"].shape[:-4]
    if not mapped:
        yield records
        return
    folded = {name: _fold(x, ranks[name], mapped) for name, x in records.items()}
    if records.keys() <= {*CORE, "out", "lse"} and all(folded.values()):
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
    steps = zip(x.shape[:-rank], x.strides, index, strict=False)
    offset = sum(stride * i for size, stride, i in steps if size > 1)
    return x._replace(
        pointer=x.pointer + offset * ITEMSIZES[x.dtype],
        shape=x.shape[-rank:],
        strides=x.strides[-rank:],
    )


def _on_host(call: Call, item: Records) -> None:
    """Compute one item in host memory."""
    lse, state = item.pop("lse", None), item.pop("rng_state", None)
    for name, limit in (("seqused_q", call.problem.len_q), ("seqused_k", call.problem.len_k)):
        if name in item:  # values that nobody could check before are clamped
            lengths = [min(max(n, 0), limit) for n in host_view(item[name]).tolist()]
            item[name] = adapter_of(clamped := np.array(lengths), name).array(clamped, name)
    problem, operands = describe(
        item, arch=None, rng_state=None if state is None else host_view(state), **call.options
    )
    kernel = select(problem, call.kernel)
    assert kernel.run is not None
    kernel.run(problem, operands, None if lse is None else host_view(lse))


def _on_gpu(call: Call, item: Records, stream: int) -> None:
    """Launch one item; its device is current."""
    q, k, v, out = (item[name].pointer for name in (*CORE, "out"))
    lse = item["lse"].pointer if "lse" in item else 0
    if any(name in item for name in DESCALES):
        bound = _bound({name: x for name, x in item.items() if name != "lse"}, call)
    else:
        bound = bound_of(call, views_of(item), item["q"].device, (q | k | v | out) % ALIGNMENT)
    bound(q, k, v, out, lse, stream)


def views_of(records: Records) -> Views:
    return tuple((records[name].shape, records[name].strides) for name in CORE)


@functools.lru_cache(maxsize=1024)
def bound_of(call: Call, views: Views, device: int, shift: int) -> Bound:
    """Return the launch of a call's kernel, loaded, for arrays at multiples of 16 bytes + shift."""
    records = {
        name: Array(shift, *view, call.problem.dtype, device, "jax", True, None)
        for name, view in zip(CORE, views, strict=True)
    }
    return _bound(records, call)


def _bound(records: Records, call: Call) -> Bound:
    """Return the launch of a call's kernel, loaded, whose descales stay where they are."""
    device = records["q"].device
    arch = _jit.compute_capability(device)
    problem, operands = describe(records, arch=arch, **call.options)
    kernel = select(problem, call.kernel)
    assert kernel.launch is not None
    with device_guard(device):
        return bind(kernel.launch(problem, operands), device)
