"""attention_fwd_sm90 where its tiles, its tensor maps and its persistent blocks are particular."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import emulated
import pytest
from cases import Case
from harness import HOPPER, Result, check, run, same_bits

from cupyflash import _explain, _kernels, _tuning_sm90

DIMS = tuple(dict.fromkeys(key[:2] for key in _tuning_sm90.HALF))
HALVES = ("float16", "bfloat16")  # without a mask and with one, so that few units are compiled

# Two blocks of rows and more of keys, all ragged, in every class of head dims.
CLASSES = tuple(
    Case(260, 330, *dims, dtype, 2, 4, 2, causal=causal, label="class")
    for dims in DIMS
    for causal in (False, True)
    for dtype in (HALVES if dims in ((64, 64), (128, 128)) else HALVES[causal : causal + 1])
)
# Head dims that are filled up with zeros.
FILLED = tuple(
    Case(200, 150, *dims, HALVES[n % 2], heads_q=2, causal=n % 2 == 1, label="filled")
    for n, dims in enumerate(
        (
            *((8, 8), (16, 24), (24, 56), (40, 64), (56, 8), (72, 72), (80, 96), (88, 80)),
            *((96, 72), (104, 112), (112, 128), (120, 104), (8, 104), (64, 120), (136, 136)),
            *((160, 192), (184, 144), (136, 104), (192, 120), (200, 256), (248, 248), (256, 208)),
        )
    )
)
# Whole tiles without keys, tiles with a few such rows, and the other way round; windows.
SEEN = tuple(
    Case(*lengths, *dims, heads_q=2, heads_k=1, causal=True, label="seen")
    for dims in DIMS
    for lengths in ((500, 70), (70, 500))
) + tuple(
    Case(*lengths, dim, dim, heads_q=2, heads_k=1, window_size=window, label="seen")
    for dim in (64, 128)
    for lengths in ((500, 70), (400, 450))
    for window in ((100, 0), (33, 17), (0, 300))
)
HEADS = tuple(
    Case(100, 200, 64, 64, batch=2, heads_q=heads_q, heads_k=heads_k, label="heads")
    for heads_q, heads_k in ((8, 8), (8, 1), (6, 2), (17, 1), (1, 1))
)
# More tiles than there are blocks, so that each block draws several.
MANY = tuple(
    Case(200, 210, dim, dim, batch=2, heads_q=50, heads_k=10, causal=causal, label="many")
    for dim in (64, 128)
    for causal in (False, True)
)
STRIDES = tuple(
    Case(130, 150, 64, 64, "float16", 2, 4, 4, memory=(name,) * 3, label="strides")
    for name in ("row_gap_8", "fused_qkv", "heads_first", "length_first", "batch_inside")
)
CASES = CLASSES + FILLED + SEEN + HEADS + MANY + STRIDES

# One off the blocks and the boxes of the copies, whichever of these a class has.
EDGES = (16, 64, 80, 96, 128, 192, 256)
LENGTHS_Q = tuple(edge + off for edge in (64, 128, 192) for off in (-1, 0, 1))
LENGTHS_K = (1, *(edge + off for edge in EDGES for off in (-1, 0, 1)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_no_case_is_refused(case: Case) -> None:
    arrays = tuple(x.host for x in case.arrays())
    problem = _explain.resolve(arrays, {}, case.options).problem
    assert _kernels.FORWARD_SM90.refusal(replace(problem, arch=90)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: Case) -> None:
    check(HOPPER, *case.arrays(), **case.options)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_lengths_around_the_blocks(dims: tuple[int, int], causal: bool) -> None:
    for n, len_q in enumerate(LENGTHS_Q):
        for len_k in LENGTHS_K[n % 2 :: 2]:
            case = Case(len_q, len_k, *dims, HALVES[causal], causal=causal)
            try:
                check(HOPPER, *case.arrays(), **case.options)
            except AssertionError as failure:
                raise AssertionError(f"{case.id}: {failure}") from None


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [case for case in CLASSES if case.causal] + list(MANY), ids=lambda case: case.id
)
def test_ten_runs_give_the_same_bits(case: Case) -> None:
    arrays = case.arrays()
    out, lse = run(HOPPER, *arrays, **case.options)
    for _ in range(9):
        out_again, lse_again = run(HOPPER, *arrays, **case.options)
        assert same_bits(out_again, out)
        assert same_bits(lse_again, lse)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(
            partial(emulated.check, seeds=(2,), kernel=HOPPER),
            marks=emulated.needs_compiler,
            id="emulator",
        ),
        pytest.param(partial(check, HOPPER), marks=pytest.mark.gpu, id="gpu"),
    ],
)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_scores_that_outgrow_the_first_block_met(
    dims: tuple[int, int], check: Callable[..., Result]
) -> None:
    """The first keys, which are met last, have scores of many times the others'."""
    case = Case(200, 300, *dims, heads_q=2, heads_k=1, causal=True)
    for keys in (slice(0, 10), slice(130, 170)):
        q, k, v = case.arrays()
        k.host[:, keys] *= 16
        check(q, k, v, **case.options)
