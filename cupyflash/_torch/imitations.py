"""The results of the operators without memory: their shapes, strides and dtypes."""

from collections.abc import Mapping
from typing import Any

from .._array import Array
from .._problem import LAYOUTS
from .._problem_backward import EXTRA, INPUTS
from .._views import strides_like
from ..errors import InvalidArgument, shown

__all__ = ["forward", "gradient"]


def forward(named: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return out and lse of the arguments of a call by name."""
    import torch

    q, layout = named["q"], named["layout"]
    if layout not in LAYOUTS:
        raise InvalidArgument(f"`layout` must be 'bshd' or 'bhsd', got {shown(layout)}")
    eight_bits = q.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    out = _fresh(q, named["v"].shape[-1], torch.bfloat16 if eight_bits else q.dtype)
    *batch, rows, heads = q.shape[:-1]
    shape = (*batch, rows, heads) if layout == "bhsd" else (*batch, heads, rows)
    double = q.dtype == torch.float64
    return out, q.new_empty(shape, dtype=torch.float64 if double else torch.float32)


def gradient(name: str, named: Mapping[str, Any]) -> Any:
    """Return a gradient of a call, by its name."""
    x = named[INPUTS[name]]
    return x.new_empty(x.shape) if name in EXTRA else _fresh(x, x.shape[-1], x.dtype)


def _fresh(x: Any, last: Any, dtype: Any) -> Any:
    """Return what `_problem.fresh` describes: a tensor with a last size, in x's memory order."""
    from torch._prims_common import is_contiguous_or_false

    shape = (*x.shape[:-1], last)
    if is_contiguous_or_false(x):  # asked first: it compares no sizes that are not known
        return x.new_empty(shape, dtype=dtype)
    record = Array(0, tuple(x.shape), tuple(x.stride()), "", 0, "torch", False, None)
    return x.new_empty_strided(shape, strides_like(record, shape), dtype=dtype)
