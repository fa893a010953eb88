"""Run one kernel on hostile memory and hold it against the oracle by the accuracy rule."""

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strided import Strided

import cupyflash
from cupyflash import _accuracy
from cupyflash._facts import SCALARS
from cupyflash.errors import UnsupportedProblem
from cupyflash.masks import All, Mask

GPU_KERNEL, HOPPER = "attention_fwd_sm80", "attention_fwd_sm90"  # of every GPU; of one kind
GPU_KERNELS = (GPU_KERNEL, HOPPER)
# Rows of a GPU's kernel whose last bits may depend on each other: no warp has more.
WARP_ROWS = 32
KERNELS = ("cpu", *(pytest.param(kernel, marks=pytest.mark.gpu) for kernel in GPU_KERNELS))

METADATA = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")

Result = tuple[np.ndarray, np.ndarray]
Operand = Strided | np.ndarray


def strided(array: Operand) -> Strided:
    """Return the array with its storage; a bare NumPy array is copied densely."""
    return array if isinstance(array, Strided) else Strided.of(array)


def hosted(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with arrays of NumPy, as the oracle takes them."""
    return {name: x.host if isinstance(x, Strided) else x for name, x in options.items()}


def placed(kernel: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return options with arrays where a kernel wants them.

    64-bit lengths stay on the host, as do scalars, 0-d arrays among them.
    """

    def place(x: Any) -> Any:
        if isinstance(x, Mask):
            return All(*(part.bound(*map(place, part.arrays)) for part in x.parts))
        return strided(x).on(kernel) if isinstance(x, Strided | np.ndarray) else x

    def stays(name: str, x: Any) -> bool:
        return name in SCALARS or (name in METADATA and getattr(x, "dtype", None) == np.int64)

    return {name: x if stays(name, x) else place(x) for name, x in options.items()}


def attend(kernel: str, *arrays: Any, **options: Any) -> Any:
    """Call a kernel by name; what only that of one kind of GPU refuses is skipped, with its words.

    The other kernels take every problem of the tests.
    """
    packed = "cu_seqlens_q" in options
    function = cupyflash.attention_varlen if packed else cupyflash.attention
    try:
        return function(*arrays, kernel=kernel, **options)
    except UnsupportedProblem as refusal:
        if kernel != HOPPER:
            raise
        pytest.skip(str(refusal))


def call(kernel: str, *arrays: Any, **options: Any) -> tuple[Any, Any]:
    """Call the kernel on arrays of its framework and return (out, lse) in it.

    On the GPU every byte that CuPy allocates and all shared memory hold NaN before the launch, so
    that an element which the kernel does not write, or reads without need, shows.
    """
    if kernel == "cpu":
        return attend(kernel, *arrays, return_lse=True, **options)
    import cupy
    import gpu

    gpu.poison_shared()
    with cupy.cuda.using_allocator(gpu.poisoned):
        return attend(kernel, *arrays, return_lse=True, **options)


def fetch(kernel: str, *arrays: Any) -> Any:
    """Bring the kernel's arrays to the host."""
    if kernel == "cpu":
        return arrays
    import gpu

    return tuple(gpu.fetch(array) for array in arrays)


def run(kernel: str, q: Operand, k: Operand, v: Operand, **options: Any) -> Result:
    """Return (out, lse) of one kernel in NumPy; `out` may be given as a `Strided` to write to."""
    given = options.get("out")
    options = placed(kernel, options)
    out, lse = call(kernel, *(strided(x).on(kernel) for x in (q, k, v)), **options)
    if given is not None:
        return given.written(kernel).host, *fetch(kernel, lse)
    return fetch(kernel, out, lse)


def judge(result: Result, q: Operand, k: Operand, v: Operand, **options: Any) -> None:
    """Assert that a result has the right shapes and dtypes and obeys the accuracy rule."""
    out, lse = result
    q, k, v = (strided(x).host for x in (q, k, v))
    *outer, length, heads = q.shape[:-1]
    rows = (*outer, length, heads) if options.get("layout") == "bhsd" else (*outer, heads, length)
    assert out.shape == (*q.shape[:-1], v.shape[-1]), f"out has shape {out.shape}"
    assert out.dtype == q.dtype, f"out has dtype {out.dtype}"
    assert lse.shape == rows, f"lse has shape {lse.shape}"
    assert lse.dtype == np.float32, f"lse has dtype {lse.dtype}"
    verdict = _accuracy.verdict(out, lse, q, k, v, **hosted(options))
    assert verdict.ok, verdict.message


def check(kernel: str, q: Operand, k: Operand, v: Operand, **options: Any) -> Result:
    """Run a kernel, hold it against the oracle and return (out, lse)."""
    result = run(kernel, q, k, v, **options)
    judge(result, q, k, v, **options)
    return result


def run_child(
    *command: str, timeout: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command whose Python imports this copy of the package; its stdout holds stderr too."""
    root = str(Path(cupyflash.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays hold the same bits, NaN and signed zeros included."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
