"""JAX arrays and tracers: a call becomes one operation of XLA, whose buffers a callback is given.

While JAX traces, the call is checked, its kernel chosen and loaded. ``run`` is what XLA calls.
"""

import functools
from typing import Any

import numpy as np

from .. import _jit
from .._array import HOST, Array, adapter_of, contiguous_strides, host_dtype
from .._array.host import host_view
from .._array.jax_arrays import device_of, element_type, is_tracer, ordinal
from .._kernels import select
from .._philox import seed_offset
from .._problem import (
    DESCALES,
    DTYPES,
    Form,
    describe,
    host_metadata,
    is_metadata,
    stand_in,
)
from .._scalars import factor, is_array, random_state, recorded_state
from ..errors import InvalidArgument, UnsupportedProblem
from .run import Call, bound_of, compute, views_of

__all__ = ["attention"]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    out: Any = None,
    return_lse: bool = False,
    kernel: str | None = None,
    rng_state: Any = None,
    layout: str = "bshd",
    masks: tuple[Form, ...] = (),
    **options: Any,
) -> Any:
    """Compute attention of JAX arrays, eagerly or inside ``jit`` and ``vmap``.

    Parameters
    ----------
    q, k, v, return_lse, kernel, layout
        As `cupyflash.attention` takes them.
    out
        Must be None.
    rng_state
        A pair of integers, or an array of them, which is read when XLA runs.
    masks : tuple of Form
        Those of the call, whose arrays are among the options.
    options
        The other arguments of `cupyflash.attention`; its arrays only where they are not None. With
        cu_seqlens_q and cu_seqlens_k those of `cupyflash.attention_varlen`.

    Returns
    -------
    out, or (out, lse)
    """
    if out is not None:
        raise InvalidArgument(
            "`out` must be None for JAX arrays, which cannot be written: use the result"
        )
    arrays = {"q": q, "k": k, "v": v}
    for name in (*DTYPES, *(name for form in masks for name in form.names)):
        if name in options:
            arrays[name] = host_metadata(options.pop(name), name)
    factors = {name: arrays.pop(name) for name in DESCALES if name in arrays}
    device, *others = _devices(arrays)
    records = {name: _record(x, name, device) for name, x in arrays.items()}
    for name, x in factors.items():
        records[name] = stand_in(name, x, records["q"]) or _record(x, name, device)
    seed = None if rng_state is None else _words(rng_state)
    problem, _ = describe(
        records,
        arch=None if device == HOST else _jit.compute_capability(device),
        rng_state=None if seed is None else (0, 0),
        layout=layout,
        masks=masks,
        **options,
    )
    select(problem, kernel)
    for name, x in arrays.items():  # JAX takes NumPy's arrays, and no other library's
        if is_metadata(name) and adapter_of(x, name).framework != "jax":
            arrays[name] = _canonical(host_view(records[name]), name)
            records[name] = _record(arrays[name], name, device)._replace(pointer=0)
    arrays |= {name: _matrix(name, x) for name, x in factors.items()}
    if problem.dropout_p:
        arrays["rng_state"] = seed
        records["rng_state"] = _record(seed, "rng_state", device)._replace(pointer=0)
    ranks = tuple((name, len(x.shape)) for name, x in arrays.items())
    call = Call(problem, ranks, layout, bool(return_lse), kernel, masks)
    if device != HOST:
        views = views_of(records)
        for place in (device, *others):  # loaded now: a callback may run while a graph is captured
            bound_of(call, views, place)
    results = _program()(call, *arrays.values())
    return results if return_lse else results[0]


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
    gpus = [ordinal(x, "q") for x in default.client.local_devices() if x.platform != "cpu"]
    return list(dict.fromkeys(likeliest + gpus))


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


@functools.cache
def _program() -> Any:
    """Return the operation of a `Call` and its arrays, which refuses to be differentiated."""
    import jax
    from jax.experimental.buffer_callback import buffer_callback

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def operation(call: Call, *arrays: Any) -> Any:
        problem = call.problem
        shapes = [((*arrays[0].shape[:-1], problem.head_dim_v), problem.output_dtype)]
        if call.return_lse:
            batch = () if problem.packed else (problem.batch,)
            shapes += [((*batch, problem.heads_q, problem.len_q), problem.lse_dtype)]
        return buffer_callback(
            functools.partial(compute, call),
            tuple(jax.ShapeDtypeStruct(shape, host_dtype(dtype)) for shape, dtype in shapes),
            vmap_method="expand_dims",
            command_buffer_compatible=problem.arch is not None,  # its kernel is loaded by now
        )(*arrays)

    @operation.defjvp
    def refuse(call: Call, primals: Any, tangents: Any) -> Any:
        raise UnsupportedProblem(
            "attention cannot be differentiated, it has no backward pass yet: use "
            "jax.lax.stop_gradient on its inputs"
        )

    return jax.jit(operation, static_argnums=0)


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
