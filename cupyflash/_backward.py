"""One backward call: the gradients of the inputs, from what the forward pass was given and gave.

Calls on a GPU whose facts were seen before replay a plan, as forward calls do.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from . import _jit
from ._array import HOST, Adapter, Array, adapter_of, contiguous_strides, device_guard, host
from ._array.torch_arrays import Dynamo
from ._facts import (
    NONE,
    SCALARS,
    Allocation,
    Extras,
    Words,
    contiguous,
    copied,
    extras_of,
    is_plain,
    kept,
    layout_of,
    same_kind,
    scalars_key,
    uneven,
    uploaded,
)
from ._kernels import HOST_KERNELS, select
from ._launch import EMULATOR
from ._plans import Recent
from ._problem import Extent, Form, Operands, Problem, extents, host_metadata, is_metadata
from ._problem_backward import EXTRA, INPUTS, Backward, describe_backward, refuse_float8
from ._scalars import recorded_state, refuse_gradient
from ._steps import BoundSteps, bind_steps
from .reference import Gradients

__all__ = ["PLANS", "call"]

PLANS = Recent(1024)

ROWWISE = ("q", "k", "v", "dout", "out")  # what kernels read with a contiguous last dimension
DENSE = ("lse",)  # what they read as C-contiguous


class Request(NamedTuple):
    """The arguments of `call`."""

    arrays: dict[str, Any]
    scalars: tuple[Any, ...]
    masks: tuple[Form, ...]
    wanted: tuple[str, ...]


class Plan(NamedTuple):
    """What a warm call does."""

    bound: BoundSteps
    device: int
    results: tuple[tuple[str, Allocation], ...]
    problem: Problem
    extents: tuple[Extent, ...]


class Copies(NamedTuple):
    """What a warm call does first: it copies these arrays, and is another call then."""

    names: tuple[str, ...]


def call(
    arrays: dict[str, Any],
    scalars: tuple[Any, ...],
    masks: tuple[Form, ...] = (),
    wanted: tuple[str, ...] = tuple(EXTRA),
) -> Gradients:
    """Compute gradients.

    Parameters
    ----------
    arrays : dict of str to object
        dout, q, k, v, out and lse; dlse, the other array arguments of the forward call, the arrays
        of its masks and rng_state, where they are not None.
    scalars : tuple
        The values of `SCALARS`.
    masks : tuple of Form
        What arrays has the arrays of.
    wanted : tuple of str
        Which of "dbias" and "dsink" are to be computed, where there is a bias or a sink.
    """
    q = arrays["q"]
    adapter = adapter_of(q, "q")
    key, extras, plan = None, NONE, None
    request = Request(arrays, scalars, masks, wanted)
    if adapter.elsewhere:
        return _elsewhere(adapter, request)
    try:
        if adapter.device(q) != HOST:
            key, extras = _facts(adapter, request)
            plan = PLANS.get(key)
    except (TypeError, ValueError):  # unhashable, or no plain array: the checks say which
        key = plan = None
    if plan is None:
        return _cold(adapter, request, key)
    if isinstance(plan, Copies):
        return _with_copies(adapter, request, plan)
    copies = {}
    if extras.hosted:
        copies = copied(adapter, plan.problem, plan.extents, extras.hosted, plan.device)
    return _replay(adapter, plan, extras.beside(adapter, copies).words)


def _facts(adapter: Adapter, request: Request) -> tuple[Any, Extras]:
    """Return the key of a call in the plan cache, and the words of its arrays."""
    rest = dict(request.arrays)
    kind, facts, words, alignment = type(rest["q"]), [], {}, 0
    for name in ROWWISE:
        x = rest.pop(name)
        if not same_kind(adapter, kind, x):
            raise TypeError("an array of another kind")
        at = adapter.pointer(x)
        alignment |= at
        facts.append(adapter.facts(x))
        words[name] = (at,)
    extras = extras_of(adapter, kind, rest)
    key = (
        adapter,
        *facts,
        alignment & 15,
        extras.facts,
        scalars_key(request.scalars),
        request.masks,
        request.wanted,
    )
    return key, extras._replace(words=words | extras.words)


def _replay(adapter: Adapter, plan: Plan, words: Words) -> Gradients:
    """Allocate the gradients and launch, on the caller's current stream."""
    bound, device = plan.bound, plan.device
    with device_guard(device):
        results = {name: adapter.empty_strided(*like) for name, like in plan.results}
        words = words | {name: (adapter.pointer(x),) for name, x in results.items()}
        at, scratch = 0, None
        if bound.scratch:
            scratch = kept(adapter, adapter.empty((bound.scratch,), "uint8", device), device)
            at = adapter.pointer(scratch)
        bound(words, at, adapter.stream(device))
    return Gradients(*(results.get(name) for name in Gradients._fields))


def _with_copies(adapter: Adapter, request: Request, plan: Copies) -> Gradients:
    """Compute from copies of some arrays, on their device."""
    device = adapter.device(request.arrays["q"])
    with device_guard(device):
        copies = {
            name: kept(adapter, copy(request.arrays[name]), device)
            for name in plan.names
            for copy in [adapter.contiguous if name in DENSE else adapter.contiguous_last]
        }
    return call(request.arrays | copies, *request[1:])


def _elsewhere(adapter: Adapter, request: Request) -> Gradients:
    """Hand a call over to JAX, or compute it through the records of an unknown library's arrays."""
    if adapter.framework == "jax":
        from . import _jax

        options = dict(zip(SCALARS, request.scalars, strict=True))
        return _jax.attention_backward(
            request.arrays, request.masks, wanted=request.wanted, **options
        )
    admitted = dict(request.arrays)
    for name, x in request.arrays.items():
        if name != "rng_state":
            x = host_metadata(x, name)
            admitted[name] = adapter_of(x, name).admit(x, name)
    results = call(admitted, *request[1:])
    return Gradients(*(None if x is None else adapter.deliver(x) for x in results))


def _cold(adapter: Adapter, request: Request, key: Any) -> Gradients:
    """Check a call, choose its kernel, and run it; keep the plan under the key, if there is one."""
    Dynamo.hide()
    records: dict[str, Array] = {}
    for name, x in request.arrays.items():
        if name != "rng_state":
            x = host_metadata(x, name)
            own = adapter_of(x, name)
            records[name] = own.array(x, name)
            refuse_gradient(own, x, name, "attention_backward")
    refuse_float8(records["q"].dtype)
    options = dict(zip(SCALARS, request.scalars, strict=True))
    options["rng_state"] = recorded_state(request.arrays.get("rng_state"))
    options |= {"masks": request.masks, "wanted": request.wanted}
    device, name = records["q"].device, options.pop("kernel")
    if device == HOST:
        return _on_host(adapter, records, options, name)
    with device_guard(device):
        return _on_device(
            adapter, request, records, options, name, key if is_plain(request.scalars) else None
        )


def _on_host(
    adapter: Adapter, records: dict[str, Array], options: dict[str, Any], name: Any
) -> Gradients:
    """Compute in host memory: on the host, or on the emulator that stands for a GPU."""
    emulator = None if isinstance(name, str) and name in HOST_KERNELS else EMULATOR.get()
    arch = None if emulator is None else emulator.arch
    # NumPy reads rows of any strides.
    copied_here = [x for x in _uneven(records) if emulator is not None or x in DENSE]
    records = records | {x: host.contiguous(records[x]) for x in copied_here}
    problem, operands, backward = describe_backward(records, arch=arch, **options)
    kernel = select(problem, name)
    results, there = {}, {}
    for x, like in _allocations(problem, backward, records, options["layout"]):
        results[x] = adapter.empty_strided(*like)
        record = adapter.array(results[x], x)
        there[x] = getattr(backward, x)._replace(pointer=record.pointer, owner=record.owner)
    backward = backward._replace(**there)
    if kernel.run is not None:
        kernel.run(problem, operands, backward)
    else:
        assert emulator is not None
        assert kernel.steps is not None
        emulator.differentiate(kernel.steps, problem, operands, backward)
    return Gradients(*(results.get(x) for x in Gradients._fields))


def _on_device(
    adapter: Adapter,
    request: Request,
    records: dict[str, Array],
    options: dict[str, Any],
    name: Any,
    key: Any,
) -> Gradients:
    """Plan a call on a GPU, whose device is current, and run the plan."""
    device = records["q"].device
    options["arch"] = _jit.compute_capability(device)
    names = _uneven(records)
    copies = {x: contiguous(records[x]) for x in names}
    problem, operands, backward = describe_backward(records | copies, **options)
    kernel = select(problem, name)
    if names:
        first = Copies(names)
        if key is not None:
            PLANS.put(key, first)
        return _with_copies(adapter, request, first)
    hosted = {x: array for x, array in records.items() if is_metadata(x) and array.device == HOST}
    uploads = uploaded(adapter, hosted, device)
    if uploads:
        records = records | {x: adapter.array(copy, x) for x, copy in uploads.items()}
        problem, operands, backward = describe_backward(records, **options)
    assert kernel.steps is not None
    plan = Plan(
        bound=bind_steps(
            kernel.steps(problem, operands, backward),
            device,
            (x for form in request.masks for x in form.names),
            capturing=adapter.capturing(device),
        ),
        device=device,
        results=_allocations(problem, backward, records, options["layout"]),
        problem=problem,
        extents=extents(problem, operands, request.masks),
    )
    if key is not None and _replays(plan, request.arrays):
        PLANS.put(key, plan)
    return _replay(adapter, plan, _words(records, operands))


def _uneven(records: Mapping[str, Array]) -> tuple[str, ...]:
    """Return which arrays no kernel reads as they lie; their ranks are not checked yet."""
    dense = [x for x in DENSE if records[x].strides != contiguous_strides(records[x].shape)]
    return (*uneven(records, ROWWISE), *dense)


def _words(records: Mapping[str, Array], operands: Operands) -> Words:
    """Return the words of a call that was described."""
    words: Words = {name: (x.pointer,) for name, x in records.items()}
    state = operands.rng_state
    if state is not None:
        words["rng_state"] = (state.pointer,) if isinstance(state, Array) else (0, *state)
    return words


def _allocations(
    problem: Problem, backward: Backward, records: Mapping[str, Array], layout: str
) -> tuple[tuple[str, Allocation], ...]:
    """Return, for every gradient, its name and what to allocate as the caller has it."""
    found = []
    for name in ("dq", "dk", "dv", *problem.wanted):
        like = records[INPUTS[name]]
        shape, strides, dtype = like.shape, contiguous_strides(like.shape), like.dtype
        if name not in EXTRA:
            shape, strides, dtype = layout_of(problem, getattr(backward, name), layout)
        found.append((name, (shape, strides, dtype, like.device)))
    return tuple(found)


def _replays(plan: Plan, arrays: Mapping[str, Any]) -> bool:
    """Whether a plan has a place for all that changes between calls of the same facts."""
    unread = set() if plan.problem.dropout_p else {"rng_state"}
    if "dsink" not in plan.problem.wanted:
        unread.add("learnable_sink")  # the log-sum-exp has it already
    changing = arrays.keys() - unread | {name for name, _ in plan.results}
    return changing <= plan.bound.places
