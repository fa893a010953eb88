"""Forward kernels on the emulator, from the very sources that NVRTC gets, against the oracle."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import DTYPES, EDGES, LENGTHS, MEMORY, SMOKE, Case
from emulated import SEEDS, arrays, check, needs_compiler, run
from harness import GPU_KERNEL, judge, same_bits
from strided import Strided

import cupyflash
from cupyflash import _tuning

pytestmark = needs_compiler

# Every class of head dims and every pair of unequal ones; more than one tile of queries and of
# keys, both ragged, rows without keys under the mask, and heads that share K and V.
CLASSES = tuple(
    Case(len_q, len_k, *dims, dtype, heads_q=2, heads_k=1, causal=causal, label="class")
    for dtype in DTYPES
    for dims in (*((dim, dim) for dim in _tuning.HEAD_DIMS), *_tuning.UNEQUAL)
    for len_q, len_k, causal in [(70, 53, True) if max(dims) < 128 else (67, 70, False)]
)
# Head dims whose rows allow accesses of 2, 4 and 8 bytes only, and differ from one another.
ODD_DIMS = tuple(
    Case(33, 40, *dims, dtype, window_size=(20, 3), label="odd")
    for dtype in DTYPES
    for dims in ((1, 1), (7, 5), (2, 6), (20, 12), (33, 40))
)
WORK = 700_000  # scores times head dims of a case that CI has the time for
EDGE_CASES = tuple(
    case
    for case in EDGES
    if case.batch * case.heads_q * case.len_q * case.len_k * case.head_dim <= 64 * WORK
)
BANDS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window_size": (20, 9)},
    {"window_size": (33, -1), "alignment": "top_left"},
    {"window_size": (0, 0)},
)


def seed_of(case: Case) -> int:
    """Spread the seeds over cases that run with one of them."""
    return SEEDS[sum(case.id.encode()) % len(SEEDS)]


@pytest.mark.parametrize("case", CLASSES, ids=lambda case: case.id)
def test_every_class_of_head_dims(case: Case) -> None:
    check(*case.arrays(), **case.options)


@pytest.mark.parametrize("case", ODD_DIMS, ids=lambda case: case.id)
def test_odd_head_dims(case: Case) -> None:
    check(*case.arrays(), **case.options)


@pytest.mark.parametrize("case", SMOKE, ids=lambda case: case.id)
def test_smoke_case(case: Case) -> None:
    check(*case.arrays(), **case.options)


@pytest.mark.parametrize("case", EDGE_CASES, ids=lambda case: case.id)
def test_edge_case(case: Case) -> None:
    check(*case.arrays(), seeds=(seed_of(case),), **case.options)


@pytest.mark.parametrize("case", MEMORY, ids=lambda case: case.id)
def test_any_strides(case: Case) -> None:
    """Each array ends where its memory ends, so that a byte read beyond it is a fault."""
    case = replace(case, batch=2, heads_q=2, heads_k=2)
    check(*case.arrays(), seeds=(seed_of(case),), **case.options)


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("len_q", LENGTHS)
def test_pairs_of_lengths(band: dict[str, Any], len_q: int) -> None:
    for len_k in LENGTHS:
        case = Case(len_q, len_k, 16, 16, "float16", **band)
        try:
            check(*case.arrays(), seeds=(seed_of(case),), **case.options)
        except (AssertionError, cupyflash.KernelFault) as failure:
            raise AssertionError(f"{case.id}: {failure}") from None


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_tiles_of_every_architecture(arch: int, dims: tuple[int, int]) -> None:
    case = Case(70, 53, *dims, causal=True)
    check(*case.arrays(), arch=arch, seeds=(SEEDS[arch % 3],), **case.options)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("memory", ["row_gap_1", "row_gap_8", "heads_first", "reversed_rows"])
def test_only_the_output_is_written(memory: str, dtype: str) -> None:
    q, k, v = Case(50, 90, 40, 24, dtype, 2, 4, 2).arrays()
    out = Strided.output((2, 50, 4, 24), dtype, memory)
    before = out.storage.copy()
    result, _ = check(q, k, v, causal=True, out=out.host)
    assert np.shares_memory(result, out.storage)
    assert same_bits(out.storage[~out.inside], before[~out.inside])


def test_infinities_and_nan_stay_in_their_rows() -> None:
    q, k, v = arrays(1, 70, 1, 64, dtype=np.float32)
    q[0, 3] = np.nan
    k[0, 69, 0, 5] = np.inf
    check(q, k, v, causal=True)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_heads_in_groups(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of heads that share the L2 cache, the last one smaller, and tiles of each."""
    monkeypatch.setattr(_tuning, "heads_per_group", lambda *sizes: group)
    q, k, v = arrays(2, 140, 5, 16)
    check(q, k, v, causal=True, seeds=(1,))


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-42, 3.0])
def test_any_scale(scale: float) -> None:
    q, k, v = arrays(1, 40, 2, 16)
    check(q, k, v, softmax_scale=scale, seeds=(2,))


def test_the_layout_bhsd_reads_the_same_arrays() -> None:
    q, k, v = arrays(2, 40, 3, 16)
    out, lse = check(q, k, v, causal=True)
    turned = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    out_bhsd, lse_bhsd = run(*turned, causal=True, layout="bhsd")
    assert same_bits(out_bhsd.transpose(0, 2, 1, 3), out)
    assert same_bits(lse_bhsd, lse)


def test_without_lse_the_output_is_the_same() -> None:
    q, k, v = arrays(1, 40, 2, 16)
    expected, lse = run(q, k, v)
    judge((expected, lse), q, k, v)
    with cupyflash.emulate():
        assert same_bits(cupyflash.attention(q, k, v, kernel=GPU_KERNEL), expected)
