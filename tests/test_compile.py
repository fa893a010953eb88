"""The compile gate: every kernel, for every architecture, without a GPU.

A unit passes if NVRTC and ptxas have nothing to remark, no register spills, no thread has a stack,
and the blocks that the configuration promises fit a multiprocessor. Register allocation differs
between versions of NVRTC: a pass holds for the version that made it, which pyproject.toml pins.
"""

import itertools
from typing import Any

import numpy as np
import pytest

from cupyflash import _backward_dbias, _backward_delta, _jit, _tuning_sm90, _unit
from cupyflash._array import ITEMSIZES, Array, contiguous_strides
from cupyflash._kernels import (
    BACKWARD_SM80,
    BACKWARD_SM90,
    FORWARD_SM80,
    FORWARD_SM90,
    KERNELS,
    Kernel,
)
from cupyflash._launch import Launch
from cupyflash._problem import Operands, Problem, describe, forms
from cupyflash._problem_backward import Backward, describe_backward
from cupyflash._tuning import HEAD_DIMS, UNEQUAL
from cupyflash.masks import Band, PrefixLM, Segments

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
ROWS = [row for row in KERNELS if row.launch is not None]


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
    return Operands(*map(array, shapes, dtypes))


def array(shape: tuple[int, ...], dtype: str) -> Array:
    return Array(0, shape, contiguous_strides(shape), dtype, 0, "no", False, None)


def narrow(dtype: str) -> list[int]:
    """Return the widths of an access, in bytes, that are less than the widest."""
    return [width for width in (2, 4, 8) if width >= ITEMSIZES[dtype]]


LENGTH, IDS = 600, np.zeros((2, 600), np.int32)  # more than those that have tiles of their own
# Options of a call, each alone; of arrays the shape and dtype.
MODIFIERS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi_slopes": ((4,), "float32")},
    "bias": {"attn_bias": ((2, 4, LENGTH, LENGTH), "bfloat16")},
    "bias_fp64": {"attn_bias": ((2, 4, LENGTH, LENGTH), "float64")},
    "mask": {"attn_mask": ((2, 4, LENGTH, LENGTH), "bool")},
    "prefix": {"mask": PrefixLM(IDS[:, 0])},
    "segments": {"mask": Segments(IDS)},
    "sink": {"learnable_sink": ((4,), "float16")},
    "dropout": {"dropout_p": 0.1, "rng_state": (1, 2)},
    "used": dict.fromkeys(("seqused_q", "seqused_k"), ((2,), "int32")),
    "packed": dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ((3,), "int32")),
}
ALL = tuple(name for name in MODIFIERS if name != "bias_fp64")
PAIRS = (("bias", "dropout"), ("bias", "mask"), ("alibi", "dropout"), ("segments", "dropout"))


def modified(arch: int, dtype: str, head_dim: int, names: tuple[str, ...]) -> Any:
    """Describe a causal call with modifiers."""
    arrays, options = arguments(dtype, (head_dim, head_dim), names)
    return describe(arrays, arch=arch, **options)


def gradients(
    arch: int, dtype: str, dims: tuple[int, int], names: tuple[str, ...], **changes: Any
) -> tuple[Problem, Operands, Backward]:
    """Describe the gradients of such a call; that of a bias where it is wanted."""
    arrays, options = arguments(dtype, dims, names)
    batch, length, heads, _ = (1, *arrays["v"].shape)[-4:]
    arrays |= dict.fromkeys(("dout", "out"), array(arrays["v"].shape, dtype))
    sums = (heads, length) if "packed" in names else (batch, heads, length)
    arrays |= dict.fromkeys(("lse", "dlse"), array(sums, "float32"))
    return describe_backward(arrays, arch=arch, **{"wanted": ("dsink",)} | options | changes)


def arguments(
    dtype: str, dims: tuple[int, int], names: tuple[str, ...]
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the arrays of a causal call with modifiers, and its other options."""
    outer = (2 * LENGTH, 4) if "packed" in names else (2, LENGTH, 4)
    arrays = {name: array((*outer, dims[name == "v"]), dtype) for name in "qkv"}
    options: dict[str, Any] = {"causal": True}
    parts = [MODIFIERS[name]["mask"] for name in names if "mask" in MODIFIERS[name]]
    mask = parts[0] if len(parts) == 1 else parts[0] & parts[1] if parts else None
    found, ids = forms(mask)
    arrays |= {name: array(x.shape, x.dtype.name) for name, x in ids.items()}
    for name in names:
        for option, value in MODIFIERS[name].items():
            if isinstance(value, tuple) and isinstance(value[0], tuple):
                arrays[option] = array(*value)
            elif option != "mask":
                options[option] = value
    return arrays, options | {"masks": found}


def modified_gate() -> list[Any]:
    """Modifiers alone and in pairs, on one architecture after the other; all of them on each.

    Those of Hopper's kernel alone at one head dim, at others where registers are scarce, and all
    of them.
    """
    archs = itertools.cycle(SHARED)
    calls = [
        (next(archs), dtype, head_dim, (name,))
        for dtype, head_dim in itertools.product(("bfloat16", "float32"), (64, 128))
        for name in MODIFIERS
    ]
    calls += [
        (next(archs), "bfloat16", head_dim, pair)
        for head_dim, pair in itertools.product(HEAD_DIMS, PAIRS)
    ]
    calls += [(arch, "bfloat16", dim, ALL) for arch, dim in itertools.product(SHARED, (64, 128))]
    calls += [(90, dtype, dim, ALL) for dtype in ("float16", "float32") for dim in HEAD_DIMS]
    hopper = [(90, "bfloat16", 128, (name,)) for name in MODIFIERS]
    hopper += [(90, "bfloat16", head_dim, ALL) for head_dim in (64, 128)]
    dense = tuple(name for name in ALL if name not in ("used", "packed"))
    hopper += [(90, "bfloat16", 256, dense)]
    hopper += [(90, "bfloat16", 256, (name, "packed")) for name in ("bias", "mask", "dropout")]
    hopper += [(90, "float8_e4m3fn", head_dim, dense) for head_dim in (64, 128, 256)]
    few = {
        64: ("packed", "used", "sink", "softcap", "bias"),
        128: ("packed", "alibi", "mask", "prefix"),
        256: ("packed", "softcap", "bias", "dropout"),
    }
    hopper += [
        (90, "float8_e4m3fn", head_dim, (name,)) for head_dim in few for name in few[head_dim]
    ]
    hopper += [(90, "float8_e4m3fn", 64, ("mask", "segments")), (90, "float8_e4m3fn", 256, ALL)]
    single = itertools.product((64, 96, 192, 256), ("dropout", "softcap", "bias", "packed"))
    hopper += [(90, "bfloat16", head_dim, (name,)) for head_dim, name in single]
    hopper += [(90, "bfloat16", 256, (name,)) for name in ("used", "alibi")]
    hopper += [(90, "bfloat16", head_dim, ("segments",)) for head_dim in (64, 256)]
    quick = itertools.product(("softcap", "alibi"), (64, 128, 256))
    hopper += [(90, "bfloat16", head_dim, (name, "packed")) for name, head_dim in quick]
    return [
        pytest.param(row, *call, id="-".join(map(str, (row.name, *call[:3], "+".join(call[3])))))
        for row, several in ((FORWARD_SM80, calls), (FORWARD_SM90, hopper))
        for call in several
    ]


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
    assert_fits(row, problem, operands(problem))


@pytest.mark.parametrize(("row", "arch", "dtype", "head_dim", "names"), modified_gate())
def test_a_kernel_with_modifiers_does_too(
    row: Kernel, arch: int, dtype: str, head_dim: int, names: tuple[str, ...]
) -> None:
    problem, operands = modified(arch, dtype, head_dim, names)
    assert row.refusal(problem) is None
    assert_fits(row, problem, operands)


# Where ptxas is nearest to a spill.
SCARCE = [
    ((64, 128), "dropout", "causal"),
    ((64, 128), "dropout", "from"),
    ((64, 128), "dropout", "window"),
    ((256, 256), "dropout", "from"),
    ((256, 256), "dropout", "window"),
    ((128, 128), "softcap", "from"),
    ((128, 128), "softcap", "window"),
]
BOUNDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "from": {"causal": False, "window_size": (128, -1)},
    "window": {"causal": False, "window_size": (128, 128)},
}


@pytest.mark.parametrize(("dims", "name", "bounds"), SCARCE, ids=str)
def test_the_hopper_kernel_with_bounds_does_too(
    dims: tuple[int, int], name: str, bounds: str
) -> None:
    arrays, options = arguments("bfloat16", dims, (name,))
    problem, operands = describe(arrays, arch=90, **(options | BOUNDS[bounds]))
    assert FORWARD_SM90.refusal(problem) is None
    assert_fits(FORWARD_SM90, problem, operands)


def assert_fits(row: Kernel, problem: Problem, operands: Operands) -> None:
    assert row.config is not None
    assert problem.arch is not None
    assert row.launch is not None
    promised = max(1, row.config(problem).min_blocks)
    assert_launch_fits(row.launch(problem, operands), problem.arch, promised)


def assert_launch_fits(launch: Launch, arch: int, blocks: int = 1) -> None:
    """Compile a launch, of which a multiprocessor is promised to hold so many blocks."""
    cubin = _jit.compile(launch.unit, launch.symbol, launch.arch)
    used = cubin.resources
    assert cubin.log == ""
    assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0)
    assert used.registers * launch.block[0] * blocks <= REGISTERS
    multiprocessor, block = (kibibytes * 1024 for kibibytes in SHARED[arch])
    shared = used.shared + launch.shared_bytes
    assert shared <= block
    assert blocks * (shared + SYSTEM_BYTES) <= multiprocessor


@pytest.mark.parametrize("arch", SHARED)
def test_some_kernel_takes_every_class(arch: int) -> None:
    dtypes = DTYPES + FLOAT8S * (arch == 90)
    asked = [problem(arch, *facts) for facts in itertools.product(dtypes, HEAD_DIMS)]
    assert not [p for p in asked if all(row.refusal(p) for row in ROWS)]


def backward_gate() -> list[Any]:
    """Every class where architectures have tiles of their own; then features, and all of them."""
    archs = itertools.cycle(SHARED)
    plain: list[Any] = [
        (arch, "bfloat16", (dim, dim), ())
        for arch, dim in itertools.product((80, 86, 90), HEAD_DIMS)
    ]
    plain += [(arch, "float16", (64, 64), ()) for arch in SHARED]
    plain += [
        (90, dtype, dims, ()) for dtype in ("bfloat16", "float32") for dims in sorted(UNEQUAL)
    ]
    plain += [(90, "float32", (dim, dim), ()) for dim in HEAD_DIMS]
    names = [(name,) for name in MODIFIERS if name != "sink"] + [*PAIRS]
    some = [(next(archs), "bfloat16", (n, n), x) for n in (64, 128) for x in names]
    some += [(next(archs), "float32", (128, 128), x) for x in names]
    every = [
        (arch, dtype, (n, n), ALL)
        for dtype in ("float16", "float32")
        for arch in (80, 86, 90)
        for n in HEAD_DIMS
    ]
    some.append((120, "float32", (96, 96), ALL))  # where ptxas is nearest to a spill
    changes = [{}, {}, {"deterministic": True}]
    calls = [
        (*call, options)
        for several, options in zip((plain, some, every), changes, strict=True)
        for call in several
    ]
    for n in (64, 128, 256):
        for options in ({"window_size": (128, 128)}, {"deterministic": True}):
            calls.append((90, "bfloat16", (n, n), (), options))
    return [pytest.param(*call, id="-".join(map(str, call))) for call in calls]


@pytest.mark.parametrize(("arch", "dtype", "dims", "names", "options"), backward_gate())
def test_the_steps_of_the_generic_backward_do_too(
    arch: int, dtype: str, dims: tuple[int, int], names: tuple[str, ...], options: dict[str, Any]
) -> None:
    row = BACKWARD_SM80
    problem, operands, backward = gradients(arch, dtype, dims, names, **options)
    assert row.refusal(problem) is None
    assert row.config is not None
    for launch in row.launches(problem, operands, backward):
        promised = row.config(problem).min_blocks if launch.symbol == row.name else 1
        assert_launch_fits(launch, arch, max(1, promised))


HOPPER_BANDS: tuple[dict[str, Any], ...] = (
    {"causal": False},
    {"causal": True},
    {"causal": False, "window_size": (100, 50)},
)


@pytest.mark.parametrize(
    ("dtype", "dim", "options", "names"),
    [
        (dtype, dim, options, names)
        for dim, dtype in ((64, "bfloat16"), (128, "float16"), (256, "bfloat16"))
        for options in HOPPER_BANDS
        for names in ((), ("packed",), ("used",))
    ]
    + [
        (dtype, dim, HOPPER_BANDS[0], ("prefix",))
        for dtype, dim in (("bfloat16", 64), ("float16", 128), ("bfloat16", 256))
    ],
    ids=str,
)
@pytest.mark.parametrize("deterministic", [False, True], ids=("", "deterministic"))
def test_the_steps_of_the_hopper_backward_do_too(
    dtype: str, dim: int, options: dict[str, Any], names: tuple[str, ...], deterministic: bool
) -> None:
    options = options | {"deterministic": deterministic}
    problem, operands, backward = gradients(90, dtype, (dim, dim), names, **options)
    assert BACKWARD_SM90.refusal(problem) is None
    for launch in BACKWARD_SM90.launches(problem, operands, backward):
        assert_launch_fits(launch, 90)


def dbias_gate() -> list[Any]:
    """Every architecture, class and dtype; then a bias with modifiers, and with all of them."""
    archs = itertools.cycle(SHARED)
    calls: list[Any] = [
        (arch, "bfloat16", (dim, dim), ("bias",))
        for arch, dim in itertools.product(SHARED, (16, 128))
    ]
    calls += [
        (next(archs), dtype, (dim, dim), ("bias",))
        for dtype, dim in itertools.product(("float16", "float32"), HEAD_DIMS)
    ]
    names = [name for name in MODIFIERS if name != "bias"]
    calls += [
        (next(archs), "bfloat16", (128, 64), (name,) if "bias" in name else ("bias", name))
        for name in names * 2
    ]
    calls += [(arch, "bfloat16", (128, 128), ("bias", "prefix", "packed")) for arch in SHARED]
    calls += [(arch, "float16", (64, 64), ALL) for arch in SHARED]
    calls += [(arch, "float32", (64, 64), ALL) for arch in (86, 90)]
    return [pytest.param(*call, id="-".join(map(str, call))) for call in calls]


@pytest.mark.parametrize(("arch", "dtype", "dims", "names"), dbias_gate())
def test_the_gradient_of_a_bias_does_too(
    arch: int, dtype: str, dims: tuple[int, int], names: tuple[str, ...]
) -> None:
    call = gradients(arch, dtype, dims, names, wanted=("dbias",))
    _, (launch,) = _backward_dbias.launches(*call, delta=0, scratch_offset=0)
    problem, _, backward = call
    assert backward.dbias is not None
    assert_launch_fits(launch, arch, _backward_dbias.config(problem, backward.dbias).min_blocks)


@pytest.mark.parametrize(
    ("arch", "dtype"), [(80, "float16"), (90, "bfloat16"), (100, "float32"), (120, "float64")]
)
def test_the_sum_of_its_parts_does_too(
    arch: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODIFIERS, "bias", {"attn_bias": ((1, LENGTH), dtype)})
    call = gradients(arch, "float16", (64, 64), ("bias",), wanted=("dbias",))
    _, launches = _backward_dbias.launches(*call, delta=0, scratch_offset=0)
    assert len(launches) == 2
    for launch in launches:
        assert_launch_fits(launch, arch)


DELTA = [
    (arch, dtype, head_dim, {"width": width, **options})
    for arch, (dtype, head_dim, width), options in zip(
        itertools.cycle(SHARED),
        itertools.product(DTYPES, HEAD_DIMS, (4, 16)),
        itertools.cycle(({}, {"packed": True}, {"modifiers": ("seqused_q",)})),
        strict=False,
    )
]


@pytest.mark.parametrize(("arch", "dtype", "head_dim", "options"), DELTA)
def test_the_statistics_of_the_backward_compile_without_a_remark(
    arch: int, dtype: str, head_dim: int, options: dict[str, Any]
) -> None:
    config = _backward_delta.config(problem(arch, dtype, head_dim, **options))
    unit = _unit.render(_backward_delta.NAME, config)
    cubin = _jit.compile(unit, _backward_delta.NAME, f"sm_{arch}")
    used = cubin.resources
    assert cubin.log == ""
    assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0)


def test_every_kernel_file_is_a_row_or_a_step_of_one() -> None:
    files = {name for name in _jit.sources() if name.startswith("kernels/")}
    names = {row.name for row in ROWS} | {_backward_dbias.NAME, _backward_dbias.SUM_NAME}
    for head_dim in (64, 256):
        described = gradients(90, "bfloat16", (head_dim, head_dim), ())
        with_sink = gradients(90, "bfloat16", (head_dim, head_dim), ("sink",))
        assert BACKWARD_SM90.steps is not None
        assert BACKWARD_SM80.steps is not None
        for steps in (BACKWARD_SM90.steps(*described), BACKWARD_SM80.steps(*with_sink)):
            names |= {launch.symbol for launch in steps.launches}
    assert files == {f"kernels/{name}.cu" for name in names}
