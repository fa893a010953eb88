"""One backward call: the gradients of the inputs, from what the forward pass was given and gave."""

from typing import Any, NamedTuple

from . import _jit
from ._array import HOST, Adapter, Array, adapter_of, contiguous_strides, device_guard
from ._array.host import contiguous, contiguous_last
from ._call import SCALARS, layout_of
from ._kernels import HOST_KERNELS, select
from ._launch import EMULATOR
from ._problem import Form, Problem, host_metadata
from ._problem_backward import EXTRA, Backward, describe_backward
from ._scalars import recorded_state, refuse_gradient
from .errors import UnsupportedProblem
from .reference import Gradients

__all__ = ["call"]

ROWWISE = ("q", "k", "v", "dout", "out")  # what kernels read with a contiguous last dimension
GRADIENTS = {"dq": "q", "dk": "k", "dv": "v", "dbias": "attn_bias", "dsink": "learnable_sink"}


class Request(NamedTuple):
    """The arguments of `call`."""

    arrays: dict[str, Any]
    scalars: tuple[Any, ...]
    masks: tuple[Form, ...]
    wanted: tuple[str, ...]


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
    adapter = adapter_of(arrays["q"], "q")
    request = Request(arrays, scalars, masks, wanted)
    if adapter.framework == "jax" or (adapter.foreign and type(arrays["q"]) is not Array):
        return _elsewhere(adapter, request)
    return _cold(adapter, request)


def _elsewhere(adapter: Adapter, request: Request) -> Gradients:
    """Compute through the records of an unknown library's arrays."""
    if adapter.framework == "jax":
        raise UnsupportedProblem(
            "gradients of JAX arrays are not computed yet: pass NumPy or CuPy arrays"
        )
    state = {name: request.arrays[name] for name in ("rng_state",) if name in request.arrays}
    admitted = {
        name: adapter_of(x, name).admit(x, name)
        for name, x in ((name, host_metadata(x, name)) for name, x in request.arrays.items())
        if name not in state
    }
    results = call(admitted | state, *request[1:])
    return Gradients(*(None if x is None else adapter.deliver(x) for x in results))


def _cold(adapter: Adapter, request: Request) -> Gradients:
    """Check a call, choose its kernel, and run it."""
    records: dict[str, Array] = {}
    for name, x in request.arrays.items():
        if name != "rng_state":
            x = host_metadata(x, name)
            own = adapter_of(x, name)
            records[name] = own.array(x, name)
            refuse_gradient(own, x, name, "attention_backward")
    options = dict(zip(SCALARS, request.scalars, strict=True))
    options["rng_state"] = recorded_state(request.arrays.get("rng_state"))
    options["masks"] = request.masks
    options["wanted"] = request.wanted
    device, name = records["q"].device, options.pop("kernel")
    if device == HOST:
        return _on_host(adapter, records, options, name)
    with device_guard(device):
        problem, *_ = describe_backward(records, arch=_jit.compute_capability(device), **options)
        raise AssertionError(select(problem, name).name)


def _on_host(
    adapter: Adapter, records: dict[str, Array], options: dict[str, Any], name: Any
) -> Gradients:
    """Compute in host memory: on the host, or on the emulator that stands for a GPU."""
    emulator = None if isinstance(name, str) and name in HOST_KERNELS else EMULATOR.get()
    arch = None if emulator is None else emulator.arch
    problem, operands, backward = describe_backward(records, arch=arch, **options)
    kernel = select(problem, name)
    copies = {x: contiguous(records[x]) for x in ("lse",)}
    if kernel.run is None:
        copies |= {x: contiguous_last(records[x]) for x in ROWWISE}
    if any(copies[x] is not records[x] for x in copies):
        return _on_host(adapter, records | copies, options, name)
    results = {
        x: adapter.empty_strided(*like, HOST)
        for x, like in _allocations(problem, backward, records, options["layout"]).items()
    }
    backward = backward._replace(
        **{
            x: getattr(backward, x)._replace(pointer=record.pointer, owner=record.owner)
            for x, record in ((x, adapter.array(result, x)) for x, result in results.items())
        }
    )
    assert kernel.run is not None
    kernel.run(problem, operands, backward)
    return Gradients(*(results.get(x) for x in Gradients._fields))


def _allocations(
    problem: Problem, backward: Backward, records: dict[str, Array], layout: str
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], str]]:
    """Return shape, strides and dtype of every gradient as the caller has it, by name."""
    found = {
        name: layout_of(problem, getattr(backward, name), layout) for name in ("dq", "dk", "dv")
    }
    for name in problem.wanted:
        like = records[GRADIENTS[name]]
        found[name] = like.shape, contiguous_strides(like.shape), like.dtype
    return found
