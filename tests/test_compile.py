"""The compile gate: every kernel, for every architecture, without a GPU.

A unit passes if NVRTC and ptxas have nothing to remark, no register spills, no thread has a stack,
and the blocks that the configuration promises fit a multiprocessor. Register allocation differs
between versions of NVRTC: a pass holds for the version that made it, which pyproject.toml pins.
"""

import itertools
from typing import Any

import pytest

from cupyflash import _jit, _tuning_sm90
from cupyflash._array import ITEMSIZES, Array, contiguous_strides
from cupyflash._kernels import KERNELS, Kernel
from cupyflash._problem import Operands, Problem
from cupyflash._tuning import HEAD_DIMS, UNEQUAL
from cupyflash.masks import Band

pytest.importorskip("cupy", reason="needs CuPy and NVRTC")

# CUDA C++ Programming Guide, "Technical specifications per compute capability": bytes of shared
# memory of a multiprocessor and of a block; every block takes another KiB for the system.
SHARED = {
    80: (164, 163),
    86: (100, 99),
    89: (100, 99),
    90: (228, 227),
    100: (228, 227),
    120: (100, 99),
}
SYSTEM_BYTES = 1024
REGISTERS = 65536  # of a multiprocessor, on all of them

DTYPES = ("bfloat16", "float16", "float32")
FLOAT8S = ("float8_e4m3fn", "float8_e5m2")  # on Hopper
FULL, CAUSAL = Band(), Band(None, 0)
BANDS = {"full": FULL, "causal": CAUSAL, "from": Band(128, None), "window": Band(128, 128)}
ROWS = [row for row in KERNELS if row.config is not None]


def problem(
    arch: int, dtype: str, head_dim: int, head_dim_v: int | None = None, **changes: Any
) -> Problem:
    facts = {
        "batch": 2,
        "len_q": 4096,
        "len_k": 4096,
        "heads_q": 8,
        "heads_k": 8,
        "head_dim_v": head_dim_v or head_dim,
        "scale": 1.0,
        "band": CAUSAL,
    }
    return Problem(dtype=dtype, head_dim=head_dim, arch=arch, **(facts | changes))


def operands(problem: Problem) -> Operands:
    """Arrays at no address, which a launch describes."""
    p = problem
    shapes = (
        (p.batch, p.len_q, p.heads_q, p.head_dim),
        (p.batch, p.len_k, p.heads_k, p.head_dim),
        (p.batch, p.len_k, p.heads_k, p.head_dim_v),
        (p.batch, p.len_q, p.heads_q, p.head_dim_v),
    )
    dtypes = (p.dtype, p.dtype, p.dtype, p.output_dtype)
    return Operands(
        *(
            Array(0, shape, contiguous_strides(shape), dtype, 0, "no", False, None)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
    )


def narrow(dtype: str) -> list[int]:
    """Return the widths of an access, in bytes, that are less than the widest."""
    return [width for width in (2, 4, 8) if width >= ITEMSIZES[dtype]]


def label(row: Kernel, problem: Problem) -> str:
    band = next(name for name, band in BANDS.items() if band == problem.band)
    dims = f"{problem.head_dim}x{problem.head_dim_v}"
    return (
        f"{row.name}-{problem.arch}-{problem.dtype}-{dims}-{band}-{problem.width}-{problem.scale}"
    )


def gate() -> list[Any]:
    """Every architecture, dtype and class of head dims; then on one architecture the features."""
    problems = [problem(*facts) for facts in itertools.product(SHARED, DTYPES, HEAD_DIMS)]
    for dtype in DTYPES:
        problems += [problem(90, dtype, 128, band=band) for band in BANDS.values()]
        problems += [problem(90, dtype, 128, width=width) for width in narrow(dtype)]
        problems += [problem(90, dtype, 128, scale=scale) for scale in (0.0, -1.0)]
        problems += [problem(90, dtype, *dims) for dims in sorted(UNEQUAL)]
        everything = {"band": BANDS["window"], "width": 4, "scale": -1.0}
        problems += [problem(90, dtype, head_dim, **everything) for head_dim in HEAD_DIMS]
    for dtype, dims in itertools.product(FLOAT8S, _tuning_sm90.EIGHT):
        problems += [problem(90, dtype, *dims[:2], band=band) for band in BANDS.values()]
    return [
        pytest.param(row, problem, id=label(row, problem))
        for row in ROWS
        for problem in dict.fromkeys(problems)
        if row.refusal(problem) is None
    ]


@pytest.mark.parametrize(("row", "problem"), gate())
def test_a_kernel_compiles_without_a_remark_and_fits(row: Kernel, problem: Problem) -> None:
    assert row.config is not None
    assert problem.arch is not None
    assert row.launch is not None
    launch, config = row.launch(problem, operands(problem)), row.config(problem)
    cubin = _jit.compile(launch.unit, launch.symbol, launch.arch)
    used = cubin.resources
    assert cubin.log == ""
    assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0)
    blocks = max(1, config.min_blocks)  # that a multiprocessor is promised to hold
    assert used.registers * launch.block[0] * blocks <= REGISTERS
    multiprocessor, block = (kibibytes * 1024 for kibibytes in SHARED[problem.arch])
    shared = used.shared + launch.shared_bytes
    assert shared <= block
    assert blocks * (shared + SYSTEM_BYTES) <= multiprocessor


@pytest.mark.parametrize("arch", SHARED)
def test_some_kernel_takes_every_class(arch: int) -> None:
    dtypes = DTYPES + FLOAT8S * (arch == 90)
    asked = [problem(arch, *facts) for facts in itertools.product(dtypes, HEAD_DIMS)]
    assert not [p for p in asked if all(row.refusal(p) for row in ROWS)]


def test_every_kernel_file_is_a_row() -> None:
    files = {name for name in _jit.sources() if name.startswith("kernels/")}
    assert files == {f"kernels/{row.name}.cu" for row in ROWS}
