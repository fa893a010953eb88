"""What XLA calls back: a call's kernels on XLA's buffers and stream.

Under ``vmap`` the buffers have the mapped dimensions in front: they join the batch where strides
allow that, otherwise the items run one by one. Both by the kernel that was loaded while JAX traced
one item.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from .. import _jit
from .._array import HOST, ITEMSIZES, Array, adapter_of, contiguous_strides, device_guard, dlpack
from .._array.base import dtype_name
from .._array.host import host_view
from .._kernels import Kernel, select, takers
from .._launch import Bound, bind
from .._problem import DESCALES, METADATA, Problem
from .._steps import BoundSteps, bind_steps, scratch_bytes
from .calls import SCRATCH, Call

CORE = ("q", "k", "v")
ROWWISE = (*CORE, "out", "dout", "dq", "dk", "dv")  # what kernels read and write by rows
FOLDING = {*ROWWISE, "lse", "dlse", SCRATCH}  # what has the batch in front
ALIGNMENT = 16  # bytes of the widest access

Records = dict[str, Array]
# By name: shape, strides, dtype, and bytes past a multiple of ALIGNMENT.
Views = tuple[tuple[str, tuple[int, ...], tuple[int, ...], str, int], ...]


def compute(call: Call, context: Any, results: Any, *buffers: Any) -> None:
    """Compute from XLA's buffers into others of its."""
    records = dict(zip(call.ranks, map(_buffer, (*buffers, *results)), strict=True))
    device = records["q"].device
    items = _items(call, records)
    if device == HOST:
        for item in items:
            _on_host(call, item)
    else:
        with device_guard(device):
            for item in items:
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


def _items(call: Call, records: Records) -> Iterable[Records]:
    """Return the calls to make: one, if there are no mapped dimensions or they join the batch."""
    ranks, first = call.ranks, call.results[0].name
    mapped = records[first].shape[: -ranks[first]]
    if not mapped:
        return (records,)
    joined = _joined(call, records, mapped)
    device = records["q"].device
    if joined is not None and (device == HOST or takes(call, views_of(call, joined), device)):
        return (joined,)
    return _apart(call, records, mapped)


def _joined(call: Call, records: Records, mapped: tuple[int, ...]) -> Records | None:
    """Return a call's arrays with the mapped dimensions in the batch, or None."""
    if not records.keys() <= FOLDING:
        return None
    folded = {}
    for name, x in records.items():
        # Kernels read an LSE as contiguous.
        found = _fold(x, call.ranks[name], mapped, repeats=name != "lse")
        if found is None:
            return None
        folded[name] = found
    return folded


def _apart(call: Call, records: Records, mapped: tuple[int, ...]) -> Iterator[Records]:
    """Yield the arrays of each item."""
    for index in np.ndindex(mapped):
        yield {name: _item(x, call.ranks[name], index) for name, x in records.items()}


def _fold(x: Array, rank: int, mapped: tuple[int, ...], *, repeats: bool) -> Array | None:
    """Return an array with the mapped dimensions in its batch, or None if no stride does that.

    Where it lacks them, a stride of 0 would, if it may have one.
    """
    own, (batch, *rest) = x.shape[:-rank], x.shape[-rank:]
    strides = x.strides[-rank:]
    if own != mapped:
        if batch != 1 or math.prod(own) != 1 or not repeats:
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
    state = item.get("rng_state")
    # Values that nobody could check before are not refused now: the kernels clip them.
    lengths: dict[str, Any] = {name: item[name] for name in METADATA if name in item}
    unread = {name: x._replace(pointer=0) for name, x in lengths.items()}
    problem, operands, backward = call.described(
        item | unread, None, None if state is None else host_view(state)
    )
    operands = operands._replace(**lengths)
    kernel = select(problem, call.kernel)
    assert kernel.run is not None
    if backward is not None:
        kernel.run(problem, operands, backward)
        return
    sums = host_view(item["lse"]) if "lse" in item else None
    if sums is not None and problem.packed:
        sums = sums[None]
    kernel.run(problem, operands, sums)


def _on_gpu(call: Call, item: Records, stream: int) -> None:
    """Launch one item; its device is current."""
    device = item["q"].device
    if call.backward:
        steps = steps_of(call, views_of(call, item), device)
        scratch = item.get(SCRATCH)
        assert steps.scratch <= (scratch.shape[0] if scratch else 0), "too little scratch"
        words = {name: (x.pointer,) for name, x in item.items()}
        steps(words, scratch.pointer if scratch else 0, stream)
        return
    q, k, v, out = (item[name].pointer for name in (*CORE, "out"))
    lse = item["lse"].pointer if "lse" in item else 0
    if any(name in item for name in DESCALES):  # a launch holds their addresses
        bound, places = _bound(call, item)
    else:
        bound, places = bound_of(call, views_of(call, item), device)
    bound(q, k, v, out, lse, stream, tuple((at, (item[name].pointer,)) for name, at in places))


def views_of(call: Call, records: Records) -> Views:
    """Return what launches depend on of a call's operands and gradients."""
    shift = math.gcd(ALIGNMENT, *(records[x].pointer for x in ROWWISE if x in records))
    shift %= ALIGNMENT
    return tuple(
        (name, x.shape, x.strides, x.dtype, shift if name in ROWWISE else x.pointer % ALIGNMENT)
        for name in call.planned
        for x in [records[name]]
    )


def _recorded(views: Views, device: int) -> Records:
    """Return records of arrays of these facts."""
    return {
        name: Array(shift, shape, strides, dtype, device, "jax", True, None)
        for name, shape, strides, dtype, shift in views
    }


@functools.lru_cache(maxsize=1024)
def row_of(call: Call, device: int) -> Kernel:
    """Return the row that is loaded while JAX traces a call: of one item, C-contiguous."""
    records = call.records(device)
    arch = _jit.compute_capability(device)
    return select(call.described(records, arch, records.get("rng_state"))[0], call.kernel)


def _chosen(call: Call, problem: Problem, device: int) -> Kernel:
    """Return the row that was loaded while JAX traced, if it takes a problem, else another."""
    row = row_of(call, device)
    return row if row.refusal(problem) is None else select(problem, call.kernel)


@functools.lru_cache(maxsize=1024)
def takes(call: Call, views: Views, device: int) -> bool:
    """Whether the row that was loaded while JAX traced a call takes arrays of these facts."""
    records = _recorded(views, device)
    arch = _jit.compute_capability(device)
    problem, *_ = call.described(records, arch, records.get("rng_state"))
    return row_of(call, device).refusal(problem) is None


Places = tuple[tuple[str, int], ...]  # where Params hold the addresses of other arrays, by name


@functools.lru_cache(maxsize=1024)
def bound_of(call: Call, views: Views, device: int) -> tuple[Bound, Places]:
    """Return the launch of a forward call's kernel, loaded, for arrays of these facts."""
    return _bound(call, _recorded(views, device))


def _bound(call: Call, records: Records) -> tuple[Bound, Places]:
    """Return the launch of a call's kernel, loaded, and what moves with a call's arrays."""
    device = records["q"].device
    arch = _jit.compute_capability(device)
    problem, operands, _ = call.described(records, arch, records.get("rng_state"))
    kernel = _chosen(call, problem, device)
    assert kernel.launch is not None
    launch = kernel.launch(problem, operands)
    named = ((call.numbered[x] if isinstance(x, int) else x, at) for x, at in launch.places)
    with device_guard(device):
        return bind(launch, device), tuple(named)


@functools.lru_cache(maxsize=1024)
def steps_of(call: Call, views: Views, device: int) -> BoundSteps:
    """Return the launches of a backward call's kernels, loaded, for arrays of these facts."""
    records = _recorded(views, device)
    arch = _jit.compute_capability(device)
    problem, operands, backward = call.described(records, arch, records.get("rng_state"))
    kernel = _chosen(call, problem, device)
    assert backward is not None
    assert kernel.steps is not None
    steps = kernel.steps(problem, operands, backward)
    with device_guard(device):
        return bind_steps(steps, device, call.numbered)


def prepared(call: Call) -> Call:
    """Return a call with its kernels loaded on the GPUs where JAX may run it, and its scratch."""
    gpus = [device for device in call.devices if device != HOST]
    if call.backward:
        scratch = max((_scratch(call, device) for device in gpus), default=0)
        call = dataclasses.replace(call, scratch=scratch)
    if call.problem.arch is not None:
        load = steps_of if call.backward else bound_of
        for device in gpus:
            load(call, views_of(call, call.records(device)), device)
    return call


def _scratch(call: Call, device: int) -> int:
    """Return how many bytes are enough on a GPU, whichever kernel takes the items of ``vmap``.

    They may be of other strides and alignments than the call.
    """
    records = call.records(device)
    arch = _jit.compute_capability(device)
    problem, operands, backward = call.described(records, arch, records.get("rng_state"))
    assert backward is not None
    return max(
        (
            scratch_bytes(kernel.steps(problem, operands, backward))
            for kernel in takers(problem, call.kernel)
            if kernel.steps is not None
        ),
        default=0,
    )
