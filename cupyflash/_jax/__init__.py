"""JAX arrays and tracers: a call becomes one operation of XLA, whose buffers a callback is given.

While JAX traces, the call is checked, its kernel chosen and loaded. ``run`` is what XLA calls.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import _jit
from .._array import HOST, Array, adapter_of, contiguous_strides
from .._array.host import host_view
from .._array.jax_arrays import device_of, element_type, is_tracer, ordinal
from .._kernels import select
from .._philox import seed_offset
from .._problem import (
    DESCALES,
    Form,
    Problem,
    describe,
    host_metadata,
    is_metadata,
    stand_in,
)
from .._problem_backward import describe_backward, refuse_float8
from .._scalars import factor, is_array, random_state, recorded_state
from ..errors import InvalidArgument
from ..reference import Gradients
from .calls import Call, Spec
from .program import attend, differentiate
from .run import prepared

__all__ = ["attention", "attention_backward"]

GPUS = ("gpu", "cuda")  # platforms


def attention(
    arrays: dict[str, Any], masks: Sequence[Form], *, return_lse: bool = False, **options: Any
) -> Any:
    """Compute attention of JAX arrays, eagerly or inside of JAX's transformations.

    Parameters
    ----------
    arrays : dict of str to object
        q, k, v, and the other array arguments of `cupyflash.attention`, of
        `cupyflash.attention_varlen` and of masks, where they are not None; ``out`` must not be
        there. ``rng_state`` is a pair of integers, or an array, which is read when XLA runs.
    masks : sequence of Form
        What arrays has the arrays of.
    return_lse
        As `cupyflash.attention` takes it.
    **options
        The other arguments of `cupyflash.attention`, all of them.

    Returns
    -------
    out, or (out, lse)
    """
    if "out" in arrays:
        raise InvalidArgument(
            "`out` must be None for JAX arrays, which cannot be written: use the result"
        )
    results = attend(*_call(describe, arrays, masks, return_lse=return_lse, **options))
    return results if return_lse else results[0]


def attention_backward(
    arrays: dict[str, Any], masks: Sequence[Form], *, wanted: Sequence[str], **options: Any
) -> Gradients:
    """Compute gradients of JAX arrays likewise.

    Parameters
    ----------
    arrays, masks, **options
        As `attention` takes them, with dout, out, lse and, where it is not None, dlse.
    wanted : sequence of str
        Which of "dbias" and "dsink" are to be computed, where there is a bias or a sink.
    """
    refuse_float8(element_type(arrays["q"], "q"))
    call, *operands = _call(describe_backward, arrays, masks, wanted=wanted, **options)
    results = zip(call.results, differentiate(call, *operands), strict=True)
    gradients = {spec.name: x for spec, x in results}
    return Gradients(*(gradients.get(name) for name in Gradients._fields))


def _call(
    describe: Callable[..., tuple[Any, ...]],
    arrays: dict[str, Any],
    masks: Sequence[Form],
    *,
    kernel: str | None,
    layout: str,
    deterministic: bool,
    return_lse: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """Check a call; return it with its kernels loaded, and its operands as JAX takes them."""
    arrays = dict(arrays)
    state = arrays.pop("rng_state", None)
    arrays = {name: host_metadata(x, name) for name, x in arrays.items()}
    factors = {name: arrays.pop(name) for name in DESCALES if name in arrays}
    device, *others = _devices(arrays)
    records = {name: _record(x, name, device) for name, x in arrays.items()}
    for name, x in factors.items():
        records[name] = stand_in(name, x, records["q"]) or _record(x, name, device)
    seed = None if state is None else _words(state)
    problem: Problem = describe(
        records,
        arch=None if device == HOST else _jit.compute_capability(device),
        rng_state=None if seed is None else (0, 0),
        layout=layout,
        masks=masks,
        deterministic=deterministic,
        **options,
    )[0]
    select(problem, kernel)
    for name, x in arrays.items():  # JAX takes NumPy's arrays, and no other library's
        if is_metadata(name) and adapter_of(x, name).framework != "jax":
            arrays[name] = _canonical(host_view(records[name]), name)
    arrays |= {name: _matrix(name, x) for name, x in factors.items()}
    if problem.dropout_p:
        arrays["rng_state"] = seed
    call = Call(
        problem,
        tuple(Spec(name, x.shape, element_type(x, name)) for name, x in arrays.items()),
        layout,
        kernel,
        tuple(masks),
        (device, *others),
        return_lse,
        bool(deterministic),
    )
    return prepared(call), *arrays.values()


def _devices(arrays: dict[str, Any]) -> list[int]:
    """Return where the call may run, the likeliest first: traced arrays do not say it."""
    import jax

    known = [
        device_of(x, name)
        for name, x in arrays.items()
        if adapter_of(x, name).framework == "jax" and not is_tracer(x)
    ]
    if not any(map(is_tracer, arrays.values())):
        return known[:1]
    default = jax.config.jax_default_device
    if not hasattr(default, "platform"):  # None, or the name of a backend
        default = jax.local_devices(backend=default)[0]
    likeliest = known[:1] or [ordinal(default, "q")]
    gpus = [
        x for x in jax.local_devices() if x.platform in GPUS
    ]  # also where a host is the default
    return list(dict.fromkeys(likeliest + [ordinal(x, "q") for x in gpus]))


def _record(x: Any, name: str, device: int) -> Array:
    """Return the record of an argument that JAX knows, without its memory; `device` if traced."""
    adapter = adapter_of(x, name)
    if adapter.framework != "jax":
        return adapter.array(x, name)
    return Array(
        pointer=0,
        shape=x.shape,
        strides=contiguous_strides(x.shape),
        dtype=element_type(x, name),
        device=device if is_tracer(x) else device_of(x, name),
        framework="jax",
        readonly=True,
        owner=None,
    )


def _matrix(name: str, x: Any) -> Any:
    """Return a descale with two dimensions, behind those that ``vmap`` may add."""
    value = factor(name, x)
    if value is not None:
        return np.full((1, 1), value, np.float32)
    return x.reshape((1,) * (2 - x.ndim) + x.shape)


def _canonical(x: np.ndarray, name: str) -> np.ndarray:
    """Return integers of the host as JAX takes them, with 32 bits unless it is told otherwise."""
    import jax

    kind = jax.dtypes.canonicalize_dtype(x.dtype)
    narrow = x.astype(kind)
    if (narrow != x).any():
        raise InvalidArgument(
            f"`{name}` holds values beyond {kind}, the integers of JAX: set jax_enable_x64, or "
            "pass smaller ones"
        )
    return narrow


def _words(rng_state: Any) -> Any:
    """Return a random state as an array of JAX's, or as one that it takes without 64-bit types."""
    if is_array(rng_state) and adapter_of(rng_state, "rng_state").framework == "jax":
        kind = element_type(rng_state, "rng_state")
        seed_offset(np.zeros(rng_state.shape, kind))  # refuses other types and shapes
        return rng_state
    pair: Any = random_state(recorded_state(rng_state), True, HOST)
    low = [part >> shift & 0xFFFFFFFF for part in pair for shift in (0, 32)]
    return np.array(low, np.uint32)
