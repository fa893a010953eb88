"""The operations of XLA that compute attention and its gradients, and how JAX differentiates them.

JAX asks for derivatives while it traces: what has none is refused there, and the kernels of the
backward pass are loaded there.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .._array import host_dtype
from .._array.jax_arrays import element_type
from .._kernels import backward_name, select
from .._problem_backward import EXTRA, refuse_float8
from ..errors import UnsupportedProblem
from .calls import INPUTS, Call, Spec
from .run import compute, prepared

RESULTS = ("out", "lse")
FORWARD_MODE = (
    "attention has no derivative in forward mode (jax.jvp, jax.jacfwd, jax.hessian): "
    "use reverse mode, as jax.grad, jax.vjp and jax.jacrev do"
)
SECOND = (
    "the gradients of attention have no derivative: use jax.lax.stop_gradient on them, or on what "
    "they are computed from"
)


def attend(call: Call, *arrays: Any) -> Any:
    """Return the results of a forward call, which JAX may differentiate in reverse mode."""
    return _forward()(call, *arrays)


def differentiate(call: Call, *arrays: Any) -> Any:
    """Return the results of a backward call, which JAX may not differentiate."""
    return _backward()(call, *arrays)


def _operation(call: Call, *arrays: Any) -> tuple[Any, ...]:
    """Let XLA compute a call."""
    import jax
    from jax.experimental.buffer_callback import buffer_callback

    results = buffer_callback(
        functools.partial(compute, call),
        tuple(jax.ShapeDtypeStruct(x.shape, host_dtype(x.dtype)) for x in call.results),
        vmap_method="expand_dims",
        command_buffer_compatible=call.problem.arch is not None,  # its kernels are loaded by now
    )(*arrays)
    return _varying(results, _axes(arrays))


def _axes(arrays: Iterable[Any]) -> frozenset[str]:
    """Return the axes of a mesh over which any of the arrays varies, inside of ``shard_map``."""
    import jax

    types = [getattr(jax.typeof(x), "manual_axis_type", None) for x in arrays]
    return frozenset().union(*(getattr(x, "varying", ()) for x in types))


def _varying(arrays: Sequence[Any], axes: frozenset[str]) -> tuple[Any, ...]:
    """Return arrays as ones that vary over these axes of a mesh too."""
    import jax

    missing = [tuple(sorted(axes - _axes([x]), key=str)) for x in arrays]
    return tuple(
        jax.lax.pcast(x, own, to="varying") if own else x
        for x, own in zip(arrays, missing, strict=True)
    )


@functools.cache
def _forward() -> Any:
    import jax

    operation = jax.custom_vjp(_operation, nondiff_argnums=(0,))

    def attend(call: Call, *arrays: Any) -> tuple[Any, ...]:
        # What varies less would have the gradient of a single place.
        return operation(call, *map(_reverse_only, _varying(arrays, _axes(arrays))))

    def forward(call: Call, *primals: Any) -> tuple[Any, ...]:
        names = [spec.name for spec in call.operands]
        wanted = _wanted(name for name, x in zip(names, primals, strict=True) if x.perturbed)
        arrays = [x.value for x in primals]
        both = attend(replace(call, return_lse=True), *arrays)
        kept = dict(zip((*names, *RESULTS), (*arrays, *both), strict=True))
        _backward_call(call, kept | {"dout": both[0]}, wanted)  # what is refused, is now
        # The keys of a dictionary are no values to JAX.
        return both if call.return_lse else both[:1], (kept, dict.fromkeys(wanted, ()))

    def backward(call: Call, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
        kept, wanted = residuals
        given = {
            f"d{name}": x
            for name, x in zip(RESULTS, cotangents, strict=False)
            if not isinstance(x, jax.custom_derivatives.SymbolicZero)
        }
        if "dout" not in given:
            given["dout"] = jax.numpy.zeros_like(kept["out"])
        arrays = kept | given
        own = _backward_call(call, arrays, tuple(wanted))
        results = zip(own.results, differentiate(own, *arrays.values()), strict=True)
        gradients = {INPUTS.get(spec.name): x for spec, x in results}
        return tuple(gradients.get(spec.name) for spec in call.operands)

    operation.defvjp(forward, backward, symbolic_zeros=True)
    return jax.jit(attend, static_argnums=0)


@functools.cache
def _backward() -> Any:
    import jax

    operation = jax.custom_jvp(_operation, nondiff_argnums=(0,))

    @operation.defjvp
    def refuse(call: Call, primals: Any, tangents: Any) -> Any:
        raise UnsupportedProblem(SECOND)

    return jax.jit(operation, static_argnums=0)


def _wanted(perturbed: Iterable[str]) -> tuple[str, ...]:
    """Return the gradients beside dq, dk and dv of what is differentiated by these arguments."""
    names = {of: name for name, of in INPUTS.items()}
    found = []
    for name in perturbed:
        if name not in names:
            raise UnsupportedProblem(
                f"`{name}` is differentiated, of which attention computes no gradient: "
                "pass jax.lax.stop_gradient of it"
            )
        found.append(names[name])
    return tuple(name for name in EXTRA if name in found)


def _backward_call(call: Call, arrays: Mapping[str, Any], wanted: tuple[str, ...]) -> Call:
    """Return the call of the gradients of a forward call."""
    refuse_float8(call.problem.dtype)
    own = replace(
        call,
        problem=replace(call.problem, op="backward", wanted=wanted),
        operands=tuple(Spec(name, x.shape, element_type(x, name)) for name, x in arrays.items()),
        kernel=backward_name(call.kernel),
    )
    state = (0, 0) if call.problem.dropout_p else None
    problem, *_ = own.described(own.records(call.devices[0]), call.problem.arch, state)
    select(problem, own.kernel)
    return prepared(replace(own, problem=problem))


@functools.cache
def _guard() -> Any:
    """Return an identity whose derivative is one in reverse mode, and refused in forward mode.

    JAX would refuse that of a `custom_vjp`, but with words that name neither attention nor a way.
    """
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir

    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedProblem(FORWARD_MODE)

    tangent = Primitive("reverse_mode_tangent")  # is transposed; computed in forward mode only
    tangent.def_impl(refuse)
    tangent.def_abstract_eval(lambda t: t)
    mlir.register_lowering(tangent, refuse)
    batching.primitive_batchers[tangent] = refuse
    ad.deflinear2(tangent, lambda cotangent, _: [cotangent])

    identity = Primitive("reverse_mode_only")
    identity.def_impl(lambda x: x)
    identity.def_abstract_eval(lambda x: x)
    mlir.register_lowering(identity, lambda _, x: [x])
    batching.defvectorized(identity)
    ad.primitive_jvps[identity] = lambda primals, tangents: (
        identity.bind(*primals),
        tangent.bind(*tangents),
    )
    return identity.bind


def _reverse_only(x: Any) -> Any:
    """Return an array that has derivatives in reverse mode only."""
    import jax

    return _guard()(x) if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact) else x
