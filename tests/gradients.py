"""Gradients of one kernel on hostile memory, held against the oracle by the accuracy rule."""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases import Case
from emulated import ARCH, needs_compiler
from harness import Operand, fetch, hosted, placed, strided

import cupyflash
from cupyflash import Gradients, UnsupportedProblem, _accuracy
from cupyflash._array import host
from cupyflash._emulator import device
from cupyflash._emulator.memory import Memory
from cupyflash._kernels import KERNELS

HOST = ("cpu", "reference")
EMULATED = "emulated "  # before the name of a kernel of a GPU: on the emulator
NAMES = [row.name for row in KERNELS if row.op == "backward" and row.arch is not None]
ON_GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in NAMES]
ON_EMULATOR = [pytest.param(EMULATED + name, marks=needs_compiler) for name in NAMES]


def seeds_of(q: Any, v: Any, layout: str = "bshd") -> tuple[np.ndarray, np.ndarray]:
    """Draw dout and dlse for inputs of NumPy."""
    rng = np.random.default_rng(q.size + 7 * v.size)
    *outer, length, heads = q.shape[:-1]
    rows = (*outer, length, heads) if layout == "bhsd" else (*outer, heads, length)
    dout = rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(q.dtype)
    return dout, rng.standard_normal(rows).astype(np.float64 if q.dtype == float else np.float32)


def run(
    kernel: str, q: Operand, k: Operand, v: Operand, dout: Any, dlse: Any, **options: Any
) -> Gradients:
    """Return the gradients of one kernel in NumPy; `dlse` may be None.

    All memory that is allocated holds NaN first, so that what a kernel does not write shows. What
    only a kernel of one kind of GPU refuses is skipped, with its words.
    """
    name = kernel.removeprefix(EMULATED)
    emulated = name != kernel
    place = "cpu" if emulated or name in HOST else "gpu"
    own = {"dlse": dlse, "deterministic": options.pop("deterministic", False)}
    there = placed(place, options)
    arrays = [strided(x).on(place) for x in (q, k, v)]
    dout, own["dlse"] = (None if x is None else strided(x).on(place) for x in (dout, dlse))
    function = cupyflash.attention_varlen if "cu_seqlens_q" in options else cupyflash.attention
    with contextlib.ExitStack() as stack:
        stack.enter_context(poisoned(place))
        out, lse = function(*arrays, return_lse=True, **there)
        if emulated:
            stack.enter_context(cupyflash.emulate())
        try:
            results = cupyflash.attention_backward(
                dout, *arrays, out, lse, kernel=name, **own, **there
            )
        except UnsupportedProblem as refusal:
            if name in HOST:
                raise
            pytest.skip(str(refusal))
    return Gradients(*(None if x is None else fetch(place, x)[0] for x in results))


@contextlib.contextmanager
def poisoned(place: str) -> Iterator[None]:
    """Let every allocation hold NaN, and on a GPU the shared memory too."""
    if place == "gpu":
        import cupy
        import gpu

        gpu.poison_shared()
        with cupy.cuda.using_allocator(gpu.poisoned):
            yield
        return
    allocate = host.empty_strided

    def filled(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> np.ndarray:
        x = allocate(shape, strides, dtype)
        x.view(f"u{x.itemsize}")[...] = np.iinfo(f"u{x.itemsize}").max
        return x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "empty_strided", filled)
        yield


def emulated(
    kernel: str,
    case: Case,
    seed: int = 0,
    *,
    arch: int = ARCH,
    forward: str | None = None,
    **options: Any,
) -> Gradients:
    """Return the gradients of a case by a kernel of a GPU on the emulator.

    They are of the CPU's output and LSE, or of those of a kernel that is named, there too.
    """
    arrays = [x.host for x in case.arrays()]
    options = hosted(case.options) | options
    own = options.pop("deterministic", False)
    dout, dlse = seeds_of(arrays[0], arrays[2], options.get("layout", "bshd"))
    function = cupyflash.attention_varlen if "cu_seqlens_q" in options else cupyflash.attention
    if forward is None:
        out, lse = function(*arrays, return_lse=True, **options)
    with cupyflash.emulate(seed=seed, arch=arch):
        if forward is not None:
            out, lse = function(*arrays, return_lse=True, kernel=forward, **options)
        return cupyflash.attention_backward(
            dout, *arrays, out, lse, dlse=dlse, kernel=kernel, deterministic=own, **options
        )


@contextlib.contextmanager
def kept_scratch() -> Iterator[list[bytes]]:
    """Give what the emulated launches of each call inside leave in their scratch.

    The order of the sums of dQ shows there, in fp32, where the bits of dq have no room for it.
    """
    found: list[bytes] = []

    class Keeping(Memory):
        place = 0, 0

        def scratch(self, size: int) -> int:
            self.place = super().scratch(size), size
            return self.place[0]

        def collect(self) -> None:
            super().collect()
            found.append(ctypes.string_at(*self.place))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "Memory", Keeping)
        yield found


def judge_case(case: Case, results: Gradients, **options: Any) -> None:
    """Hold the gradients of a case against the oracle; those that are None are not judged."""
    q, k, v = (x.host for x in case.arrays())
    options = hosted(case.options) | options
    options.pop("deterministic", None)
    dout, dlse = seeds_of(q, v, options.get("layout", "bshd"))
    verdict = _accuracy.gradients_verdict(results, dout, q, k, v, dlse=dlse, **options)
    assert verdict.ok, verdict.message


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
