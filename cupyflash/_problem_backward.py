"""A backward call becomes a `Problem`, its `Operands`, and what it has beyond them: `Backward`."""

import dataclasses
import math
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from ._array import Array, contiguous_strides
from ._problem import (
    FLOAT8S,
    LAYOUTS,
    Operands,
    Problem,
    access_width,
    checked,
    fresh,
    one_entry,
)
from ._views import permuted
from .errors import UnsupportedProblem

__all__ = ["EXTRA", "INPUTS", "Backward", "describe_backward", "refuse_float8"]

EXTRA = {"dbias": "attn_bias", "dsink": "learnable_sink"}  # gradients that may be wanted, of what
INPUTS = {"dq": "q", "dk": "k", "dv": "v", **EXTRA}  # every gradient, of what


class Backward(NamedTuple):
    """The arrays of a backward call beyond its `Operands`, as views like those.

    (batch, length, heads, head_dim), and (batch, heads, length) of lse and dlse; packed sequences
    are one batch entry. ``out`` is also that of the operands, which is read. The gradients have
    null pointers until they are allocated, with those strides. ``dbias`` has the shape of the bias
    with four axes, of which those of size 1 have stride 0; ``dsink`` is (heads,).
    """

    dout: Array
    out: Array
    lse: Array
    dlse: Array | None
    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dsink: Array | None


def describe_backward(
    arrays: Mapping[str, Array],
    *,
    arch: int | None,
    layout: Any = "bshd",
    wanted: Container[str] = tuple(EXTRA),
    **options: Any,
) -> tuple[Problem, Operands, Backward]:
    """Check a backward call and say what it is.

    Parameters
    ----------
    arrays : mapping of str to Array
        Those of the forward call, and dout, out, lse and, unless it is zero, dlse.
    arch, layout
        As `_problem.checked` takes them.
    wanted : container of str
        Which of "dbias" and "dsink" are to be computed, where there is a bias or a sink.
    **options
        The others of `_problem.checked`.

    Returns
    -------
    Problem, Operands, Backward
    """
    problem, named = checked("backward", arrays, arch=arch, layout=layout, **options)
    dout, lse, dlse = (named.pop(name, None) for name in ("dout", "lse", "dlse"))
    operands = Operands(**named)

    def gradient(name: str) -> Array:
        view = fresh(arrays[name], arrays[name].shape[-1])
        return one_entry(view) if problem.packed else permuted(view, LAYOUTS[layout])

    found = tuple(name for name, of in EXTRA.items() if of in arrays and name in wanted)
    dq, dk, dv = three = [gradient(name) for name in ("q", "k", "v")]
    backward = Backward(
        dout,
        operands.out,
        lse,
        dlse,
        dq,
        dk,
        dv,
        dbias=_four_axes(_dense(arrays["attn_bias"])) if "dbias" in found else None,
        dsink=_dense(arrays["learnable_sink"]) if "dsink" in found else None,
    )
    width = math.gcd(problem.width, access_width(three))
    return dataclasses.replace(problem, wanted=found, width=width), operands, backward


def refuse_float8(dtype: str) -> None:
    """Raise where inputs have a dtype of which there are no gradients."""
    if dtype in FLOAT8S:
        raise UnsupportedProblem(
            f"`q` has dtype {dtype}, of which no gradients are computed: "
            "convert q, k and v to bfloat16, before the forward pass too"
        )


def _dense(x: Array) -> Array:
    """Return the record of a C-contiguous array of the same shape that is not there yet."""
    strides = contiguous_strides(x.shape)
    return x._replace(pointer=0, strides=strides, readonly=False, owner=None)


def _four_axes(x: Array) -> Array:
    """Return the view of a bias's gradient with four axes; no size is repeated."""
    missing = 4 - len(x.shape)
    shape, strides = (1,) * missing + x.shape, (0,) * missing + x.strides
    steps = tuple(0 if n == 1 else step for n, step in zip(shape, strides, strict=True))
    return x._replace(shape=shape, strides=steps)
