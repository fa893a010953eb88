"""The gradient of a bias on the emulator, against the oracle; problems are tiny."""

import itertools
from pathlib import Path
from typing import Any

import dbias
import numpy as np
import pytest
from cases import MODIFIERS, ROWWISE, Case, Modified
from emulated import SEEDS, needs_compiler, shared_seeds
from gradients import seeds_of
from harness import same_bits
from mutations import WRONG, Mutation
from mutations_dbias import ALL, PROBLEMS
from strided import Strided
from test_emulated_modifiers import MIXED
from test_mutations import planted

import cupyflash
from cupyflash import _backward_dbias, _jit, _problem
from cupyflash._emulator import build

pytestmark = needs_compiler

HEADS = {"heads_q": 4, "heads_k": 2}
BIASES = tuple(name for name in MODIFIERS if name.startswith("bias"))
# Those that no case of test_emulated_backward has beside a bias.
OTHERS = (
    "alibi_batch", "mask_of_keys", "mask_columns_first", "prefix_of_all", "segments", "sink_fp16",
    "dropout_array", "dropout_of_all", "used_k", "used_uint8",
)  # fmt: skip


def with_bias(case: Modified) -> Modified:
    """Return a case that has a bias, one of its own if it has one."""
    if any(name.startswith("bias") for name in case.modifiers):
        return case
    names = (*case.modifiers, BIASES[len(case.id) % len(BIASES)])
    return Modified(**(vars(case) | {"modifiers": names}))


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.fixture
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiny problems have tiles of many steps."""
    monkeypatch.setattr(_backward_dbias, "BLOCKS", 1)


# Along what a bias repeats


@pytest.fixture(scope="module")
def problem() -> Any:
    """Return the inputs of a call of several tiles, its options, and dbias of a bias of zeros."""
    case = Case(150, 70, 16, 16, "float16", batch=2, heads_q=2, heads_k=2, window_size=(90, 30))
    arrays = [x.host for x in case.arrays()]
    bias = np.zeros((2, 2, 150, 70), np.float32)
    dout, dlse = seeds_of(arrays[0], arrays[2])
    inputs = (*arrays, dout, dlse)
    every = dbias.run(*inputs, attn_bias=bias, **case.options)
    dbias.judge(every, *inputs, attn_bias=bias, **case.options)
    return inputs, case.options, every


@pytest.mark.parametrize("axes", list(itertools.product((False, True), repeat=4)), ids=str)
def test_dbias_is_the_sum_over_what_repeats(
    axes: tuple[bool, ...], problem: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order, a sum of n numbers is off by at most n u times the sum of their sizes."""
    inputs, options, every = problem
    shape = tuple(n if axis else 1 for n, axis in zip(every.shape, axes, strict=True))
    repeated = tuple(n for n, axis in enumerate(axes) if not axis)
    exact = every.astype(np.float64)
    expected = exact.sum(axis=repeated, keepdims=True)
    sizes = abs(exact).sum(axis=repeated, keepdims=True)
    terms = every.size // expected.size
    options = options | {"attn_bias": np.zeros(shape, np.float32)}
    results = []
    for blocks, seed in ((1, 0), (512, 2), (512, 3)):
        monkeypatch.setattr(_backward_dbias, "BLOCKS", blocks)
        results.append(dbias.run(*inputs, seed=seed, **options))
    for result in results:
        assert (abs(result - expected) <= 2**-24 * terms * sizes).all()
    assert same_bits(results[-1], results[-2])


def test_a_bias_of_fewer_axes(problem: Any) -> None:
    inputs, options, every = problem
    for shape in ((), (70,), (150, 1), (2, 1, 70)):
        result = dbias.run(*inputs, attn_bias=np.zeros(shape, np.float32), **options)
        assert result.shape == shape
        whole = (1,) * (4 - len(shape)) + shape
        repeated = tuple(axis for axis, n in enumerate(whole) if n == 1)
        expected = every.sum(axis=repeated, dtype=np.float64).reshape(shape)
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-3)


# Every kind of tile, of element, of memory

TILES = tuple(
    Modified(70, 90, *dims, dtype, 1, **HEADS, causal=True, modifiers=(name,), label="dims")
    for dims, dtype, name in (
        ((7, 5), "bfloat16", "bias_fp16"),
        ((16, 40), "float32", "bias_of_keys"),
        ((64, 64), "float32", "bias"),
        ((96, 80), "bfloat16", "bias_fp64"),
        ((128, 192), "float32", "bias_columns_first"),
        ((256, 256), "bfloat16", "bias_of_queries"),
    )
)


@pytest.mark.parametrize("case", TILES, ids=lambda case: case.id)
def test_head_dims_and_dtypes(case: Modified, few_blocks: None) -> None:
    for seed in shared_seeds(case):
        dbias.check(*case.arrays(), seed=seed, **case.options)


def test_the_tiles_of_a_multiprocessor_of_100_kib(few_blocks: None) -> None:
    case = Modified(
        150, 90, 64, 64, "bfloat16", 1, **HEADS, causal=True, modifiers=("bias_fp16", "dropout")
    )
    dbias.check(*case.arrays(), arch=86, seed=2, **case.options)


@pytest.mark.parametrize(("n", "memory"), tuple(enumerate(ROWWISE)))
def test_any_strides(n: int, memory: str) -> None:
    dtype = ("float16", "float32")[n % 2]
    case = Case(20, 70, 24, 24, dtype, batch=2, heads_q=2, heads_k=2, memory=(memory,) * 3)
    q, k, v = case.arrays()
    dout, dlse = seeds_of(q.host, v.host)
    there = Strided.of(dout, memory)
    bias = normal(1, 2, 2, 20, 70)
    for seed in shared_seeds(case):
        result = dbias.run(q, k, v, there, dlse, attn_bias=bias, seed=seed, **case.options)
        dbias.judge(result, q, k, v, dout, dlse, attn_bias=bias, **case.options)


def test_gradients_that_repeat_are_read_as_they_lie() -> None:
    case = Case(20, 70, 24, 24, "float16", batch=2, heads_q=2, heads_k=2)
    q, k, v = (x.host for x in case.arrays())
    dout = np.broadcast_to(normal(2, 1, 1, 1, 24, dtype=np.float16), (2, 20, 2, 24))
    for dlse in (None, np.broadcast_to(np.float32(0.5), (2, 2, 20))):
        bias = normal(1, 20, 70)
        result = dbias.run(q, k, v, dout, dlse, attn_bias=bias)
        dbias.judge(result, q, k, v, dout, dlse, attn_bias=bias)


# With modifiers beside the bias; test_emulated_backward has the others, and every kind of bias


@pytest.mark.parametrize("name", OTHERS)
def test_each_modifier(name: str, few_blocks: None) -> None:
    case = Modified(
        39, 70, 16, 16, "float16", 2, **HEADS, causal=True, modifiers=(name, "bias_fp16")
    )
    for seed in shared_seeds(case):
        dbias.check(*case.arrays(), seed=seed, **case.options)


@pytest.mark.nightly
@pytest.mark.parametrize("case", MIXED, ids=lambda case: case.id)
def test_several_together(case: Modified, few_blocks: None) -> None:
    case = with_bias(case)
    dbias.check(*case.arrays(), arch=80, seed=2, **case.options)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("bias", 1), ("bias_of_keys", 30), ("bias_of_queries", 1), ("bias_bf16", 30)],
)
def test_packed_sequences(name: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backward_dbias, "BLOCKS", blocks)
    lengths = ((70, 20), (0, 9), (3, 0), (140, 70), *((2, 3),) * 40, (45, 66))
    case = Modified.varlen(
        lengths, 16, 16, "float16", heads_q=2, heads_k=1, modifiers=(name,), tail=5
    )
    dbias.check(*case.arrays(), **case.options)


def test_packed_sequences_are_entries_of_a_batch(few_blocks: None) -> None:
    """All that differs is where they lie."""
    q, k, v, dout = (normal(n, 3, 40, 2, 16, dtype=np.float16) for n in range(4))
    options = {"attn_bias": normal(5, 1, 2, 40, 40), "dropout_p": 0.3, "rng_state": (9, 2**63)}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    expected = dbias.run(q, k, v, dout, None, results=(out, lse), **options)
    cu = np.arange(4) * 40
    flat = [x.reshape(120, 2, 16) for x in (q, k, v, dout, out)]
    results = flat.pop(), lse.swapaxes(0, 1).reshape(2, 120)
    packed = dbias.run(*flat, None, results=results, cu_seqlens_q=cu, cu_seqlens_k=cu, **options)
    assert same_bits(packed, expected)


# Values that hurt


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_lies_beyond_the_lengths_in_use_never_matters(poison: float, few_blocks: None) -> None:
    q, k, v, dout = (normal(n, 3, 70, 2, 16, dtype=np.float16) for n in range(4))
    options: dict[str, Any] = {
        "seqused_q": np.array([33, 0, 70]),
        "seqused_k": np.array([66, 70, 0]),
        "attn_bias": normal(5, 2, 70, 70),
    }
    results = cupyflash.attention(q, k, v, return_lse=True, **options)
    expected = dbias.run(q, k, v, dout, None, results=results, **options)
    dbias.judge(expected, q, k, v, dout, None, **options)
    assert not expected[:, 33:].any()
    assert not expected[:, :, 66:].any()
    out, lse = (x.copy() for x in results)
    options["attn_bias"][:, 33:] = poison
    options["attn_bias"][:, :, 66:] = poison
    for b, (n, m) in enumerate(zip(options["seqused_q"], options["seqused_k"], strict=True)):
        q[b, n:] = k[b, m:] = v[b, m:] = dout[b, n:] = out[b, n:] = poison
        lse[b, :, n:] = poison
    again = dbias.run(q, k, v, dout, None, results=(out, lse), **options)
    assert same_bits(again, expected)


def test_what_hidden_keys_hold_never_matters() -> None:
    """A hidden pair adds nothing, not even 0 times the product with its row of V."""
    q, k, v, dout = (normal(n, 1, 70, 2, 16, dtype=np.float16) for n in range(4))
    options = {"attn_bias": normal(5, 2, 70, 70), "attn_mask": np.ones((70, 70), np.bool_)}
    options["attn_mask"][:, 5] = False
    options["attn_bias"][0, :, 7] = options["attn_bias"][1, 3] = -np.inf
    results = cupyflash.attention(q, k, v, return_lse=True, **options)
    expected = dbias.run(q, k, v, dout, None, results=results, **options)
    dbias.judge(expected, q, k, v, dout, None, **options)
    k[:, 5] = v[:, 5] = np.nan
    again = dbias.run(q, k, v, dout, None, results=results, **options)
    assert same_bits(again, expected)


def test_nan_stays_in_its_row() -> None:
    q, k, v, dout = (normal(n, 1, 70, 1, 16, dtype=np.float16) for n in range(4))
    dout[0, 9] = q[0, 50, 0, 3] = np.nan
    bias = normal(5, 70, 70)
    result = dbias.run(q, k, v, dout, None, attn_bias=bias, causal=True)
    dbias.judge(result, q, k, v, dout, None, attn_bias=bias, causal=True)
    assert np.isnan(result).sum() == 10 + 51


def test_scores_of_any_size() -> None:
    """With a bias that takes them to the ends of fp32."""
    q, k, v, dout = (normal(n, 1, 40, 1, 16, dtype="bfloat16") for n in range(4))
    for scale in (0.0, -0.3, 1e-3, 3.0):
        bias = 20 * normal(6, 40, 40)
        result = dbias.run(q, k, v, dout, None, attn_bias=bias, softmax_scale=scale)
        dbias.judge(result, q, k, v, dout, None, attn_bias=bias, softmax_scale=scale)
    for lowest in (-3e38, 1e30):
        bias = np.where(np.arange(40) < 30, normal(6, 40, 40), np.float32(lowest))
        result = dbias.run(q, k, v, dout, None, attn_bias=bias)
        assert np.isfinite(result).all()


# Nothing to sum


@pytest.mark.parametrize(
    "case",
    [
        Case(3, 5, 16, 24, "float16", batch=0),
        Case(0, 5, 16, 24, "float16", batch=2),
        Case(3, 0, 16, 24, "float16", batch=2),
        Case(3, 5, 16, 24, "float16", heads_q=0, heads_k=0),
    ],
    ids=lambda case: case.id,
)
def test_a_bias_of_no_pair_has_a_gradient_of_zeros(case: Case) -> None:
    arrays = [x.host for x in case.arrays()]
    dout, dlse = seeds_of(arrays[0], arrays[2])
    full = (case.batch, case.heads_q, case.len_q, case.len_k)
    for axes in itertools.product((False, True), repeat=4):
        shape = tuple(n if axis else 1 for n, axis in zip(full, axes, strict=True))
        bias = np.ones(shape, np.float16)
        result = dbias.run(*arrays, dout, dlse, attn_bias=bias)
        assert (result.shape, result.dtype) == (shape, np.float16)
        assert not result.any()


@pytest.mark.parametrize("dims", [(0, 8), (8, 0), (0, 0)], ids=str)
def test_heads_of_no_column(dims: tuple[int, int]) -> None:
    arrays = [x.host for x in Case(70, 50, *dims, "float16", batch=2).arrays()]
    dout, dlse = seeds_of(arrays[0], arrays[2])
    bias = normal(1, 70, 50)
    dbias.judge(dbias.run(*arrays, dout, dlse, attn_bias=bias), *arrays, dout, dlse, attn_bias=bias)


def test_no_sequence_at_all() -> None:
    q, k, v = (x.host for x in Modified.varlen((), 16, 16, "float16", tail=7).arrays())
    cu = np.zeros(1, np.int32)
    for shape in ((1, 1, 1, 1), (1, 1, 5, 9)):
        bias = np.ones(shape, np.float16)
        options = {"attn_bias": bias, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
        result = dbias.run(q, k, v, *seeds_of(q, v), **options)
        assert result.shape == shape
        assert not result.any()


def test_bounds_of_no_sequence_lead_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_problem, "_values", lambda array: None)
    q, k, v = (normal(n, rows, 2, 16, dtype=np.float16) for n, rows in enumerate((90, 80, 80)))
    options = {
        "cu_seqlens_q": np.array([-7, 40, 40, 2**40]),
        "cu_seqlens_k": np.array([5, 2**62, -1, -(2**62)]),
        "seqused_q": np.array([2**50, 3, 45]),
        "seqused_k": np.array([70, -3, 2**33]),
        "attn_bias": normal(5, 2, 50, 75),
    }
    dbias.check(q, k, v, causal=True, **options)
    small = options | {"attn_bias": normal(5, 2, 30, 20)}  # of fewer positions than sequences have
    dbias.run(q, k, v, *seeds_of(q, v), causal=True, **small)


# Planted faults: each is a unit of its own to compile, and so they are left to the night


def reported(problem: str, seed: int) -> str:
    """Run a problem of mutations_dbias; return what the emulator or the oracle says about it."""
    case, blocks = PROBLEMS[problem]
    try:
        result = dbias.emulated(case, blocks, seed)
    except cupyflash.KernelFault as fault:
        return str(fault)
    try:
        dbias.judge_case(case, result)
    except AssertionError as error:
        return f"{WRONG}: {error}"
    return ""


@pytest.mark.nightly
@pytest.mark.parametrize("problem", PROBLEMS)
def test_without_a_fault_nothing_is_reported(problem: str) -> None:
    assert [reported(problem, seed) for seed in SEEDS] == ["" for _ in SEEDS]


@pytest.mark.nightly
@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.name)
def test_a_fault_is_reported(
    mutation: Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.runtime()  # as all tests have it, from their cache
    monkeypatch.setenv("CUPYFLASH_CUDA_DIR", str(planted(mutation, tmp_path / "cuda")))
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    reports = (reported(mutation.problem, seed) for seed in SEEDS)
    first = next(filter(None, reports), "nothing, whatever the seed")
    assert mutation.report in first


def test_faults_have_one_place_in_the_sources() -> None:
    """And names and problems of their own."""
    sources = _jit.sources()
    assert [m.name for m in ALL if sources[m.file].count(m.old) != 1] == []
    assert len({m.name for m in ALL}) == len(ALL)
    assert {m.problem for m in ALL} == set(PROBLEMS)
