"""The Hopper backward kernels, on the emulator and on a GPU, against the oracle."""

from dataclasses import replace
from typing import Any

import gradients
import numpy as np
import pytest
from cases import EDGES, Case, Modified
from emulated import SEEDS_OF, needs_compiler
from harness import HOPPER, hosted, same_bits, strided

import cupyflash
from cupyflash import _backward_sm90
from cupyflash.errors import UnsupportedProblem

KERNEL = _backward_sm90.NAME
BANDS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window_size": (40, 9)},
    {"window_size": (3, -1), "alignment": "top_left"},
)
HALVES = ("bfloat16", "float16")
# Each class of head dims with each band: several blocks of queries and keys, ragged ones, rows and
# keys that see nothing, heads that share K and V.
CLASSES = tuple(
    Case(200, 150, dim, dim, dtype, heads_q=2, heads_k=1, label="class", **band)
    for dim in _backward_sm90.CLASSES
    for dtype, band in zip(HALVES * 2, BANDS, strict=True)
)
DIMS = tuple(
    Case(70, 140, *dims, causal=True, label="dims")
    for dims in ((8, 8), (40, 64), (64, 128), (96, 96), (192, 128), (136, 200))
)
ONES = tuple(
    Case(len_q, len_k, 64, 64, label="ones", **band)
    for len_q, len_k in ((1, 1), (1, 200), (200, 1), (128, 128), (129, 127))
    for band in ({}, {"causal": True})
)
SCALES = tuple(
    Case(70, 70, 64, 64, causal=True, softmax_scale=scale, label="scale")
    for scale in (0.0, -0.3, 1e-3)
)
MEMORY = (
    Case(
        70,
        130,
        64,
        64,
        batch=2,
        heads_q=2,
        heads_k=2,
        memory=("heads_first", "packed", "row_gap_8"),
    ),
    Case(70, 130, 128, 128, batch=2, heads_q=4, heads_k=2, causal=True),
)
SOME = {"heads_q": 2, "heads_k": 1}
VARLEN = tuple(
    Modified.varlen(lengths, dim, dim, causal=causal, tail=tail, **SOME)
    for dim, causal, lengths, tail in (
        (64, False, ((70, 130), (0, 20), (64, 64)), 0),
        (64, True, ((130, 70), (1, 1), (20, 0)), 5),
        (128, True, ((70, 130), (70, 20)), 3),
        (256, True, ((70, 70), (60, 70)), 10),
    )
)
# Sinks, of which the kernel sees the LSE alone: with rows that see no key, and lengths in use.
SINKS = (
    *(
        Modified(140, 150, dim, dim, modifiers=(sink,), batch=2, label="sink", **SOME, **band)
        for dim, sink, band in (
            (64, "sink", {"causal": True}),
            (128, "sink_fp16", {"window_size": (3, -1), "alignment": "top_left"}),
            (256, "sink", {}),
        )
    ),
    Modified(70, 130, 64, 64, "float16", modifiers=("sink", "used_q", "used_k"), batch=3, **SOME),
    Modified(100, 30, 64, 64, modifiers=("sink_fp16",), causal=True, label="empty_rows", **SOME),
    replace(VARLEN[1], modifiers=("sink",)),
    replace(VARLEN[3], modifiers=("sink_fp16",)),
)
CASES = CLASSES + DIMS + ONES + SCALES + MEMORY + VARLEN + SINKS


def judge(case: Case, results: cupyflash.Gradients) -> None:
    q, k, v = (x.host for x in case.arrays())
    gradients.judge(results, q, k, v, *gradients.seeds_of(q, v), **hosted(case.options))


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_emulated_kernel_obeys_the_accuracy_rule(case: Case) -> None:
    judge(case, gradients.emulated(KERNEL, case, CASES.index(case) % 12))


@needs_compiler
@pytest.mark.parametrize("seed", SEEDS_OF[HOPPER])
@pytest.mark.parametrize("case", [CLASSES[1], CLASSES[5], CLASSES[9]], ids=lambda case: case.id)
def test_gradients_of_keys_are_the_same_at_every_seed(case: Case, seed: int) -> None:
    first, other = (gradients.emulated(KERNEL, case, n) for n in (0, seed))
    judge(case, other)
    assert same_bits(first.dk, other.dk)
    assert same_bits(first.dv, other.dv)


USED = {"seqused_q": np.array([70, 0, 130]), "seqused_k": np.array([100, 150, 0])}


def with_garbage(case: Case) -> list[Any]:
    """Return q, k, v, dout and dlse with NaN in the rows that are not in use."""
    q, k, v = (np.array(x.host) for x in case.arrays())
    dout, dlse = (np.array(x) for x in gradients.seeds_of(q, v))
    for b, (rows_q, rows_k) in enumerate(zip(*USED.values(), strict=True)):
        q[b, rows_q:], dout[b, rows_q:], dlse[b, :, rows_q:] = np.nan, np.nan, np.nan
        k[b, rows_k:], v[b, rows_k:] = np.nan, np.nan
    return [q, k, v, dout, dlse]


GARBAGE = tuple(
    Case(140, 150, dim, dim, batch=3, heads_q=2, heads_k=1, causal=dim == 64, label="garbage")
    for dim in _backward_sm90.CLASSES
)


@needs_compiler
@pytest.mark.parametrize("case", GARBAGE, ids=lambda case: case.id)
def test_what_lies_beyond_the_lengths_reaches_nothing_emulated(case: Case) -> None:
    q, k, v, dout, dlse = with_garbage(case)
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **case.options, **USED)
    with cupyflash.emulate(seed=3):
        results = cupyflash.attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, kernel=KERNEL, **case.options, **USED
        )
    gradients.judge(results, q, k, v, dout, dlse, **case.options, **USED)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GARBAGE, ids=lambda case: case.id)
def test_what_lies_beyond_the_lengths_reaches_nothing(case: Case) -> None:
    arrays = with_garbage(case)
    results = gradients.run(KERNEL, *arrays, **case.options, **USED)
    gradients.judge(results, *arrays, **case.options, **USED)


def test_the_gradient_of_a_sink_is_one_more_step() -> None:
    for dim in _backward_sm90.CLASSES:
        sizes = {"len_q": 4096, "head_dim": dim, "causal": True, "arch": 90, "backward": True}
        plain, sunk = (cupyflash.explain(**sizes, learnable_sink=sink) for sink in (None, True))
        symbols = [[launch.symbol for launch, _ in said.steps] for said in (plain, sunk)]
        assert symbols[1] == [*symbols[0], "attention_bwd_dsink"]
        assert plain.kernel == sunk.kernel == KERNEL


LONG = tuple(
    Case(len_q, len_k, dim, dim, batch=2, heads_q=4, heads_k=2, label="long", **band)
    for dim in _backward_sm90.CLASSES
    for len_q, len_k in ((1000, 1300),)
    for band in BANDS
)
EDGES_HERE = tuple(replace(case, dtype="float16") for case in EDGES if case.dtype in HALVES)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES + LONG + EDGES_HERE, ids=lambda case: case.id)
def test_the_kernel_obeys_the_accuracy_rule(case: Case) -> None:
    gradients.check(KERNEL, *case.arrays(), **case.options)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LONG[::5], ids=lambda case: case.id)
def test_gradients_of_keys_repeat_their_bits(case: Case) -> None:
    arrays = case.arrays()
    dout, dlse = gradients.seeds_of(strided(arrays[0]).host, strided(arrays[2]).host)
    runs = [gradients.run(KERNEL, *arrays, dout, dlse, **case.options) for _ in range(3)]
    for other in runs[1:]:
        assert same_bits(runs[0].dk, other.dk)
        assert same_bits(runs[0].dv, other.dv)


def test_what_the_kernel_does_not_take_says_why() -> None:
    q, k, v = (np.zeros((1, 8, 1, 64), np.float16) for _ in range(3))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    for options, words in (
        ({"softcap": 2.0}, "softcap"),
        ({"dropout_p": 0.5, "rng_state": (1, 2)}, "dropout_p"),
        ({"deterministic": True}, "deterministic"),
        ({"attn_mask": np.ones((8, 8), bool)}, "band"),
    ):
        with cupyflash.emulate(), pytest.raises(UnsupportedProblem, match=words):
            cupyflash.attention_backward(out, q, k, v, out, lse, kernel=KERNEL, **options)


def test_groups_of_heads_are_no_more_than_there_are() -> None:
    """Blocks of a group are counted in 32 bits, also those of a million sequences of no rows."""
    said = cupyflash.explain(
        batch=10**6, len_q=1, len_k=1, heads_q=2, head_dim=64, causal=True, backward=True,
        cu_seqlens_q=True, cu_seqlens_k=True,
    )  # fmt: skip
    assert said.kernel == KERNEL
    params = next(launch.params for launch, _ in said.steps if launch.symbol == KERNEL)
    *_, group, _, _, _ = _backward_sm90.PARAMS.unpack_from(params, _backward_sm90.OFFSET)
    tiles = 10**6 + 2
    assert 1 <= group * tiles < 2**32
