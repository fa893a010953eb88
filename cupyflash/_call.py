"""One forward call: facts that were seen before replay a plan, others are checked and planned."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from . import _jit
from ._array import HOST, ITEMSIZES, Adapter, Array, adapter_of, contiguous_strides, device_guard
from ._array.host import contiguous_last, host_view
from ._array.torch_arrays import Dynamo
from ._facts import (
    NONE,
    SCALARS,
    Allocation,
    Extras,
    contiguous,
    copied,
    extras_of,
    is_plain,
    kept,
    layout_of,
    lse_shape,
    named_places,
    same_kind,
    scalars_key,
    uneven,
    uploaded,
)
from ._kernels import HOST_KERNELS, select
from ._launch import EMULATOR, Bound, Words, bind
from ._plans import Recent
from ._problem import (
    DESCALES,
    Extent,
    Form,
    Problem,
    describe,
    extents,
    host_metadata,
    is_metadata,
)
from ._scalars import factor, flag, recorded_state
from ._views import span

__all__ = ["PLANS", "call"]

PLANS = Recent(1024)

ROWWISE = ("q", "k", "v")  # what kernels read with a contiguous last dimension

Pointers = tuple[int, int, int, int]  # of q, k, v and out, 0 for an output to allocate
Span = tuple[int, int]  # the first byte and the end, from the pointer


class Plan(NamedTuple):
    """What a warm call does."""

    bound: Bound
    device: int
    out: Allocation
    lse: Allocation
    spans: tuple[Span, ...]  # of q, k, v and out
    problem: Problem
    places: tuple[tuple[str, int], ...]  # where the words of extras go
    reach: tuple[tuple[str, Span], ...]  # of extras
    extents: tuple[Extent, ...]

    def words(self, extras: Extras) -> Words:
        """Return what a call has in the place of the planned one's."""
        return tuple((at, extras.words[name]) for name, at in self.places)


class Request(NamedTuple):
    """The arguments of `call`."""

    q: Any
    k: Any
    v: Any
    out: Any
    return_lse: bool
    scalars: tuple[Any, ...]
    extras: dict[str, Any]
    masks: tuple[Form, ...] = ()

    def arrays(self) -> dict[str, Any]:
        """Return the arrays that there are, by name; lengths may be plain lists."""
        named = {"q": self.q, "k": self.k, "v": self.v, **self.extras}
        named.pop("rng_state", None)
        if self.out is not None:
            named["out"] = self.out
        return {name: host_metadata(x, name) for name, x in named.items()}


def call(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    return_lse: bool,
    scalars: tuple[Any, ...],
    extras: dict[str, Any],
    masks: tuple[Form, ...] = (),
    settled: bool = False,
) -> Any:
    """Compute attention.

    Parameters
    ----------
    q, k, v, out, return_lse
        As `cupyflash.attention` takes them, or `cupyflash.attention_varlen`.
    scalars : tuple
        The values of `SCALARS`.
    extras : dict of str to object
        The other array arguments that are not None, by name, those of masks, and rng_state.
    masks : tuple of Form
        What extras has the arrays of.
    settled : bool
        Whether the arrays' framework has nothing to do for this call, which is as good as unseen.

    Returns
    -------
    out, or (out, lse); or NotImplemented where PyTorch has to make the call its own: `_torch` does.
    """
    adapter = adapter_of(q, "q")
    if type(return_lse) is not bool:
        return_lse = flag("return_lse", return_lse)
    kind, key = type(q), None
    if adapter.elsewhere:
        return _elsewhere(adapter, Request(q, k, v, out, return_lse, scalars, extras, masks))
    if not settled and adapter.present is not None and adapter.present():
        return NotImplemented
    if (type(k) is kind and type(v) is kind and (out is None or type(out) is kind)) or all(
        same_kind(adapter, kind, x) for x in (k, v, q if out is None else out)
    ):
        others = NONE
        try:
            key, pointers = _facts(adapter, q, k, v, out, scalars)
            if extras:
                others = extras_of(adapter, kind, extras)
                key = (key, masks, others.facts)
            plan = PLANS.get(key)
        except (TypeError, ValueError):  # unhashable, or no plain array: the checks say which
            key = plan = None
        if plan is not None and (out is None or _apart(plan, pointers, others)):
            if others.hosted:
                return _copied(plan, adapter, pointers, out, return_lse, others)
            words = plan.words(others) if extras else ()
            return _replay(plan, adapter, pointers, out, return_lse, words)
    request = Request(q, k, v, out, return_lse, scalars, extras, masks)
    if not settled and adapter.steps_in((q, k, v, out, *extras.values())):
        return NotImplemented
    return _cold(adapter, request, key)


def _facts(
    adapter: Adapter, q: Any, k: Any, v: Any, out: Any, scalars: tuple[Any, ...]
) -> tuple[tuple[Any, ...], Pointers]:
    """Return the key of a call in the plan cache, and its pointers."""
    facts, pointer = adapter.facts, adapter.pointer
    at_q, at_k, at_v = pointer(q), pointer(k), pointer(v)
    at_out, facts_out = (0, None) if out is None else (pointer(out), facts(out))
    alignment = (at_q | at_k | at_v | at_out) & 15
    key = adapter, facts(q), facts(k), facts(v), facts_out, alignment, scalars_key(scalars)
    return key, (at_q, at_k, at_v, at_out)


def _apart(plan: Plan, pointers: Pointers, others: Extras) -> bool:
    """Whether the output's bytes, with the gaps between its rows, hold none of the inputs'."""
    first, end = (pointers[3] + offset for offset in plan.spans[3])
    return all(
        end <= pointer + low or pointer + high <= first
        for pointer, (low, high) in zip(pointers[:3], plan.spans, strict=False)
    ) and all(
        end <= others.words[name][0] + low or others.words[name][0] + high <= first
        for name, (low, high) in plan.reach
    )


def _copied(
    plan: Plan,
    adapter: Adapter,
    pointers: Pointers,
    out: Any,
    return_lse: bool,
    others: Extras,
) -> Any:
    """Check the metadata of host memory, and replay a plan with copies of it on the GPU."""
    copies = copied(adapter, plan.problem, plan.extents, others.hosted, plan.device)
    words = plan.words(others.beside(adapter, copies))
    return _replay(plan, adapter, pointers, out, return_lse, words)


def _replay(
    plan: Plan, adapter: Adapter, pointers: Pointers, out: Any, return_lse: bool, words: Words = ()
) -> Any:
    """Allocate what is to be returned and launch, on the caller's current stream."""
    bound, device, out_like, lse_like = plan[:4]
    at_q, at_k, at_v, at_out = pointers
    with device_guard(device):
        if out is None:
            out = adapter.empty_strided(*out_like)
            at_out = adapter.pointer(out)
        if not return_lse:
            bound(at_q, at_k, at_v, at_out, 0, adapter.stream(device), words)
            return out
        lse = adapter.empty_strided(*lse_like)
        bound(at_q, at_k, at_v, at_out, adapter.pointer(lse), adapter.stream(device), words)
    return out, lse


def _elsewhere(adapter: Adapter, request: Request) -> Any:
    """Hand a call over to JAX, or compute it through the records of an unknown library's arrays."""
    q, k, v, out, return_lse, scalars, extras, masks = request
    if adapter.framework == "torch":
        return NotImplemented
    if adapter.framework == "jax":
        from . import _jax

        arrays = {"q": q, "k": k, "v": v, **extras} | ({} if out is None else {"out": out})
        options = dict(zip(SCALARS, scalars, strict=True))
        return _jax.attention(arrays, masks, return_lse=return_lse, **options)
    admitted = {
        name: x if _is_number(name, x) else adapter_of(x, name).admit(x, name)
        for name, x in request.arrays().items()
    }
    q, k, v, record = (admitted.pop(name, None) for name in ("q", "k", "v", "out"))
    result = call(q, k, v, record, return_lse, scalars, {**extras, **admitted}, masks)
    first, *rest = result if return_lse else (result,)
    first = adapter.deliver(first) if out is None else out
    return (first, *map(adapter.deliver, rest)) if return_lse else first


def _cold(adapter: Adapter, request: Request, key: Any) -> Any:
    """Check a call, choose its kernel, and run it; keep the plan under the key, if there is one."""
    Dynamo.hide()
    arrays: dict[str, Array] = {}
    for name, x in request.arrays().items():
        if _is_number(name, x):
            x = _filled(adapter, factor(name, x), arrays["q"].device)
        own = adapter_of(x, name)
        arrays[name] = own.array(x, name)
    options = dict(zip(SCALARS, request.scalars, strict=True))
    options["rng_state"] = recorded_state(request.extras.get("rng_state"))
    options["masks"] = request.masks
    device = arrays["q"].device
    if device == HOST:
        return _on_host(adapter, request, arrays, options)
    if not is_plain(request.scalars):
        key = None
    with device_guard(device):
        return _on_device(adapter, request, arrays, options, key)


def _is_number(name: str, x: Any) -> bool:
    """Whether an argument is a descale without an array."""
    return name in DESCALES and factor(name, x) is not None


def _filled(adapter: Adapter, value: Any, device: int) -> Any:
    """Return a number as an array of the caller's framework, where a kernel can read it."""
    with device_guard(device):
        return adapter.full(value, device)


def _on_host(
    adapter: Adapter, request: Request, arrays: dict[str, Array], options: dict[str, Any]
) -> Any:
    """Compute in host memory: on the host, or on the emulator that stands for a GPU."""
    name = options["kernel"]
    emulator = None if isinstance(name, str) and name in HOST_KERNELS else EMULATOR.get()
    described = {key: value for key, value in options.items() if key != "kernel"}
    arch = None if emulator is None else emulator.arch
    problem, operands = describe(arrays, arch=arch, **described)
    if emulator is not None and (names := uneven(arrays, ROWWISE)):
        arrays = arrays | {x: contiguous_last(arrays[x]) for x in names}
        problem, operands = describe(arrays, arch=arch, **described)
    kernel = select(problem, name)
    out, lse, sums = request.out, None, None
    if out is None:
        out = adapter.empty_strided(*layout_of(problem, operands.out, options["layout"]), HOST)
        record = adapter.array(out, "out")
        operands = operands._replace(
            out=operands.out._replace(pointer=record.pointer, owner=record.owner)
        )
    if request.return_lse:
        lse = adapter.empty(lse_shape(problem), problem.lse_dtype, HOST)
        sums = host_view(adapter.array(lse, "lse"))
        sums = sums[None] if problem.packed else sums
    if kernel.run is not None:
        kernel.run(problem, operands, sums)
    else:
        assert emulator is not None
        assert kernel.launch is not None
        emulator.attend(kernel.launch, problem, operands, sums)
    return (out, lse) if request.return_lse else out


def _on_device(
    adapter: Adapter, request: Request, arrays: dict[str, Array], options: dict[str, Any], key: Any
) -> Any:
    """Plan a call on a GPU, whose device is current, and run the plan."""
    device, name = arrays["q"].device, options.pop("kernel")
    arch = _jit.compute_capability(device)
    problem, operands = describe(arrays, arch=arch, **options)
    if names := uneven(arrays, ROWWISE):
        even = arrays | {x: contiguous(arrays[x]) for x in names}
        select(describe(even, arch=arch, **options)[0], name)  # before anything is copied
        q, k, v = (kept(adapter, adapter.contiguous_last(x), device) for x in request[:3])
        return call(q, k, v, *request[3:], settled=True)
    kernel = select(problem, name)
    hosted = {x: array for x, array in arrays.items() if is_metadata(x) and array.device == HOST}
    copies = uploaded(adapter, hosted, device)
    if copies:
        arrays = arrays | {x: adapter.array(copy, x) for x, copy in copies.items()}
        problem, operands = describe(arrays, arch=arch, **options)
    assert kernel.launch is not None
    launch = kernel.launch(problem, operands)
    four = operands[:4]
    extras = {x: arrays[x] for x in request.extras if x in arrays}
    if isinstance(operands.rng_state, Array):
        extras["rng_state"] = operands.rng_state
    plan = Plan(
        bound=bind(launch, device, capturing=adapter.capturing(device)),
        device=device,
        out=(*layout_of(problem, operands.out, options["layout"]), device),
        lse=(lse_shape(problem), contiguous_strides(lse_shape(problem)), problem.lse_dtype, device),
        spans=tuple(_span(array) for array in four),
        problem=problem,
        places=named_places(launch, request.masks),
        reach=tuple((x, _span(array)) for x, array in extras.items() if x not in hosted),
        extents=extents(problem, operands, request.masks),
    )
    if key is not None and _replays(plan, request.extras):
        PLANS.put(key, plan)
    at_q, at_k, at_v, at_out = (array.pointer for array in four)
    return _replay(plan, adapter, (at_q, at_k, at_v, at_out), request.out, request.return_lse)


def _span(array: Array) -> Span:
    return span(array, ITEMSIZES[array.dtype])


def _replays(plan: Plan, extras: Mapping[str, Any]) -> bool:
    """Whether a plan has a place for all that changes between calls of the same facts."""
    fixed = {*DESCALES} if plan.problem.dropout_p else {*DESCALES, "rng_state"}
    return extras.keys() - fixed <= {name for name, _ in plan.places}
