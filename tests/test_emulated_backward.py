"""The generic backward kernels on the emulator, from the very sources that NVRTC gets."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import ALONE, EDGES, MEMORY, VARLEN, Case, Modified
from emulated import SEEDS, needs_compiler, shared_seeds
from gradients import emulated, judge, judge_case, kept_scratch, seeds_of
from harness import same_bits

import cupyflash
from cupyflash import _backward_sm80, _forward_sm80, _tuning

pytestmark = needs_compiler

KERNEL = _backward_sm80.NAME
HALVES = ("float16", "bfloat16")
BANDS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window_size": (40, 9)},
    {"window_size": (33, -1), "alignment": "top_left"},
)
# Every class of head dims and every pair of unequal ones, each with another band: more than one
# tile of queries and of keys, both ragged, and heads that share K and V.
CLASSES = tuple(
    Case(140, 150, *dims, dtype, heads_q=2, heads_k=1, label="class", **BANDS[n % len(BANDS)])
    for n, dims in enumerate((*((dim, dim) for dim in _tuning.HEAD_DIMS), *_tuning.UNEQUAL))
    for dtype in [HALVES[n % len(HALVES)]]
)
# Of fp32 too, by architecture: with tiles for which some of the warps that share keys are too many
# to make scores.
SINGLES = (
    *((90, replace(case, len_q=70, len_k=75, dtype="float32")) for case in CLASSES),
    *((arch, Case(70, 75, n, n, "float32")) for arch, n in ((80, 192), (86, 128), (86, 256))),
)
# Head dims whose rows allow accesses of 2, 4 and 8 bytes only, and differ from one another.
ODD_DIMS = tuple(
    Case(33, 40, *dims, dtype, window_size=(20, 3), label="odd")
    for dtype, several in (
        ("float16", ((1, 1), (7, 5), (2, 6), (20, 12), (33, 40), (72, 104))),
        ("float32", ((7, 5), (2, 6))),
    )
    for dims in several
)
LENGTHS = (1, 63, 64, 65, 129)
SOME = {"heads_q": 2, "heads_k": 1}
WORK = 700_000  # scores times head dims of a case that CI has the time for
EDGE_CASES = tuple(
    # Of two dtypes, so that fewer units are compiled.
    replace(case, dtype=case.dtype.replace("bfloat", "float"))
    for case in EDGES
    if case.batch * case.heads_q * case.len_q * case.len_k * case.head_dim <= 64 * WORK
)
ROW_MEMORY = tuple(case for case in MEMORY if case.dtype == "float16")
SCALES = tuple(
    Case(70, 70, 64, 64, "float16", causal=True, softmax_scale=scale, label="scale")
    for scale in (0.0, -0.3, 1e-42, 3.0)
)
# Sums of many terms, whose roundings fp32 shows.
LONG = (
    Case(1500, 40, 16, 16, "float32", label="long"),
    Case(40, 1500, 16, 16, "float32", label="long"),
)
# Modifiers alone, with 16-bit elements; sets of them, on tiles that leave registers for them.
MODIFIED = VARLEN[:26] + tuple(
    replace(case, dtype=case.dtype.replace("float32", "float16")) for case in ALONE
)
SETS = tuple(
    Modified(
        *(97, 130, dim, dim, dtype), batch=2, heads_q=4, heads_k=2, causal=True,
        modifiers=("softcap", "alibi", bias, "mask", "prefix", "sink", "dropout", "used_q"),
        label="set",
    )
    for dtype, dim, bias in (
        ("float16", 16, "bias_fp64"), ("float16", 32, "bias"), ("float16", 64, "bias_bf16"),
        ("float16", 96, "bias_of_keys"), ("float32", 128, "bias"),
        ("float16", 192, "bias_columns_first"), ("float16", 256, "bias_of_queries"),
        ("float16", 128, "bias_fp16"),
    )
)  # fmt: skip


# Scores so far below 0 that a key past the last would have an infinite weight.
LOW = Case(40, 1, 16, 16, "float16", heads_q=2, heads_k=2, softmax_scale=9.0, label="low")


def check(case: Case, seeds: tuple[int, ...] | None = None, **options: Any) -> None:
    """Hold the gradients of the first seed against the oracle; others have the bits but dQ's."""
    seeds = seeds or shared_seeds(case)
    with kept_scratch() as scratch:
        first, *others = (emulated(KERNEL, case, seed, **options) for seed in seeds)
    options.pop("arch", None)
    judge_case(case, first, **options)
    for other in others:
        assert same_bits(first.dk, other.dk)
        assert same_bits(first.dv, other.dv)
        assert first.dbias is None or same_bits(first.dbias, other.dbias)
        if options.get("deterministic"):
            assert same_bits(first.dq, other.dq)
    if options.get("deterministic"):
        assert len(set(scratch)) == 1, "the order of the sums of dq"


@pytest.mark.parametrize("case", CLASSES, ids=lambda case: case.id)
def test_every_class_of_head_dims(case: Case) -> None:
    check(case, SEEDS)


@pytest.mark.parametrize(("arch", "case"), SINGLES, ids=lambda x: getattr(x, "id", None))
def test_every_class_of_fp32(arch: int, case: Case) -> None:
    check(case, SEEDS[:2] if arch == 80 else None, arch=arch)


@pytest.mark.parametrize("case", ODD_DIMS, ids=lambda case: case.id)
def test_odd_head_dims(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    "case", [*EDGE_CASES, *ROW_MEMORY, *SCALES, *LONG, LOW], ids=lambda case: case.id
)
def test_edge_case(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", MODIFIED + SETS[2::2], ids=lambda case: case.id)
def test_modifiers_and_lengths(case: Case) -> None:
    check(case)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [SETS[0], *SETS[1::2]], ids=lambda case: case.id)
def test_all_modifiers_at_other_head_dims(case: Case) -> None:
    check(case)


@pytest.mark.nightly
@pytest.mark.parametrize("deterministic", [False, True])
def test_all_modifiers_of_fp32_where_shared_memory_is_small(deterministic: bool) -> None:
    several = ("alibi", "bias", "mask", "dropout", "sink")
    case = replace(SETS[3], dtype="float32", modifiers=several)
    check(case, SEEDS[:2], arch=86, deterministic=deterministic)


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("len_q", LENGTHS)
def test_pairs_of_lengths(len_q: int, band: dict[str, Any]) -> None:
    for len_k in LENGTHS:
        case = Case(len_q, len_k, 16, 16, "float16", **band)
        try:
            check(case)
        except (AssertionError, cupyflash.KernelFault) as failure:
            raise AssertionError(f"{case.id}: {failure}") from None


@pytest.mark.parametrize("arch", [80, 86, 100])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tiles_of_every_architecture(arch: int, dim: int) -> None:
    check(Case(140, 150, dim, dim, "float16", causal=True, **SOME), arch=arch)


# Of few columns: the order of the sums is seen in fp32.
DETERMINISTIC = (
    *(
        Case(300, 410, 16, 16, "float16", label="fixed", **SOME, **band)
        for band in (*BANDS, {"window_size": (0, 0)}, {"causal": True, "alignment": "top_left"})
    ),
    Case(140, 300, 128, 128, label="fixed", **SOME),
    Case(70, 100, 64, 64, "float32", label="fixed", **SOME),
    Case(70, 200, 256, 256, label="fixed", causal=True, **SOME),
    Modified(
        140, 300, 32, 32, "float16", batch=2, label="fixed",
        modifiers=("prefix", "mask", "bias_bf16"),
    ),
    Modified.varlen(((70, 290), (0, 30), (150, 140)), 64, 64, "float16", causal=True, **SOME),
)  # fmt: skip


@pytest.mark.parametrize("case", DETERMINISTIC, ids=lambda case: case.id)
def test_deterministic_gradients_repeat_their_bits(case: Case) -> None:
    check(case, (*SEEDS[1:], 8), deterministic=True)


def test_dq_is_summed_in_any_order_unless_asked() -> None:
    case = DETERMINISTIC[0]
    with kept_scratch() as scratch:
        results = [emulated(KERNEL, case, seed) for seed in (0, 1, 2, 3, 8)]
    assert len(set(scratch)) > 1
    assert all(same_bits(results[0].dk, other.dk) for other in results[1:])


USED = {"seqused_q": np.array([70, 0, 130]), "seqused_k": np.array([100, 150, 0])}


@pytest.mark.parametrize(
    ("dtype", "dim", "modifiers"),
    [
        *(("float16", dim, some) for dim in (64, 128) for some in ({}, {"softcap": 2.0})),
        ("float32", 64, {}),
    ],
)
def test_what_lies_beyond_the_lengths_reaches_nothing(
    dtype: str, dim: int, modifiers: dict[str, Any]
) -> None:
    case = Case(140, 150, dim, dim, dtype, batch=3, causal=True, **SOME)
    q, k, v = (np.array(x.host) for x in case.arrays())
    dout, dlse = (np.array(x) for x in seeds_of(q, v))
    for b, (rows_q, rows_k) in enumerate(zip(*USED.values(), strict=True)):
        q[b, rows_q:], dout[b, rows_q:], dlse[b, :, rows_q:] = np.nan, np.nan, np.nan
        k[b, rows_k:], v[b, rows_k:] = np.nan, np.nan
    options = case.options | USED | modifiers
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    with cupyflash.emulate(seed=3):
        results = cupyflash.attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, kernel=KERNEL, **options
        )
    judge(results, q, k, v, dout, dlse, **options)


def test_a_query_of_nan_reaches_the_values_that_it_sees_alone() -> None:
    """And the keys of the tiles that it is multiplied with, as 0 times NaN."""
    case = Case(140, 150, 64, 64, "float16", causal=True, alignment="top_left")
    q, k, v = (np.array(x.host) for x in case.arrays())
    dout, dlse = seeds_of(q, v)
    q[0, 70] = np.nan
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **case.options)
    with cupyflash.emulate(seed=2):
        results = cupyflash.attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, kernel=KERNEL, **case.options
        )
    nan = [np.isnan(x.astype(np.float32)).any(axis=(0, 2, 3)) for x in results[:3]]
    assert np.flatnonzero(nan[0]).tolist() == [70]
    assert nan[1][:71].all()
    assert not nan[1][128:].any()
    assert np.flatnonzero(nan[2]).tolist() == list(range(71))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_key_that_is_alone_in_its_row_weighs_one_whatever_the_lse(dtype: str) -> None:
    bias = 1e5 * np.random.default_rng(7).standard_normal((70, 90))
    check(Case(70, 90, 64, 64, dtype), attn_bias=bias.astype(np.float32))


def test_scores_of_fp32_of_one_sign() -> None:
    """Tensor cores truncate: by as much in all of them as the forward kernel's, which cancels."""
    case = Case(40, 40, 256, 256, "float32")
    q, k, v = (x.host + n for x, n in zip(case.arrays(), np.float32([1, 1, 2]), strict=True))
    dout, dlse = seeds_of(q, v)
    dout += np.float32(2)
    with cupyflash.emulate():
        out, lse = cupyflash.attention(q, k, v, return_lse=True, kernel=_forward_sm80.NAME)
        results = cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, kernel=KERNEL)
    judge(results, q, k, v, dout, dlse)


def test_a_value_of_nan_reaches_no_query_that_does_not_see_it() -> None:
    case = Case(140, 100, 64, 64, "float16", causal=True, alignment="top_left")
    q, k, v = (np.array(x.host) for x in case.arrays())
    dout, dlse = seeds_of(q, v)
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **case.options)
    found = []
    for value in (v[0, 70], np.nan):
        v[0, 70] = value
        with cupyflash.emulate(seed=2):
            found.append(
                cupyflash.attention_backward(
                    dout, q, k, v, out, lse, dlse=dlse, kernel=KERNEL, **case.options
                )
            )
    right, other = found
    assert same_bits(right.dq[:, :70], other.dq[:, :70])
    assert np.isnan(other.dq[:, 70:]).all()
    assert same_bits(np.delete(right.dk, 70, axis=1), np.delete(other.dk, 70, axis=1))
    assert same_bits(right.dv, other.dv)


@pytest.mark.parametrize("group", [1, 3])
def test_heads_in_groups(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backward_sm80, "heads_per_group", lambda *sizes: group)
    check(Case(70, 300, 16, 16, "float16", batch=2, heads_q=5, heads_k=5, causal=True), (1,))


def test_dout_and_dlse_of_any_strides() -> None:
    case = Case(70, 130, 64, 64, "float16", batch=2, causal=True, **SOME)
    q, k, v = (x.host for x in case.arrays())
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **case.options)
    dout, dlse = seeds_of(q, v)
    for seed, (a, b) in enumerate((
        (np.broadcast_to(dout[:, :1], dout.shape), np.broadcast_to(dlse[:1], dlse.shape)),
        (np.broadcast_to(dout.ravel()[0], dout.shape), None),
        (np.asfortranarray(dout), np.asfortranarray(dlse)),
        (dout[:, ::-1], dlse[..., ::-1]),
    )):  # fmt: skip
        with cupyflash.emulate(seed=seed):
            results = cupyflash.attention_backward(
                a, q, k, v, out, lse, dlse=b, kernel=KERNEL, **case.options
            )
        judge(results, q, k, v, a, b, **case.options)
