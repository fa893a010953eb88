"""What a call would do, without doing it: from arrays, or from sizes and an architecture alone."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import _jit
from ._array import HOST, ITEMSIZES, Array, adapter_of, contiguous_strides
from ._facts import SCALARS, contiguous, lse_shape, uneven
from ._kernels import backward_name, rejections, select
from ._launch import Launch, load
from ._problem import (
    BROADCAST,
    DTYPES,
    LAYOUTS,
    Form,
    Operands,
    Problem,
    describe,
    forms,
    fresh,
    host_metadata,
    is_metadata,
    shapes,
    stand_in,
)
from ._problem_backward import INPUTS, Backward, describe_backward
from ._scalars import architecture, flag, hint, no_gradient, recorded_state
from .errors import (
    CompileFailed,
    DeviceUnavailable,
    InvalidArgument,
    InvalidType,
    UnsupportedProblem,
    shown,
)

__all__ = ["Explanation", "Request", "explain", "resolve", "split", "supports", "warmup"]

MAX_ELEMENTS = 2**60  # strides stay in 64 bits, in bytes too
# The optional arrays: True stands for one in a call of sizes alone.
EXTRAS = tuple(name for name in DTYPES if name not in ("q", "k", "v"))
HINTS = ("max_seqlen_q", "max_seqlen_k")
OTHERS = ("mask", "segment_ids", "out", "rng_state", "return_lse", "backward")


@dataclass(frozen=True)
class Explanation:
    """Which kernel computes a problem and with what resources, and why the others do not.

    Parameters
    ----------
    problem : Problem
        What is computed.
    kernel : str or None
        The kernel's name, None where no kernel takes the problem.
    rejected : mapping of str to str
        Every other kernel's reason, by name.
    config : mapping of str to object
        Of a CUDA kernel: tile sizes and all else that it was specialised for.
    launch : Launch or None
        Of a CUDA kernel: its text, grid, block and shared memory.
    resources : Resources or None
        Of a compiled kernel: registers, stack, spills.
    note : str or None
        Why ``resources`` are not known.
    steps : tuple of (Launch, Resources or None)
        Of a backward call on a GPU: all that it launches, in this order.
    """

    problem: Problem
    kernel: str | None
    rejected: Mapping[str, str]
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    launch: Launch | None = None
    resources: _jit.Resources | None = None
    note: str | None = None
    steps: tuple[tuple[Launch, _jit.Resources | None], ...] = ()

    def __str__(self) -> str:
        p = self.problem
        place = "host memory" if p.arch is None else f"compute capability {p.arch / 10:.1f}"
        batch = "" if p.packed else f"{p.batch}, "
        lines = [
            f"{p.op}, {p.dtype}, {p.band.label} ({p.band.alignment}), {place}",
            f"  q    ({batch}{p.len_q}, {p.heads_q}, {p.head_dim})",
            f"  k    ({batch}{p.len_k}, {p.heads_k}, {p.head_dim})",
            f"  v    ({batch}{p.len_k}, {p.heads_k}, {p.head_dim_v})",
        ]
        if p.packed:
            lines.append(f"  sequences  {p.batch}")
        if p.masks:
            lines.append(f"  masks      {' & '.join(type(mask).__name__ for mask in p.masks)}")
        if p.modifiers:
            lines.append(f"  with {', '.join(p.modifiers)}")
        if p.op == "backward":
            same = ", deterministic" if p.deterministic else ""
            lines.append(f"  gradients  {', '.join(('dq', 'dk', 'dv', *p.wanted))}{same}")
        lines.append(f"kernel: {self.kernel or 'none'}")
        if self.config:
            lines.append("  config     " + ", ".join(f"{k}={v}" for k, v in self.config.items()))
        launched = ((self.launch, self.resources),) if self.launch is not None else ()
        for launch, resources in self.steps or launched:
            if self.steps:
                lines.append(f"  step       {launch.symbol}")
            lines += _resources(launch, resources)
        if self.note:
            lines.append(f"  note       {self.note}")
        if self.rejected:
            lines += ["others:", *(f"  {reason}" for reason in self.rejected.values())]
        return "\n".join(lines)


def _resources(launch: Launch, r: _jit.Resources | None) -> list[str]:
    """Return lines for people on what a launch takes."""
    blocks, threads = math.prod(launch.grid), math.prod(launch.block)
    each = "tiles, a block a multiprocessor," if launch.persistent else "blocks"
    lines = [
        f"  launch     {blocks} {each} of {threads} threads, {launch.arch}",
        f"  shared     {launch.shared_bytes} bytes a block",
    ]
    if r is not None:
        spills = f"{r.spill_stores + r.spill_loads} bytes spilled, NVRTC {r.nvrtc_version}"
        lines.append(f"  registers  {r.registers} a thread, {spills}")
    return lines


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call without arrays; what is None follows from the others."""

    batch: Any = 1
    len_q: Any = None
    len_k: Any = None
    heads_q: Any = 1
    heads_k: Any = None
    head_dim: Any = None
    head_dim_v: Any = None
    dtype: Any = "bfloat16"
    arch: Any = 90
    device: Any = 0

    def resolved(self) -> dict[str, int]:
        """Return every size by name, checked."""
        sizes = {
            "batch": self.batch,
            "len_q": self.len_q,
            "len_k": self.len_q if self.len_k is None else self.len_k,
            "heads_q": self.heads_q,
            "heads_k": self.heads_q if self.heads_k is None else self.heads_k,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim if self.head_dim_v is None else self.head_dim_v,
        }
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 0:
                raise InvalidArgument(
                    f"`{name}` must be an integer from 0 on, got {shown(size)}: "
                    "pass it, or q, k and v"
                )
        return {name: int(size) for name, size in sizes.items()}


SIZES = frozenset(field.name for field in dataclasses.fields(Sizes)) - {"device"}


class Request(NamedTuple):
    """A call that is only talked about."""

    problem: Problem
    operands: Operands
    kernel: str | None
    device: int
    backward: Backward | None = None  # of a backward call


def split(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sizes among the arguments of a call that is talked about, and its options."""
    sizes = {name: value for name, value in arguments.items() if name in SIZES}
    return sizes, {name: value for name, value in arguments.items() if name not in SIZES}


def resolve(
    arrays: tuple[Any, Any, Any], sizes: Mapping[str, Any], options: Mapping[str, Any]
) -> Request:
    """Describe a call, from its arrays or, where all are None, from sizes by name."""
    known = {*SCALARS, *EXTRAS, *HINTS, *OTHERS}
    if unknown := options.keys() - known:
        raise InvalidType(f"`{min(unknown)}` is no option of attention: see its documentation")
    scalars = {name: options[name] for name in SCALARS if name in options}
    kernel = scalars.pop("kernel", None)
    for name in HINTS:
        hint(name, options.get(name))
    masks, mask_arrays = forms(options.get("mask"), options.get("segment_ids"))
    given = {name: options.get(name) for name in (*EXTRAS, "out")} | mask_arrays
    if all(x is None for x in arrays):
        records, arch = _placeholders(Sizes(**sizes), scalars.get("layout", "bshd"), given, masks)
    elif sizes:
        raise InvalidArgument(
            f"`{min(sizes)}` is a property of q, k and v where these are passed: leave it out"
        )
    else:
        named = dict(zip(("q", "k", "v"), arrays, strict=True))
        records = {name: _record(name, x) for name, x in named.items()}
        device = records["q"].device
        arch = None if device == HOST else _jit.compute_capability(device)
    for name, x in given.items():
        if x is not None and name not in records:
            record = stand_in(name, x, records["q"])
            if record is None and arrays[0] is None and not is_metadata(name):
                expected = "None" if name == "out" else "True or None"
                raise InvalidArgument(
                    f"`{name}` must be {expected} where sizes describe q, k and v, "
                    f"got {type(x).__name__}: pass that, or all arrays"
                )
            records[name] = record or _record(name, x)
    flag("return_lse", options.get("return_lse", False))
    state = options.get("rng_state")
    # The state decides nothing here, so that it may be missing; True stands for one.
    state = (0, 0) if state is None or state is True else recorded_state(state)
    described = {"arch": arch, "rng_state": state, "masks": masks, **scalars}
    problem, operands = describe(records, **described)
    device = records["q"].device
    if device != HOST and (names := uneven(records, ("q", "k", "v"))):
        records |= {name: contiguous(records[name]) for name in names}
        problem, operands = describe(records, **described)
    if not flag("backward", options.get("backward", False)):
        return Request(problem, operands, kernel, device)
    records |= _results(problem, records)
    problem, operands, backward = describe_backward(records, **described)
    return Request(problem, operands, kernel, device, backward)


def _results(problem: Problem, records: Mapping[str, Array]) -> dict[str, Array]:
    """Return records of what a forward call returned, and of the gradient, at no address."""
    out = records.get("out") or fresh(records["q"], problem.head_dim_v)
    shape = lse_shape(problem)
    strides, dtype = contiguous_strides(shape), problem.lse_dtype
    lse = out._replace(pointer=0, shape=shape, strides=strides, dtype=dtype)
    return {"out": out, "dout": out._replace(pointer=0), "lse": lse}


def supports(arrays: tuple[Any, Any, Any], arguments: Mapping[str, Any]) -> bool:
    """Return whether some kernel computes a call, whose arguments are right."""
    sizes, options = split(arguments)
    request = resolve(arrays, sizes, options)
    named = {**dict(zip(("q", "k", "v"), arrays, strict=True)), **arguments}
    given = {name: named.get(name) for name in ("q", "k", "v", *EXTRAS, "out")}
    try:
        select(request.problem, request.kernel)
        differentiated = [
            name
            for name, x in given.items()
            if hasattr(x, "shape") and adapter_of(x, name).grad_needed(x)
        ]
        for name in differentiated:
            if name not in INPUTS.values():
                raise no_gradient(name)
        if differentiated:
            options |= {"backward": True, "kernel": backward_name(options.get("kernel"))}
            request = resolve(arrays, sizes, options)
            select(request.problem, request.kernel)
    except UnsupportedProblem:
        return False
    return True


def explain(request: Request) -> Explanation:
    """Choose the kernel of a call, and compile it where NVRTC is there."""
    problem, operands, name, *_ = request
    rejected = rejections(problem)
    try:
        kernel = select(problem, name)
    except UnsupportedProblem:
        return Explanation(problem, None, rejected)
    rejected.pop(kernel.name, None)
    launches = kernel.launches(problem, operands, request.backward)
    if not launches or kernel.config is None:
        return Explanation(problem, kernel.name, rejected)
    resources: list[_jit.Resources | None] = []
    note = None
    for launch in launches:
        try:
            resources.append(_jit.compile(launch.unit, launch.symbol, launch.arch).resources)
        except (CompileFailed, DeviceUnavailable, UnsupportedProblem) as error:
            resources.append(None)
            note = str(error)
    config = dataclasses.asdict(kernel.config(problem))
    steps = tuple(zip(launches, resources, strict=True))
    own = steps[launches.index(kernel.main(launches))]
    if kernel.steps is None:
        steps = ()
    return Explanation(problem, kernel.name, rejected, config, *own, note, steps)


def warmup(arrays: tuple[Any, Any, Any], arguments: Mapping[str, Any]) -> None:
    """Compile and load the kernel of a call; the host's need neither.

    Sizes may have a ``device``, which decides the architecture.
    """
    sizes, options = split(arguments)
    if all(x is None for x in arrays):
        if "arch" in sizes:
            raise InvalidArgument("`arch` is that of the device: pass `device`, or leave it out")
        device = options.pop("device", 0)
        if isinstance(device, bool) or not isinstance(device, int | np.integer) or device < 0:
            raise InvalidArgument(f"`device` must be a CUDA ordinal from 0 on, got {shown(device)}")
        sizes |= {"device": device, "arch": _jit.compute_capability(device)}
    elif "device" in options:
        sizes["device"] = options.pop("device")  # which `resolve` refuses
    request = resolve(arrays, sizes, options)
    kernel = select(request.problem, request.kernel)
    for launch in kernel.launches(request.problem, request.operands, request.backward):
        if all(launch.grid):
            load(launch, request.device)


def _record(name: str, x: Any) -> Array:
    x = host_metadata(x, name)
    return adapter_of(x, name).array(x, name)


def _placeholders(
    sizes: Sizes, layout: Any, given: Mapping[str, Any], masks: tuple[Form, ...]
) -> tuple[dict[str, Array], int | None]:
    """Return records of C-contiguous arrays at no address, and the architecture.

    The options that are True become arrays too, and those of masks.
    """
    bound, dtype = sizes.resolved(), _dtype_name(sizes.dtype)
    arch = None if sizes.arch is None else architecture(sizes.arch)
    axes = LAYOUTS.get(layout, LAYOUTS["bshd"]) if isinstance(layout, str) else LAYOUTS["bshd"]
    packed = given["cu_seqlens_q"] is not None
    wanted = {name: words[0] for name, words in shapes(packed).items()} | BROADCAST
    for form in masks:
        wanted |= dict(zip(form.names, form.mask.shapes.values(), strict=True))
    bound |= {"total_q": bound["len_q"], "total_k": bound["len_k"], "batch + 1": bound["batch"] + 1}
    records = {}
    for name in ("q", "k", "v", *(x for x in given if given[x] is True and x != "out")):
        shape = tuple(bound[word] for word in wanted[name])
        if math.prod(shape) > MAX_ELEMENTS:
            raise InvalidArgument(
                f"`{name}` of shape {shown(shape)} is larger than any memory: "
                "make its sizes smaller"
            )
        if name in ("q", "k", "v") and not packed:
            shape = tuple(shape[axis] for axis in axes)
        records[name] = Array(
            pointer=0,
            shape=shape,
            strides=contiguous_strides(shape),
            dtype=dtype if name in ("q", "k", "v") else DTYPES.get(name, ("int32",))[0],
            device=HOST if arch is None else sizes.device,
            framework="no",
            readonly=False,
            owner=None,
        )
    return records, arch


def _dtype_name(dtype: Any) -> str:
    """Return the name of a dtype: a string, or any framework's object."""
    try:
        name = np.dtype(dtype).name if dtype is not None else "none"
    except (TypeError, ValueError):  # a tensor is what NumPy calls a wrong value
        name = shown(dtype).rpartition(".")[2]
    if name not in ITEMSIZES:
        raise InvalidType(f"`dtype` must be one of {', '.join(DTYPES['q'])}, got {shown(dtype)}")
    return name
