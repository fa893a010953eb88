"""The Hopper backward kernels, on the emulator and on a GPU, against the oracle."""

import itertools
import struct
from dataclasses import replace
from typing import Any

import gradients
import numpy as np
import pytest
from cases import EDGES, Case, Modified
from emulated import SEEDS_IN_TURNS, SEEDS_OF, every_other_at_night, needs_compiler
from harness import HOPPER, hosted, same_bits, strided

import cupyflash
from cupyflash import _backward_sm90, _emulator
from cupyflash._array import adapter_of
from cupyflash._emulator import build
from cupyflash._emulator.memory import Memory
from cupyflash._launch import Launch
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
PREFIXES = tuple(
    Modified(140, 390, dim, dim, modifiers=("prefix",), batch=2, label="prefix", **SOME)
    for dim in (64, 256)
)
CASES = CLASSES + DIMS + ONES + SCALES + MEMORY + VARLEN + SINKS + PREFIXES
# More blocks of keys than the emulator has on the machine at a time, so that some wait for others;
# several heads of keys, and several that share them.
ORDERED = (
    *(
        Case(len_q, len_k, dim, dim, dtype, heads_q=4, heads_k=heads_k, label="ordered", **band)
        for dim, len_q, len_k in ((64, 270, 530), (128, 140, 530), (256, 130, 270))
        for (dtype, band), heads_k in zip(
            zip(HALVES * 2, BANDS, strict=True), (1, 2, 4, 1), strict=True
        )
    ),
    Case(300, 410, 64, 64, heads_q=2, heads_k=1, causal=True, alignment="top_left"),
    Case(256, 384, 64, 64, heads_q=2, heads_k=1, label="ordered"),
    Case(128, 256, 128, 128, heads_q=1, heads_k=1, causal=True, label="ordered"),
    Case(300, 410, 64, 64, window_size=(0, 0), label="ordered"),
    Case(300, 410, 40, 64, "float16", window_size=(-1, 100), alignment="top_left"),
    Modified.varlen(((70, 290), (0, 30), (150, 400), (30, 0)), 64, 64, causal=True, tail=9, **SOME),
    Modified.varlen(((70, 300), (0, 3), (130, 290)), 128, 128, "float16", **SOME),
    Modified.varlen(((70, 100), (9, 0), (70, 190)), 256, 256, causal=True, **SOME),
    Modified(140, 390, 64, 64, "float16", modifiers=("sink", "used_q", "used_k"), batch=3, **SOME),
    Modified(140, 200, 256, 256, modifiers=("used_q", "used_k"), batch=3, causal=True, **SOME),
    *PREFIXES,
)


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


@needs_compiler
@pytest.mark.parametrize("case", every_other_at_night(ORDERED), ids=lambda case: case.id)
def test_sums_in_a_fixed_order_have_the_same_bits_at_every_seed(case: Case) -> None:
    with gradients.kept_scratch() as scratch:
        first, *others = (
            gradients.emulated(KERNEL, case, seed, deterministic=True) for seed in SEEDS_IN_TURNS
        )
    judge(case, first)
    assert len(set(scratch)) == 1, "the order of the sums of dq"
    for other in others:
        assert all(map(same_bits, first[:3], other[:3]))


@needs_compiler
@pytest.mark.parametrize("group", [1, 2])
def test_groups_of_heads_keep_the_order(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backward_sm90, "_heads_per_group", lambda *sizes: group)
    case = Case(140, 300, 64, 64, batch=2, heads_q=3, heads_k=3, causal=True)
    with gradients.kept_scratch() as scratch:
        first, *_ = (
            gradients.emulated(KERNEL, case, seed, deterministic=True) for seed in SEEDS_IN_TURNS
        )
    judge(case, first)
    assert len(set(scratch)) == 1


# Few keys, which have several blocks each: grouped heads, ragged shares, shares of one step.
SPLIT = (
    Case(530, 140, 64, 64, heads_q=4, heads_k=1, label="split"),
    Case(300, 260, 128, 128, "float16", batch=2, heads_q=4, heads_k=2, label="split"),
    Case(600, 70, 96, 128, label="split"),
)


@needs_compiler
@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.id)
def test_shares_of_a_walk_have_the_same_sums_at_every_seed(case: Case) -> None:
    first, *others = (gradients.emulated(KERNEL, case, seed) for seed in SEEDS_IN_TURNS)
    judge(case, first)
    for other in others:
        assert same_bits(first.dk, other.dk)
        assert same_bits(first.dv, other.dv)


@pytest.mark.parametrize(
    ("heads", "dim", "length", "options", "walks", "shares"),
    [
        (16, 128, 8192, {}, 68, 5),
        (16, 128, 4096, {}, 68, 3),
        (16, 128, 1024, {}, 0, 1),  # its steps are too few
        (32, 64, 8192, {}, 4, 9),
        (32, 64, 1024, {}, 0, 1),  # its dQ has an order
        (16, 128, 8192, {"deterministic": True}, 0, 1),
        (16, 128, 8192, {"causal": True}, 0, 1),
        (8, 256, 8192, {}, 0, 1),
    ],
)  # fmt: skip
def test_the_last_walks_are_shared(
    heads: int, dim: int, length: int, options: dict[str, Any], walks: int, shares: int
) -> None:
    """Of 16k tokens, as many blocks as there are for an H200 and what is left in the last turn."""
    said = cupyflash.explain(
        batch=16384 // length, len_q=length, len_k=length, heads_q=heads, head_dim=dim,
        dtype="bfloat16", arch=90, backward=True, **options,
    )  # fmt: skip
    launch = said.steps[1][0]
    blocks = heads * 16384 // (64 if dim == 256 else 128)
    assert launch.grid[0] == blocks + walks * (shares - 1)
    assert f"SPLITS = {str(walks > 0).lower()}" in launch.unit


@needs_compiler
def test_sums_have_any_order_unless_asked() -> None:
    case = next(case for case in ORDERED if case.head_dim == 128 and not case.causal)
    with gradients.kept_scratch() as scratch:
        for seed in SEEDS_OF[HOPPER]:
            gradients.emulated(KERNEL, case, seed)
    assert len(set(scratch)) > 1


TURNS = """
struct Trial {
  const int *cases;  // of each: len_q, len_k, left, right, whether the diagonal ends in the corner
  int *wrong, *walked;
  int count;
};

// Whoever adds in the order of the keys finds each counter as it expects it, and no other value.
extern "C" __global__ void turns(const __grid_constant__ Trial trial) {
  using namespace backward;
  const int i = static_cast<int>(threadIdx.x);
  for (int at = i; at < trial.count; at += 32) {
    const int *now = trial.cases + 5 * at;
    Params p{};
    p.heads_q = 4, p.heads_k = 2, p.sharers = 2, p.stat_rows = 1024;
    p.mask.left = now[2], p.mask.right = now[3], p.mask.bottom_right = now[4];
    u32 counters[4 * 1024 / ADDED_ROWS] = {};
    p.added = counters;
    int wrong = 0, walked = 0;
    for (int key = 0; key < now[1] + 2 * BLOCK_K; key += BLOCK_K) {
      const Place place{0, 1, key, -1, 0, {0, now[0], now[0]}, {0, now[1], now[1]}};
      Turns<true> turns(p, place, 1, true);
      u32 left = Walk(p, place).count();
      for (Walk walk(p, place); !walk.done(); walk.advance(), --left, ++walked) {
        turns.choose(walk.block);
        wrong += *turns.counter != turns.before || turns.own <= turns.before;
        wrong += walk.block.q < 0 || walk.block.q >= now[0] || walk.block.head / 2 != 1;
        *turns.counter = turns.own;
      }
      wrong += left != 0;
    }
    trial.wrong[at] = wrong, trial.walked[at] = walked;
  }
}
"""


ROLLING = """
struct Trial {
  int *tiles, *heads;
  int count, blocks, heads_k, batch, group;
};

extern "C" __global__ void order(const __grid_constant__ Trial p) {
  const RollingOrder order(p.blocks, p.heads_k, p.batch, p.group);
  for (int i = static_cast<int>(threadIdx.x); i < p.count; i += 32) {
    const RollingWork work(order, i);
    p.tiles[i] = work.tile, p.heads[i] = work.batch * p.heads_k + work.head;
  }
}
"""


@needs_compiler
def test_blocks_in_a_fixed_order_follow_those_of_earlier_keys() -> None:
    """Each block of each head once, and whoever is waited for before."""
    unit = f'#include "tile/work.cuh"\n{ROLLING}'
    for blocks, heads_k, batch, group in itertools.product(
        (1, 2, 3, 8, 9), (1, 2, 3), (1, 2, 5), (1, 2, 3, 4, 15)
    ):
        heads = heads_k * batch
        group = min(group, heads)
        found = [np.empty(blocks * heads, np.int32) for _ in range(2)]
        run("order", unit, {}, dict(zip(("tiles", "heads"), found, strict=True)),
            struct.pack("<5i4x", blocks * heads, blocks, heads_k, batch, group))  # fmt: skip
        tiles, of = found
        for head in range(heads):
            assert tiles[of == head].tolist() == list(range(blocks)), (blocks, heads, group)


def run(name: str, unit: str, given: dict[str, Any], made: dict[str, Any], numbers: bytes) -> None:
    """Run a kernel of one warp; its Params: arrays that it reads, that it writes, numbers."""
    with Memory(build.runtime()) as memory:
        places = [memory.read(n, adapter_of(x, n).array(x, n)).pointer for n, x in given.items()]
        places += [memory.written(n, adapter_of(x, n).array(x, n)).pointer for n, x in made.items()]
        params = struct.pack(f"<{len(places)}Q", *places) + numbers
        _emulator.run(Launch(unit, name, "sm_90a", (1, 1, 1), (32, 1, 1), 1024, params), 0)
        memory.collect()


def bands_of_lengths() -> np.ndarray:
    """Return lengths around multiples of blocks with bands of every kind, drawn."""
    rng = np.random.default_rng(6)
    lengths = [n + d for n in (0, 64, 128, 256, 384, 640) for d in (-1, 0, 1, 40) if n + d > 0]
    shifts = [-300, -129, -64, -1, 0, 1, 63, 64, 65, 128, 200, 1000]
    draws = [rng.choice(choices, 200) for choices in (lengths, lengths, shifts, shifts, (0, 1))]
    return np.stack(draws, axis=1).astype(np.int32)


@needs_compiler
@pytest.mark.parametrize("dim", _backward_sm90.CLASSES)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 5), (5, -1), (5, 5)], ids=str)
def test_turns_are_those_of_the_blocks_that_walk(dim: int, window: tuple[int, int]) -> None:
    """Else blocks would wait for what nobody does, or not wait for each other."""
    said = cupyflash.explain(
        len_q=600, len_k=600, head_dim=dim, window_size=window, arch=90, backward=True,
        deterministic=True,
    )  # fmt: skip
    header, _, _ = said.steps[1][0].unit.rpartition("#include")
    unit = f'{header}#include "roles/backward_producer_sm90.cuh"\n{TURNS}'
    cases = bands_of_lengths()
    wrong, walked = (np.empty(len(cases), np.int32) for _ in range(2))
    run("turns", unit, {"cases": cases}, {"wrong": wrong, "walked": walked},
        struct.pack("<i4x", len(cases)))  # fmt: skip
    assert not wrong.any(), cases[wrong > 0]
    assert walked.any()


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


@pytest.mark.gpu
@pytest.mark.parametrize("case", ORDERED + LONG, ids=lambda case: case.id)
def test_gradients_in_a_fixed_order_repeat_their_bits(case: Case) -> None:
    arrays = case.arrays()
    dout, dlse = gradients.seeds_of(strided(arrays[0]).host, strided(arrays[2]).host)
    options = case.options | {"deterministic": True}
    first, *others = (gradients.run(KERNEL, *arrays, dout, dlse, **options) for _ in range(10))
    gradients.judge(first, *arrays, dout, dlse, **options)
    for other in others:
        assert all(map(same_bits, first[:3], other[:3]))


def test_a_fixed_order_is_a_form_of_this_kernel() -> None:
    for dim in _backward_sm90.CLASSES:
        sizes = {"len_q": 4096, "head_dim": dim, "causal": True, "arch": 90, "backward": True}
        plain, ordered = (
            cupyflash.explain(**sizes, deterministic=asked) for asked in (False, True)
        )
        assert plain.kernel == ordered.kernel == KERNEL
        symbols = [[launch.symbol for launch, _ in said.steps] for said in (plain, ordered)]
        assert symbols[0] == symbols[1]
        assert "DETERMINISTIC = true" in ordered.steps[1][0].unit


def test_what_the_kernel_does_not_take_says_why() -> None:
    q, k, v = (np.zeros((1, 8, 1, 64), np.float16) for _ in range(3))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    for options, words in (
        ({"softcap": 2.0}, "softcap"),
        ({"dropout_p": 0.5, "rng_state": (1, 2)}, "dropout_p"),
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
    tiles = 10**6 + 2
    assert 1 <= group_of(said) * tiles < 2**32


def group_of(said: Any) -> int:
    """Return the heads of a group of the kernel's launch."""
    params = next(launch.params for launch, _ in said.steps if launch.symbol == KERNEL)
    return _backward_sm90.PARAMS.unpack_from(params, _backward_sm90.OFFSET)[23]


@pytest.mark.parametrize(
    ("dim", "length", "causal", "group"),
    [
        (64, 512, True, 16), (64, 1024, True, 32), (64, 2048, True, 16), (64, 8192, True, 4),
        (128, 512, True, 16), (128, 1024, True, 16), (128, 4096, True, 4), (128, 16384, True, 1),
        (64, 512, False, 16), (64, 1024, False, 16), (64, 2048, False, 8), (128, 8192, False, 1),
    ],
)  # fmt: skip
def test_groups_of_heads_are_those_that_were_measured(
    dim: int, length: int, causal: bool, group: int
) -> None:
    """Of 16k tokens of 2048 columns: see the page on the kernel."""
    said = cupyflash.explain(
        batch=16384 // length, len_q=length, len_k=length, heads_q=2048 // dim, head_dim=dim,
        dtype="bfloat16", causal=causal, arch=90, backward=True,
    )  # fmt: skip
    assert group_of(said) == group


@pytest.mark.parametrize(
    ("head_dim", "length", "options", "ordered"),
    [
        (64, 512, {"causal": True}, True),
        (64, 4096, {"causal": True}, False),
        (128, 1024, {"causal": True}, True),
        (128, 2048, {"causal": True}, False),
        (128, 8192, {"causal": True, "heads_k": 1}, True),
        (256, 512, {"causal": True}, False),
        (64, 512, {}, True),
        (64, 4096, {}, False),
        (64, 1024, {}, True),
        (128, 1024, {"heads_k": 1}, False),
        (64, 512, {"window_size": (9, 0)}, False),
    ],
)
def test_rows_have_an_order_unasked_where_it_is_faster(
    head_dim: int, length: int, options: dict[str, Any], ordered: bool
) -> None:
    said = cupyflash.explain(
        dtype="bfloat16", arch=90, backward=True, batch=2, heads_q=8, head_dim=head_dim,
        len_q=length, len_k=length, **options,
    )  # fmt: skip
    assert f"DETERMINISTIC = {str(ordered).lower()};" in said.steps[1][0].unit


@pytest.mark.parametrize(
    ("options", "converts"),
    [
        ({"len_q": 512, "len_k": 512, "head_dim": 128, "causal": True}, False),
        ({"len_q": 512, "len_k": 2048, "causal": True}, False),
        ({"len_q": 2048, "len_k": 512}, False),
        ({"len_q": 513, "len_k": 512, "causal": True}, True),  # the first query sees no key
        ({"len_q": 513, "len_k": 512, "causal": True, "alignment": "top_left"}, False),
        ({"len_q": 512, "len_k": 2049, "causal": True}, True),
        ({"len_q": 512, "len_k": 512, "window_size": (9, 0)}, True),
        ({"len_q": 512, "len_k": 512, "seqused_k": True}, True),
        ({"len_q": 512, "len_k": 512, "head_dim": 256}, True),
    ],
)
def test_the_last_part_makes_dq_of_short_rows(options: dict[str, Any], converts: bool) -> None:
    sizes = {"dtype": "bfloat16", "arch": 90, "heads_q": 2, "head_dim": 64}
    said = cupyflash.explain(backward=True, deterministic=True, **sizes | options)
    symbols = [launch.symbol for launch, _ in said.steps]
    assert (_backward_sm90.CONVERT in symbols) == converts
    assert f"FINISHES = {str(not converts).lower()};" in said.steps[1][0].unit


@needs_compiler
@pytest.mark.parametrize(
    ("dim", "causal", "ordered"),
    [(dim, causal, False) for dim in (64, 128) for causal in (False, True)] + [(64, True, True)],
)
def test_short_rows_whose_dq_is_converted(
    dim: int, causal: bool, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_backward_sm90, "_is_faster_in_order", lambda problem: ordered)
    monkeypatch.setattr(_backward_sm90, "_finishes", lambda problem: False)
    case = Case(150, 200, dim, dim, heads_q=2, heads_k=1, causal=causal)
    for seed in SEEDS_IN_TURNS:
        gradients.judge_case(case, gradients.emulated(KERNEL, case, seed))
