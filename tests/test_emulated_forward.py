"""Forward kernels on the emulator, from the very sources that NVRTC gets, against the oracle."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import DTYPES, EDGES, LENGTHS, MEMORY, SMOKE, Case
from emulated import SEEDS, arrays, check, needs_compiler, run, shared_seeds
from harness import GPU_KERNEL, GPU_KERNELS, HOPPER, judge, same_bits
from strided import Strided

import cupyflash
from cupyflash import _tuning, _tuning_sm90
from cupyflash._tuning_sm90 import Tiles

pytestmark = needs_compiler

HALVES = ("float16", "bfloat16")
# Every class of head dims and every pair of unequal ones; more than one tile of queries and of
# keys, both ragged, rows without keys under the mask, and heads that share K and V.
CLASSES = tuple(
    Case(len_q, len_k, *dims, dtype, heads_q=2, heads_k=1, causal=causal, label="class")
    for dtype in DTYPES
    for dims in (*((dim, dim) for dim in _tuning.HEAD_DIMS), *_tuning.UNEQUAL)
    for len_q, len_k, causal in [(70, 53, True) if max(dims) < 128 else (67, 70, False)]
)
HOPPER_CLASSES = tuple(
    Case(200 if max(dims) < 128 else 140, 270, *dims, dtype, causal=True, label="class")
    for dtype in HALVES
    for dims in dict.fromkeys(key[:2] for key in _tuning_sm90.HALF)
)
FLOAT8S = ("float8_e4m3fn", "float8_e5m2")
EIGHT_BIT_CASES = tuple(
    Case(70, 600 if max(dims) < 128 else 210, *dims, dtype, causal=causal, label="eight_bit")
    for dtype in FLOAT8S
    for dims in _tuning_sm90.EIGHT
    for causal in [dtype == FLOAT8S[0]]
)
# Head dims whose rows allow accesses of 2, 4 and 8 bytes only, and differ from one another.
ODD_DIMS = tuple(
    Case(33, 40, *dims, dtype, window_size=(20, 3), label="odd")
    for dtype in DTYPES
    for dims in ((1, 1), (7, 5), (2, 6), (20, 12), (33, 40))
)
PADDED_DIMS = tuple(
    Case(70, 130, *dims, "float16", causal=True, label="padded")
    for dims in ((8, 8), (56, 40), (72, 96), (48, 104), (160, 128), (136, 192), (256, 200))
)
WORK = 700_000  # scores times head dims of a case that CI has the time for
EDGE_CASES = tuple(
    case
    for case in EDGES
    if case.batch * case.heads_q * case.len_q * case.len_k * case.head_dim <= 64 * WORK
)
HOPPER_EDGES = tuple(  # of one dtype, so that fewer units are compiled
    replace(case, dtype="float16") for case in EDGE_CASES if case.dtype in HALVES
)
# Where the groups of 64 rows of a tile see different key blocks, or none, and tiles follow.
GROUPS = tuple(
    Case(len_q, len_k, 64, 64, "float16", heads_q=4, heads_k=2, label="groups", **band)
    for len_q, len_k, band in (
        (300, 30, {"causal": True}),
        (256, 192, {"causal": True}),
        (420, 300, {"causal": True}),
        (260, 400, {"window_size": (20, 9)}),
        (260, 300, {"window_size": (130, -1), "alignment": "top_left"}),
        (200, 500, {"window_size": (0, 0), "alignment": "top_left"}),
        (400, 70, {"window_size": (-1, 3), "alignment": "top_left"}),
    )
)
BANDS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window_size": (20, 9)},
    {"window_size": (33, -1), "alignment": "top_left"},
    {"window_size": (0, 0)},
)
HOPPER_LENGTHS_Q, HOPPER_LENGTHS_K = (1, 63, 65, 128, 191, 193), (1, 127, 128, 129, 257)
# Memory that a tensor map describes, or that is copied first.
HOPPER_MEMORY = tuple(
    case
    for case in MEMORY
    if case.dtype == "float16"
    and case.memory[0] in ("packed", "row_gap_8", "fused_qkv", "heads_first", "length_first",
                           "batch_inside", "every_other_column", "columns_outside")
)  # fmt: skip
# Ways to divide the work that the tile table has only with other head dims, or not at all.
TILINGS = {
    "turns of two": Tiles(64, 2, 2, 2, 2, turns=True),
    "turns of three": Tiles(128, 3, 4, 4, 2, turns=True),
    "one buffer of Q": Tiles(64, 2, 3, 2, 1),
    "few slots": Tiles(48, 3, 1, 3, 2),
    "many slots": Tiles(16, 3, 9, 9, 2),
}
TILINGS_OF_8_BITS = {
    "turns of two, parts in pairs": Tiles(64, 2, 2, 2, 1, turns=True, landings=1, parts=4),
    "turns of three, few slots": Tiles(64, 3, 1, 1, 2, turns=True, landings=1, parts=2),
}


def suites(generic: Iterable[Case], hopper: Iterable[Case]) -> pytest.MarkDecorator:
    """Parametrise a test by the kernels, each with cases of its own."""
    pairs = [(GPU_KERNEL, case) for case in generic] + [(HOPPER, case) for case in hopper]
    ids = [f"{kernel.rpartition('_')[2]}-{case.id}" for kernel, case in pairs]
    return pytest.mark.parametrize(("kernel", "case"), pairs, ids=ids)


@suites(CLASSES, HOPPER_CLASSES)
def test_every_class_of_head_dims(kernel: str, case: Case) -> None:
    check(*case.arrays(), kernel=kernel, **case.options)


@suites(ODD_DIMS, PADDED_DIMS)
def test_odd_head_dims(kernel: str, case: Case) -> None:
    seeds = None if kernel == GPU_KERNEL else shared_seeds(case, kernel)
    check(*case.arrays(), kernel=kernel, seeds=seeds, **case.options)


@pytest.mark.parametrize("case", EIGHT_BIT_CASES, ids=lambda case: case.id)
def test_floats_of_8_bits(case: Case) -> None:
    check(*case.arrays(), kernel=HOPPER, **case.options)


@suites(SMOKE, (case for case in SMOKE if case.dtype in HALVES))
def test_smoke_case(kernel: str, case: Case) -> None:
    check(*case.arrays(), kernel=kernel, **case.options)


@suites(EDGE_CASES, HOPPER_EDGES)
def test_edge_case(kernel: str, case: Case) -> None:
    check(*case.arrays(), kernel=kernel, seeds=shared_seeds(case, kernel), **case.options)


@suites(MEMORY, HOPPER_MEMORY)
def test_any_strides(kernel: str, case: Case) -> None:
    """Each array ends where its memory ends, so that a byte read beyond it is a fault."""
    case = replace(case, batch=2, heads_q=2, heads_k=2)
    check(*case.arrays(), kernel=kernel, seeds=shared_seeds(case, kernel), **case.options)


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(
    ("kernel", "dim", "len_q", "lengths_k"),
    [(GPU_KERNEL, 16, len_q, LENGTHS) for len_q in LENGTHS]
    + [(HOPPER, 64, len_q, HOPPER_LENGTHS_K) for len_q in HOPPER_LENGTHS_Q],
    ids=lambda value: "" if isinstance(value, tuple) else str(value),
)
def test_pairs_of_lengths(
    kernel: str, dim: int, len_q: int, lengths_k: tuple[int, ...], band: dict[str, Any]
) -> None:
    for len_k in lengths_k:
        case = Case(len_q, len_k, dim, dim, "float16", **band)
        try:
            check(*case.arrays(), kernel=kernel, seeds=shared_seeds(case, kernel), **case.options)
        except (AssertionError, cupyflash.KernelFault) as failure:
            raise AssertionError(f"{case.id}: {failure}") from None


@suites(GROUPS, GROUPS)
def test_groups_of_rows_see_different_blocks(kernel: str, case: Case) -> None:
    seeds = None if kernel == HOPPER else shared_seeds(case)
    check(*case.arrays(), kernel=kernel, seeds=seeds, **case.options)


@pytest.mark.nightly
@pytest.mark.parametrize("tiles", TILINGS.values(), ids=TILINGS)
def test_other_tiles(tiles: Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tuning_sm90, "HALF", {(64, 64): tiles})
    for window in ((43, 25), (100, 0)):
        case = Case(270, 300, 64, 64, "float16", heads_q=3, heads_k=3, window_size=window)
        check(*case.arrays(), kernel=HOPPER, **case.options)


@pytest.mark.parametrize("tiles", TILINGS_OF_8_BITS.values(), ids=TILINGS_OF_8_BITS)
def test_other_tiles_of_8_bits(tiles: Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tuning_sm90, "EIGHT", {(64, 64): tiles})
    for window in ((43, 25), (100, 0)):
        case = Case(270, 300, 64, 64, FLOAT8S[0], heads_q=3, heads_k=3, window_size=window)
        check(*case.arrays(), kernel=HOPPER, **case.options)


def test_tiles_of_long_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tuning_sm90, "LONG", 256)
    case = Case(200, 270, 64, 64, "bfloat16", label="long")
    check(*case.arrays(), kernel=HOPPER, **case.options)


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_tiles_of_every_architecture(arch: int, dims: tuple[int, int]) -> None:
    case = Case(70, 53, *dims, causal=True)
    check(*case.arrays(), arch=arch, seeds=(SEEDS[arch % 3],), **case.options)


@pytest.mark.parametrize(
    ("kernel", "memory", "dtype"),
    [
        (kernel, memory, dtype)
        for kernel, dtype in ((GPU_KERNEL, "float16"), (GPU_KERNEL, "float32"), (HOPPER, "float16"))
        for memory in ("row_gap_1", "row_gap_8", "heads_first", "reversed_rows")
        if kernel == GPU_KERNEL or memory in ("row_gap_8", "heads_first")
    ],
)
@pytest.mark.parametrize(
    "dims", [(40, 24), pytest.param((64, 104), marks=pytest.mark.nightly)], ids=str
)
def test_only_the_output_is_written(
    kernel: str, memory: str, dtype: str, dims: tuple[int, int]
) -> None:
    q, k, v = Case(50, 90, *dims, dtype, 2, 4, 2).arrays()
    out = Strided.output((2, 50, 4, dims[1]), dtype, memory)
    before = out.storage.copy()
    result, _ = check(q, k, v, kernel=kernel, causal=True, out=out.host)
    assert np.shares_memory(result, out.storage)
    assert same_bits(out.storage[~out.inside], before[~out.inside])


@pytest.mark.parametrize(("kernel", "dtype"), [(GPU_KERNEL, np.float32), (HOPPER, np.float16)])
def test_infinities_and_nan_stay_in_their_rows(kernel: str, dtype: Any) -> None:
    q, k, v = arrays(1, 70, 1, 64, dtype=dtype)
    q[0, 3] = np.nan
    k[0, 69, 0, 5] = np.inf
    check(q, k, v, kernel=kernel, causal=True)


@pytest.mark.parametrize("kernel", GPU_KERNELS)
@pytest.mark.parametrize("group", [1, 3, 8])
def test_heads_in_groups(kernel: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of heads that share the L2 cache, the last one smaller, and tiles of each."""
    monkeypatch.setattr(_tuning, "heads_per_group", lambda *sizes: group)
    q, k, v = arrays(2, 210 if kernel == HOPPER else 140, 5, 16)
    check(q, k, v, kernel=kernel, causal=True, seeds=(1,))


@pytest.mark.parametrize(("kernel", "length"), [(GPU_KERNEL, 40), (HOPPER, 300)])
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-42, 3.0])
def test_any_scale(kernel: str, length: int, scale: float) -> None:
    q, k, v = arrays(1, length, 2, 64)
    check(q, k, v, kernel=kernel, softmax_scale=scale, seeds=(2,))


@pytest.mark.parametrize("kernel", GPU_KERNELS)
def test_the_layout_bhsd_reads_the_same_arrays(kernel: str) -> None:
    q, k, v = arrays(2, 40, 3, 16)
    out, lse = check(q, k, v, kernel=kernel, causal=True)
    turned = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    out_bhsd, lse_bhsd = run(*turned, kernel=kernel, causal=True, layout="bhsd")
    assert same_bits(out_bhsd.transpose(0, 2, 1, 3), out)
    assert same_bits(lse_bhsd, lse)


@pytest.mark.parametrize("kernel", GPU_KERNELS)
def test_without_lse_the_output_is_the_same(kernel: str) -> None:
    q, k, v = arrays(1, 40, 2, 16)
    expected, lse = run(q, k, v, kernel=kernel, causal=True)
    judge((expected, lse), q, k, v, causal=True)
    with cupyflash.emulate():
        assert same_bits(cupyflash.attention(q, k, v, kernel=kernel, causal=True), expected)


@pytest.mark.parametrize("scale", [9e-39, 1.1e-38, 2e-38])
def test_the_lse_of_scales_near_the_least_normal_number(scale: float) -> None:
    """The scale in base 2 is a normal number, its product with ln 2 is none."""
    arrays = (
        np.full((1, n, 1, 32), x, ml_dtypes.bfloat16) for n, x in ((4, 3e18), (5, 2e18), (5, 1))
    )
    check(*arrays, kernel=HOPPER, softmax_scale=scale)


@needs_compiler
@pytest.mark.parametrize(
    ("head_dim", "scale", "memory"),
    [
        (224, 1.0, ("one_element", "reversed_rows", "reversed_batch")),  # equal products
        (224, 1.0, ("packed",) * 3),
        (256, 0.06, ("packed",) * 3),
    ],
)
def test_sums_of_fp32_scores_lose_less_than_their_additions(
    head_dim: int, scale: float, memory: tuple[str, str, str]
) -> None:
    case = Case(
        16, 65, head_dim, 256, "float32", batch=2, heads_q=5, window_size=(17, 0),
        alignment="top_left", softmax_scale=scale, memory=memory,
    )  # fmt: skip
    q, k, v = (x.host for x in case.arrays())
    with cupyflash.emulate():
        found = cupyflash.attention(q, k, v, return_lse=True, kernel=GPU_KERNEL, **case.options)
    judge(found, q, k, v, **case.options)
