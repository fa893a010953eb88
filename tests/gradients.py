"""Gradients of one kernel on hostile memory, held against the oracle by the accuracy rule."""

from typing import Any

import numpy as np
from harness import Operand, fetch, hosted, placed, strided

import cupyflash
from cupyflash import Gradients, _accuracy

HOST = ("cpu", "reference")


def seeds_of(q: Any, v: Any, layout: str = "bshd") -> tuple[np.ndarray, np.ndarray]:
    """Draw dout and dlse for inputs of NumPy."""
    rng = np.random.default_rng(q.size + 7 * v.size)
    *outer, length, heads = q.shape[:-1]
    rows = (*outer, length, heads) if layout == "bhsd" else (*outer, heads, length)
    dout = rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(q.dtype)
    return dout, rng.standard_normal(rows).astype(np.float64 if q.dtype == float else np.float32)


def run(
    kernel: str | None, q: Operand, k: Operand, v: Operand, dout: Any, dlse: Any, **options: Any
) -> Gradients:
    """Return the gradients of one kernel in NumPy; `dlse` may be None."""
    place = "cpu" if kernel in HOST else "gpu"
    own = options.pop("deterministic", False)
    there = placed(place, options)
    arrays = [strided(x).on(place) for x in (q, k, v)]
    dout, dlse = (None if x is None else strided(x).on(place) for x in (dout, dlse))
    function = cupyflash.attention_varlen if "cu_seqlens_q" in options else cupyflash.attention
    out, lse = function(*arrays, return_lse=True, **there)
    results = cupyflash.attention_backward(
        dout, *arrays, out, lse, dlse=dlse, kernel=kernel, deterministic=own, **there
    )
    return Gradients(*(None if x is None else fetch(place, x)[0] for x in results))


def judge(
    results: Gradients, q: Operand, k: Operand, v: Operand, dout: Any, dlse: Any, **options: Any
) -> None:
    """Assert that gradients have the right shapes and dtypes and obey the accuracy rule."""
    q, k, v = (strided(x).host for x in (q, k, v))
    options = hosted(options)
    options.pop("deterministic", None)
    given = [q, k, v, options.get("attn_bias"), options.get("learnable_sink")]
    for name, gradient, x in zip(results._fields, results, given, strict=True):
        assert (gradient is None) == (x is None), name
        if x is not None:
            assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype), name
    dout = dout.host if hasattr(dout, "host") else dout
    dlse = dlse.host if hasattr(dlse, "host") else dlse
    verdict = _accuracy.gradients_verdict(results, dout, q, k, v, dlse=dlse, **options)
    assert verdict.ok, verdict.message


def check(kernel: str, q: Operand, k: Operand, v: Operand, **options: Any) -> Gradients:
    """Draw dout and dlse, run a kernel, hold it against the oracle and return the gradients."""
    layout = options.get("layout", "bshd")
    dout, dlse = seeds_of(strided(q).host, strided(v).host, layout)
    results = run(kernel, q, k, v, dout, dlse, **options)
    judge(results, q, k, v, dout, dlse, **options)
    return results
