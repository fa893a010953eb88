"""The benchmark tools on the CPU: cases, clocks, turns, a peer's failures, results, tables."""

import contextlib
import functools
import importlib.util
import json
import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from cupyflash import InvalidArgument, _jit, cli, reference
from cupyflash._bench import (
    environment,
    flex,
    gradients,
    modifiers,
    peers,
    results,
    run,
    runner,
    suites,
    sweep,
    timing,
    truth,
    units,
)
from cupyflash._bench.case import DTYPES, Case, mask_options, short_dtype, split_masks

SMALL = Case("fp32", 1, 70, 70, 2, 1, 16, 16, "causal")
QUICK = run.Effort(rounds=2, budget_s=1e-4, preheat_s=0.0)


def oracle(case: Case, arrays: runner.Arrays, device: str, fault: float = 0.0) -> runner.Runner:
    """Build a peer that is the oracle, with a fault in its last row."""

    def call() -> np.ndarray:
        out, _ = reference.attention(*arrays, **oracle_options(case))
        out[..., -1, -1, :] += fault
        return out.astype(DTYPES[case.dtype])

    return runner.Runner(call, timing.HostClock(), np.asarray)


def oracle_options(case: Case) -> dict:
    """Return a case's arguments in the words of the oracle."""
    options = case.arguments(np.asarray)
    options.pop("max_seqlen_q", None), options.pop("max_seqlen_k", None)
    if "segment_ids" in options:
        ids = options.pop("segment_ids")
        options["attn_mask"] = (ids[:, :, None] == ids[:, None])[:, None]
    if "mask" in options:
        i, j = np.ogrid[: case.len_q, : case.len_k]
        prefix = options.pop("mask").prefix
        options["attn_mask"] = (j < prefix[:, None, None, None]) | (j <= i)
    return options


def peer(name: str, build) -> peers.Peer:
    return peers.Peer(name, name, (), ("cpu",), build, (*modifiers.MODIFIERS, "packed"))


def broken(case: Case, arrays: runner.Arrays, device: str) -> runner.Runner:
    raise RuntimeError("no such operator\nwith a long tail")


def unfit(case: Case, arrays: runner.Arrays, device: str) -> runner.Runner:
    raise runner.Unfit("it has no sliding windows")


def measured(group: run.Group, effort: run.Effort = QUICK) -> list[dict]:
    """Return the rows of a group's first case."""
    return next(run.run("test", [group], effort, lambda text: None))


# --- cases ---


def test_masks_are_split_around_the_comma_of_a_window() -> None:
    assert split_masks("full,window:128,0,causal") == ["full", "window:128,0", "causal"]


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        ("full", {"causal": False}),
        ("causal", {"causal": True}),
        ("window:3,-1", {"window_size": (3, -1)}),
    ],
)
def test_a_mask_is_the_arguments_of_attention(mask: str, options: dict) -> None:
    assert mask_options(mask) == options


@pytest.mark.parametrize("mask", ["diagonal", "window:3", "window:a,b", ""])
def test_an_unknown_mask_is_refused(mask: str) -> None:
    with pytest.raises(InvalidArgument, match="`mask` must be full, causal or window:L,R"):
        mask_options(mask)


def test_dtypes_have_two_names() -> None:
    assert short_dtype("bfloat16") == short_dtype("bf16") == "bf16"
    with pytest.raises(InvalidArgument, match="`dtype` must be one of fp16"):
        short_dtype("int8")


@pytest.mark.parametrize("mask", ["full", "causal", "window:5,0", "window:3,9", "window:-1,2"])
@pytest.mark.parametrize(("len_q", "len_k"), [(1, 40), (40, 40), (17, 40), (40, 17)])
def test_pairs_are_those_that_the_mask_keeps(mask: str, len_q: int, len_k: int) -> None:
    case = Case("fp32", 1, len_q, len_k, 1, 1, 8, 8, mask)
    seen = int(case.band.dense(len_q, len_k).sum())
    if mask == "causal" and len_q == len_k:
        assert case.pairs() == len_q * len_k / 2  # the convention of the papers
    else:
        assert case.pairs() == seen


def test_operations_and_bytes_of_a_known_case() -> None:
    case = Case("bf16", 2, 1024, 1024, 16, 4, 128, 64, "full")
    assert case.flops() == 2 * 2 * 16 * 1024 * 1024 * (128 + 64)
    assert case.bytes() == 2 * 2 * 1024 * (16 + 4) * (128 + 64)


def test_inputs_have_the_shapes_of_the_case(rng: np.random.Generator) -> None:
    q, k, v = Case("bf16", 2, 5, 7, 4, 2, 8, 6).inputs(rng)
    assert (q.shape, k.shape, v.shape) == ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6))
    assert {x.dtype.name for x in (q, k, v)} == {"bfloat16"}


# --- clocks ---


def test_the_host_clock_measures_the_call() -> None:
    calls = []
    clock = timing.HostClock()
    assert clock.kernel_us(lambda: calls.append(1), 1e-3) > 0
    assert len(calls) > timing.MIN_CALLS
    assert clock.call_us(lambda: calls.append(1), 1e-3) > 0


def test_a_call_loop_waits_once_for_its_last_result() -> None:
    waited = []

    class Clock(timing.HostClock):
        def sync(self, result=None) -> None:
            waited.append(result)

    numbers = iter(range(10_000))
    Clock().call_us(lambda: next(numbers), 1e-9)
    warm = timing.MIN_CALLS // 2
    # After the estimate, after the warm-up, and after the loop.
    assert waited == [0, warm, warm + timing.MIN_CALLS]


class FakeGpu(timing.GpuClock):
    """A GPU whose clock is a counter: a flush takes 100 us, a call 7, and each is written down."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def step(self, name: str, us: float) -> None:
        self.log.append(name)
        self.now += us

    def capture(self, call):
        return call

    def event(self):
        clock = self

        class Event:
            def record(self) -> None:
                clock.log.append("record")
                self.time = clock.now

        return Event()

    def elapsed_us(self, begin, end) -> float:
        return end.time - begin.time

    def flush(self) -> None:
        self.step("flush", 100.0)


def test_kernel_time_is_between_events_and_every_replay_finds_the_cache_flushed() -> None:
    clock = FakeGpu()
    call = clock.prepare(lambda: clock.step("call", 7.0))
    clock.log.clear()
    assert clock.kernel_us(call, 1e-9) == 7.0
    turn = ["flush", "record", "call", "record"]
    assert clock.log == ["call", *turn * timing.MIN_CALLS]  # the first is the estimate


@pytest.mark.parametrize("fails", [False, True])
def test_torchs_capture_ends_whatever_the_call_does(fails: bool) -> None:
    log: list[str] = []

    class Cuda:
        """What the clock asks of ``torch.cuda``, written down."""

        def Stream(self) -> str:
            return "side"

        def stream(self, stream: str):
            log.append(f"on {stream}")
            return contextlib.nullcontext()

        def synchronize(self) -> None:
            log.append("synchronize")

        def CUDAGraph(self) -> types.SimpleNamespace:
            steps = ("capture_begin", "capture_end", "replay")
            return types.SimpleNamespace(
                **{step: functools.partial(log.append, step) for step in steps}
            )

    def call() -> None:
        if fails and "capture_begin" in log:
            raise RuntimeError("not permitted")
        log.append("call")

    clock = object.__new__(timing.TorchClock)
    clock.cuda = Cuda()
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        clock.capture(call)()
    captured = [] if fails else ["call"]
    replayed = [] if fails else ["replay"]
    assert log == [
        "on side", "call", "synchronize", "capture_begin", *captured, "capture_end", *replayed,
    ]  # fmt: skip


def test_the_budget_bounds_the_number_of_calls() -> None:
    assert timing.calls_in(1.0, 0.01, 200) == 100
    assert timing.calls_in(1.0, 0.0, 200) == 200
    assert timing.calls_in(1.0, 10.0, 200) == timing.MIN_CALLS


# --- checking and timing in turn ---


@pytest.mark.parametrize("mask", ["full", "causal", "window:20,3"])
def test_the_rows_checked_are_the_rows_of_the_whole_problem(mask: str) -> None:
    case = Case("fp32", 2, 150, 200, 4, 2, 16, 24, mask)
    arrays = case.inputs(np.random.default_rng(1))
    built = oracle(case, arrays, "cpu")
    error, wrong = truth.Truth(case, arrays).compare(built.call())
    assert error < 1e-5
    assert wrong == ""


def test_a_wrong_result_is_an_error_of_ours_and_a_note_of_a_peer(monkeypatch) -> None:
    monkeypatch.setattr(run, "cupyflash", lambda *a, **_: oracle(*a, fault=0.1))
    group = run.Group((SMALL,), (peer("fa2", lambda *a: oracle(*a, fault=0.1)),), "cpu")
    own, other = measured(group)
    assert own["error"].startswith("wrong:")
    assert own["kernel_us"] is None
    assert other["note"].startswith("wrong:")
    assert other["kernel_us"] > 0
    assert math.isclose(other["max_error"], 0.1, rel_tol=1e-3)


def test_a_peer_that_fails_gives_a_row_with_its_error() -> None:
    group = run.Group((SMALL,), (peer("fa3", broken), peer("fa4", unfit)), "cpu")
    own, fa3, fa4 = measured(group)
    assert "error" not in own
    assert own["kernel"] == "cpu"
    assert len(own["rounds_us"]) == 2
    assert fa3["error"] == "RuntimeError: no such operator"
    assert fa4["error"] == "unfit: it has no sliding windows"
    assert fa3["kernel_us"] is fa3["tflops"] is None


def test_a_peer_that_cannot_be_captured_has_a_call_time_only() -> None:
    class Clock(timing.HostClock):
        def prepare(self, call):
            raise RuntimeError("operation not permitted")

    def build(*args) -> runner.Runner:
        built = oracle(*args)
        return runner.Runner(built.call, Clock(), np.asarray)

    group = run.Group((SMALL,), (peer("jax", build),), "cpu")
    row = measured(group)[1]
    assert row["kernel_us"] is None
    assert row["call_us"] > 0
    assert "not captured: RuntimeError: operation not permitted" in row["note"]


def test_everyone_is_timed_in_every_round_in_rotating_order(monkeypatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(run, "time_once", lambda entry, budget_s: order.append(entry.impl))
    group = run.Group((SMALL,), (peer("a", oracle), peer("b", oracle)), "cpu")
    measured(group, run.Effort(rounds=4, preheat_s=0))
    turns = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert turns == [
        ["cupyflash", "a", "b"],
        ["b", "a", "cupyflash"],
        ["a", "b", "cupyflash"],
        ["cupyflash", "b", "a"],
    ]


def test_rows_have_the_fields_of_the_design() -> None:
    group = run.Group((SMALL,), (), "cpu")
    (row,) = measured(group)
    fields = {
        "suite", "pass", "impl", "kernel", "dtype", "batch", "len_q", "len_k", "heads_q",
        "heads_k", "head_dim", "head_dim_v", "mask", "options", "kernel_us", "call_us", "tflops",
        "gbps", "max_error",
    }  # fmt: skip
    assert fields <= set(row)
    assert row["tflops"] == pytest.approx(SMALL.flops() / row["kernel_us"] / 1e6)
    json.dumps(row)


# --- modifiers and packed sequences ---

MODIFIED = ("softcap:2", "alibi", "bias", "mask", "sink", "dropout:0.25", "documents", "prefix:70")


@pytest.fixture
def short_documents(monkeypatch) -> None:
    monkeypatch.setattr(modifiers, "DOCUMENTS", (8, 64))


def modified(modifier: str, dtype: str = "fp32") -> Case:
    mask = "full" if modifier.startswith("prefix") else "causal"
    return Case(dtype, 2, 150, 150, 4, 2, 16, 24, mask, modifier=modifier)


def packed(mask: str, dtype: str = "fp32", heads_k: int = 2) -> Case:
    lengths = (70, 1, 130, 9)
    return Case(dtype, 4, 130, 130, 4, heads_k, 16, 16, mask, lengths=lengths)


@pytest.mark.usefixtures("short_documents")
@pytest.mark.parametrize("modifier", MODIFIED)
def test_the_rows_checked_know_the_modifier(modifier: str) -> None:
    case = modified(modifier)
    arrays = case.inputs(np.random.default_rng(1))
    right = truth.Truth(case, arrays)
    error, wrong = right.compare(oracle(case, arrays, "cpu").call())
    assert error < 1e-5
    assert wrong == ""
    without = Case(**{**vars(case), "modifier": ""})
    assert right.compare(oracle(without, arrays, "cpu").call())[1].startswith("wrong: out[")


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_rows_checked_are_of_the_first_the_last_and_the_longest_sequence(mask: str) -> None:
    case = packed(mask)
    arrays = case.inputs(np.random.default_rng(1))
    out = oracle(case, arrays, "cpu").call()
    held = truth.Truth(case, arrays)
    assert held.compare(out)[1] == ""
    for row in (0, 69, 71, 200, 201, 209):
        wrong = out.copy()
        wrong[row] += 1e-3
        assert held.compare(wrong)[1].startswith("wrong: out["), row


def test_dropout_by_other_numbers_is_held_to_its_variance() -> None:
    case = modified("dropout:0.25")
    arrays = case.inputs(np.random.default_rng(1))
    held = truth.Truth(case, arrays)

    def dropped(p: float, seed: int = 5) -> np.ndarray:
        options = {"causal": True, "dropout_p": p, "rng_state": (seed, 6)}
        return reference.attention(*arrays, **options)[0]

    for seed in range(10):  # whatever the numbers
        assert held.compare(dropped(0.25, seed), own_numbers=True) == (None, "")
    assert held.compare(dropped(0.25))[1].startswith("wrong: out[")
    for p in (0.0, 0.1, 0.5):
        error, wrong = held.compare(dropped(p), own_numbers=True)
        assert error is None
        assert wrong.endswith("of the variance of its dropout")


@pytest.mark.usefixtures("short_documents")
@pytest.mark.parametrize("modifier", ["documents", "prefix:70"])
def test_pairs_of_a_mask_are_about_those_that_it_keeps(modifier: str) -> None:
    case = modified(modifier)
    seen = truth.Truth(case, ()).options(modifiers.Rows(0, 0, 0, 150, 150, 150))["attn_mask"]
    other = truth.Truth(case, ()).options(modifiers.Rows(1, 0, 0, 150, 150, 150))["attn_mask"]
    cut = 80 if modifier.startswith("prefix") else 150  # pairs that the convention counts as half
    assert case.pairs() == (seen.sum() + other.sum()) / 2 - cut / 2
    assert case.flops() == 2 * 2 * 4 * case.pairs() * (16 + 24)


def test_packed_sequences_count_what_they_see_and_hold() -> None:
    case = packed("causal")
    squares = 70**2 + 1 + 130**2 + 9**2
    assert case.pairs() == squares / 2
    assert case.flops() == 2 * 4 * squares / 2 * (16 + 16)
    assert case.bytes() == 4 * 210 * (4 + 2) * (16 + 16)
    assert [x.shape for x in case.inputs(np.random.default_rng(0))] == [
        (210, 4, 16), (210, 2, 16), (210, 2, 16),
    ]  # fmt: skip
    assert case.ends.tolist() == [0, 70, 71, 201, 210]
    assert str(case) == "fp32 B4 S130 H4/2 D16 causal packed"


def test_lengths_are_drawn_up_to_a_total_and_alike_each_time() -> None:
    lengths = modifiers.log_uniform(32, 8192, 32768, seed=2026)
    assert sum(lengths) == 32768
    assert all(32 <= n <= 8192 for n in lengths[:-1])
    assert lengths == modifiers.log_uniform(32, 8192, 32768, seed=2026)
    many = modifiers.log_uniform(32, 8192, 1 << 22, seed=1)
    assert np.median(many) == pytest.approx(512, rel=0.25)  # half way in logarithms


def test_a_packed_case_is_asked_about_by_its_rows() -> None:
    problem = packed("causal", "bf16").request(90).problem
    assert problem.packed
    assert (problem.batch, problem.len_q, problem.len_k) == (4, 210, 210)


@pytest.mark.parametrize("text", ["softcap", "alibi:3", "tanh", "dropout:x"])
def test_an_unknown_modifier_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="`modifier` must be one of softcap:VALUE"):
        modified(text)


def test_lengths_must_agree_with_the_sizes() -> None:
    with pytest.raises(InvalidArgument, match="`lengths` must be"):
        Case("fp32", 2, 8, 8, 1, 1, 8, 8, lengths=(8, 8, 8))


@pytest.mark.usefixtures("short_documents")
@pytest.mark.parametrize("modifier", MODIFIED)
def test_ours_is_timed_with_each_modifier_and_beside_the_plain_kernel(modifier: str) -> None:
    own, plain = measured(run.Group((modified(modifier),), (), "cpu", plain=True))
    assert "error" not in own, own["error"]
    assert (own["impl"], plain["impl"]) == ("cupyflash", "plain")
    assert own["variant"] == plain["variant"] == modifier  # one problem
    assert own["kernel"] == plain["kernel"] == "cpu"
    plain_flops = modified("alibi").flops()  # which are those of the causal case
    assert plain["tflops"] == pytest.approx(plain_flops / plain["kernel_us"] / 1e6)
    json.dumps([own, plain])


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_ours_is_timed_on_packed_sequences(mask: str) -> None:
    (own,) = measured(run.Group((packed(mask),), (), "cpu"))
    assert "error" not in own, own["error"]
    assert own["kernel"] == "cpu"
    assert own["lengths"] == [70, 1, 130, 9]
    assert own["variant"] == "packed"


# --- peers ---


def test_peers_refuse_what_they_lack() -> None:
    arrays = modified("softcap:2").inputs(np.random.default_rng(0))
    for name, case, words in [
        ("fa2", modified("bias"), "it has no bias"),
        ("fa3", modified("sink"), "it has no sink"),
        ("fa4", modified("mask"), "it has no dense masks"),
        ("eager", modified("softcap:2"), "it has no softcap"),
        ("jax", packed("full"), "it has no packed sequences"),
    ]:
        with pytest.raises(runner.Unfit, match=words):
            peers.PEERS[name].runner(case, arrays, "cpu")


class CupyMemory(np.ndarray):
    """Memory that is copied only as dtypes of NumPy's own, as that of CuPy is."""

    def get(self) -> np.ndarray:
        assert self.dtype.isbuiltin == 1
        return np.array(self)


@pytest.mark.parametrize("name", DTYPES)
def test_arrays_of_every_dtype_go_to_cupy_and_back(monkeypatch, name: str) -> None:
    def asarray(x: np.ndarray) -> CupyMemory:
        assert x.dtype.isbuiltin == 1
        return x.copy().view(CupyMemory)

    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(asarray=asarray))
    x = np.arange(24).reshape(2, 3, 4).astype(DTYPES[name])
    there = runner.cupy_array(x)
    assert type(there) is CupyMemory
    assert there.dtype == x.dtype
    back = runner.cupy_host(there)
    assert back.dtype == x.dtype
    assert back.tobytes() == x.tobytes()


@pytest.mark.frameworks
@pytest.mark.parametrize("name", DTYPES)
def test_arrays_of_every_dtype_are_torch_tensors(name: str) -> None:
    torch = pytest.importorskip("torch")
    x = np.arange(24).reshape(2, 3, 4).astype(DTYPES[name])
    tensor = runner.torch_tensor(x)
    assert tensor.dtype is getattr(torch, x.dtype.name)
    assert (tensor.double().numpy() == x.astype(np.float64)).all()


def compile_to_graphs(monkeypatch) -> None:
    """Let torch.compile run the graphs that Dynamo makes: the whole of a call, or no call."""
    import torch

    compiled = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compiled)


@pytest.mark.frameworks
@pytest.mark.usefixtures("short_documents")
@pytest.mark.parametrize("variant", [*MODIFIED, "packed"])
def test_flex_is_called_rightly_with_each_modifier(monkeypatch, variant: str) -> None:
    torch = pytest.importorskip("torch")
    if variant.startswith("dropout"):
        assert "dropout" not in peers.PEERS["flex"].features
        return
    compile_to_graphs(monkeypatch)
    case = packed("causal") if variant == "packed" else modified(variant)
    counters = torch._dynamo.utils.counters
    counters.clear()
    built = peers.PEERS["flex"].runner(case, case.shared_inputs(), "cpu")
    out = built.view(built.call())
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert truth.Truth(case, case.shared_inputs()).compare(out)[1] == ""


@pytest.mark.frameworks
def test_flex_is_compiled_for_as_many_cases_as_there_are(monkeypatch) -> None:
    torch = pytest.importorskip("torch")
    compile_to_graphs(monkeypatch)
    counters = torch._dynamo.utils.counters
    counters.clear()
    lengths = range(20, 32)  # more than Dynamo compiles for one code object
    for length in lengths:
        case = Case("fp32", 1, length, length, 2, 2, 16, 16, "causal")
        built = peers.PEERS["flex"].runner(case, case.shared_inputs(), "cpu")
        assert truth.Truth(case, case.shared_inputs()).compare(built.view(built.call()))[1] == ""
    assert counters["stats"]["unique_graphs"] == len(lengths)


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no compiler", "unfit: torch.compile leaves it to run as it is written"),
        ("a graph break", "unfit: torch.compile does not take it whole: "),
    ],
)
def test_flex_is_refused_where_it_is_not_compiled_whole(
    monkeypatch, fault: str, words: str
) -> None:
    torch = pytest.importorskip("torch")
    if fault == "no compiler":
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    else:
        compile_to_graphs(monkeypatch)
        breaking = lambda score, *_: torch._dynamo.graph_break() or score  # noqa: E731
        monkeypatch.setattr(flex, "score_mod", lambda *_: breaking)
    row = measured(run.Group((modified("softcap:2"),), (peers.PEERS["flex"],), "cpu"))[1]
    assert row["error"].startswith(words)
    assert row["call_us"] is None


@pytest.mark.frameworks
@pytest.mark.parametrize("modifier", ["bias", "mask", "dropout:0.25"])
def test_sdpa_is_called_rightly_with_each_modifier(modifier: str) -> None:
    pytest.importorskip("torch")
    case = modified(modifier, "bf16")  # whose bias has the dtype that SDPA asks for
    arrays = case.shared_inputs()
    built = peers.PEERS["sdpa"].runner(case, arrays, "cpu")
    assert built.own_numbers == modifier.startswith("dropout")
    held = truth.Truth(case, arrays)
    assert held.compare(built.view(built.call()), own_numbers=built.own_numbers)[1] == ""


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("fa3", "softcap:2"),
        ("fa3", "packed"),
        ("fa4", "softcap:2"),
        ("fa4", "sink"),
        ("fa4", "alibi"),
        ("fa4", "bias"),
        ("fa4", "packed"),
    ],
)
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_flash_attention_is_called_rightly_with_each_modifier(
    monkeypatch, name: str, variant: str, mask: str
) -> None:
    pytest.importorskip("torch")
    stand_in_for_flash_attention(monkeypatch)
    if variant == "packed":
        case = packed(mask, "bf16")
    elif (variant, mask) == ("alibi", "full"):
        return  # its function takes keys to be before queries
    else:
        case = Case("bf16", 2, 12, 12, 4, 2, 16, 16, mask, modifier=variant)
    arrays = case.shared_inputs()
    built = peers.PEERS[name].runner(case, arrays, "cpu")
    assert truth.Truth(case, arrays).compare(built.view(built.call()))[1] == ""


@pytest.mark.frameworks
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_torchs_packed_attention_is_called_rightly(monkeypatch, mask: str, old: bool) -> None:
    torch = pytest.importorskip("torch")

    def compute(q, k, v, ends, ends_k, max_q, max_k, causal: bool):
        assert (max_q, max_k) == (130, 130)
        assert ends.dtype == ends_k.dtype == torch.int32
        arrays = (x.float().numpy() for x in (q, k, v))
        options = {"cu_seqlens_q": ends.numpy(), "cu_seqlens_k": ends_k.numpy()}
        out, _ = reference.attention(*arrays, causal=causal, **options)
        return torch.from_numpy(out).to(q.dtype)

    def old_varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        return compute(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal)

    def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
        causal = {(-1, -1): False, (-1, 0): True}[window_size]
        return compute(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, causal)

    fake = types.ModuleType("torch.nn.attention.varlen")
    fake.varlen_attn = old_varlen_attn if old else varlen_attn
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    case = packed(mask, "bf16", heads_k=4)
    arrays = case.shared_inputs()
    built = peers.PEERS["fa2"].runner(case, arrays, "cpu")
    assert truth.Truth(case, arrays).compare(built.view(built.call()))[1] == ""


def test_peers_are_chosen_by_name_device_and_presence(monkeypatch) -> None:
    monkeypatch.setattr(peers.Peer, "installed", lambda self, device: self.name != "fa3")
    assert [p.name for p in peers.choose("auto", "cuda")] == ["fa2", "cudnn", "efficient", "fa4"]
    assert [p.name for p in peers.choose("all", "cpu")] == ["sdpa", "jax", "eager"]
    assert peers.choose("none", "cuda") == []
    assert [p.name for p in peers.choose("fa3,flex", "cuda")] == ["fa3", "flex"]
    with pytest.raises(InvalidArgument, match="`vs` must name peers"):
        peers.choose("fa2,fa9", "cuda")


def test_a_peer_without_its_package_is_not_installed() -> None:
    missing = peers.Peer("x", "x", ("no_such_package.cute",), ("cpu",), broken)
    assert not missing.installed("cpu")
    assert peer("y", oracle).installed("cpu")
    broken_parent = peers.Peer("z", "z", ("cupyflash.cli.nothing",), ("cpu",), broken)
    assert not broken_parent.installed("cpu")


@pytest.mark.frameworks
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("name", ["sdpa", "eager", "jax"])
def test_peers_of_the_cpu_are_right(name: str, mask: str) -> None:
    pytest.importorskip("jax" if name == "jax" else "torch")
    case = Case("fp32", 2, 40, 40, 4, 2, 16, 16, mask)
    group = run.Group((case,), (peers.PEERS[name],), "cpu")
    row = measured(group)[1]
    assert "error" not in row
    assert "wrong" not in row.get("note", "")
    assert row["max_error"] < 1e-5


def stand_in_for_flash_attention(monkeypatch) -> None:
    """Put modules in the place of FlashAttention-3 and -4 that compute on the CPU.

    Their functions have the parameters' names of the libraries' own.
    """
    import torch

    def compute(q, k, v, **options):
        arrays = (x.float().numpy() for x in (q, k, v))
        options = {n: x.numpy() if hasattr(x, "numpy") else x for n, x in options.items()}
        out, lse = reference.attention(*arrays, **options)
        dtype = torch.bfloat16 if q.itemsize == 1 else q.dtype
        return torch.from_numpy(out).to(dtype), torch.from_numpy(lse)

    def flash_attn_func(
        q, k, v, *, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
        score_mod=None, aux_tensors=None,
    ):  # fmt: skip
        bias = None
        if score_mod is not None:
            assert softcap == 0.0  # which the library refuses beside it
            bias = np.zeros((*q.shape[:3:2], q.shape[1], k.shape[1]), np.float32)
            for b, h, i, j in np.ndindex(bias.shape):
                at = (torch.tensor([n], dtype=torch.int32) for n in (b, h, i, j))
                b_idx, h_idx, q_idx, kv_idx = at
                bias[b, h, i, j] = score_mod(
                    torch.zeros(1), b_idx, h_idx,
                    q_idx=q_idx, kv_idx=kv_idx, seqlen_info=None, aux_tensors=aux_tensors,
                )  # fmt: skip
        return compute(
            q, k, v, causal=causal, window_size=window_size, learnable_sink=learnable_sink,
            softcap=softcap, attn_bias=bias,
        )  # fmt: skip

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        causal=False,
    ):  # fmt: skip
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
        return compute(q, k, v, causal=causal, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)

    for name in ("flash_attn.cute.interface", "fa3_fwd_interface", "fa3_fwd._C"):
        fake = types.ModuleType(name)
        fake.flash_attn_func = flash_attn_func
        fake.flash_attn_varlen_func = flash_attn_varlen_func
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setitem(sys.modules, "fa3_fwd", types.ModuleType("fa3_fwd"))
    cutlass, cute = types.ModuleType("cutlass"), types.ModuleType("cutlass.cute")
    cutlass.Float32, cute.jit = torch.float32, lambda function: function
    monkeypatch.setitem(sys.modules, "cutlass", cutlass)
    monkeypatch.setitem(sys.modules, "cutlass.cute", cute)


@pytest.mark.frameworks
def test_fp8_is_timed_with_the_peer_that_has_it(monkeypatch) -> None:
    pytest.importorskip("torch")
    stand_in_for_flash_attention(monkeypatch)
    case = Case("e4m3", 2, 40, 40, 4, 2, 16, 16, "causal")
    own, fa3, fa4 = measured(run.Group((case,), (peers.PEERS["fa3"], peers.PEERS["fa4"]), "cpu"))
    for row in (own, fa3):
        assert row["kernel_us"] > 0
        assert "note" not in row
    assert fa4["error"] == "unfit: it takes bf16 and fp16, not e4m3"


@pytest.mark.frameworks
@pytest.mark.parametrize("mask", ["full", "causal", "window:5,3"])
@pytest.mark.parametrize("name", ["fa2", "flex", "fa3", "fa4"])
def test_peers_of_the_gpu_are_called_rightly(monkeypatch, name: str, mask: str) -> None:
    """Their builders on CPU tensors, with a stand-in where the library is for GPUs only."""
    pytest.importorskip("torch")
    compile_to_graphs(monkeypatch)
    stand_in_for_flash_attention(monkeypatch)
    group = run.Group((Case("bf16", 2, 40, 40, 4, 2, 16, 16, mask),), (peers.PEERS[name],), "cpu")
    row = measured(group)[1]
    if name in ("fa2", "fa3") and mask.startswith("window"):
        assert row["error"] == "unfit: it has no sliding windows"
        return
    assert row.get("error") is None
    assert "note" not in row
    assert row["max_error"] < 0.02


@pytest.mark.frameworks
def test_sdpa_refuses_what_it_would_compute_otherwise() -> None:
    pytest.importorskip("torch")
    for case, reason in [
        (Case("fp32", 1, 8, 9, 1, 1, 8, 8, "causal"), "aligned to the top left"),
        (Case("fp32", 1, 9, 9, 1, 1, 8, 8, "window:2,0"), "no sliding windows"),
    ]:
        with pytest.raises(runner.Unfit, match=reason):
            peers.PEERS["sdpa"].build(case, case.inputs(np.random.default_rng(0)), "cpu")


# --- results ---


def rows_of(times: dict[str, list[float]], **extra) -> list[dict]:
    common = {
        "suite": "generic", "pass": "fwd", "dtype": "bf16", "batch": 2, "len_q": 8192,
        "len_k": 8192, "heads_q": 16, "heads_k": 16, "head_dim": 128, "head_dim_v": 128,
        "mask": "causal", "options": {}, "max_error": 1e-3, "kernel": None,
    }  # fmt: skip
    flops = 4 * 2 * 16 * 8192 * 8192 * 128 / 2
    return [
        {
            **common,
            "impl": impl,
            "kernel_us": float(np.median(us)),
            "call_us": float(np.median(us)) + 10,
            "tflops": flops / float(np.median(us)) / 1e6,
            "gbps": 1.0,
            "rounds_us": us,
            **extra,
        }
        for impl, us in times.items()
    ]


def test_the_ratio_is_the_median_of_the_rounds_ratios() -> None:
    own, fa2, cudnn = rows_of(
        {"cupyflash": [100, 200, 100], "fa2": [110, 240, 150], "cudnn": [400, 100, 95]}
    )
    assert results.ratio(own, fa2) == pytest.approx(1.2)
    assert results.ratio(own, cudnn) == pytest.approx(0.95)
    group = {row["impl"]: row for row in (own, fa2, cudnn)}
    assert results.best_ratio(group) == (pytest.approx(0.95), "cudnn")


def test_a_page_has_one_line_per_problem_and_a_column_per_implementation() -> None:
    rows = rows_of({"fa2": [2000.0], "cupyflash": [1000.0], "fa3": [500.0]})
    rows[2] |= {"error": "unfit: no", "rounds_us": [], "tflops": None}
    assert results.markdown(rows).splitlines() == [
        f"TFLOP/s; {results.CAPTION}",
        "",
        "| pass | dtype | B | S | H | D | mask | cupyflash | fa2 | fa3 | vs best peer |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| fwd | bf16 | 2 | 8192 | 16 | 128 | causal | 550 | 275 | - | 2.00 (fa2) |",
    ]


def test_a_modifier_has_a_column_and_our_time_over_the_plain_kernels() -> None:
    times = {"cupyflash": [110.0, 220.0], "plain": [100.0, 200.0], "fa4": [121.0, 242.0]}
    rows = rows_of({"cupyflash": [100.0, 200.0]}) + rows_of(times, variant="softcap:30")
    _, header, lines = results.grid(rows)
    assert header[6:] == ["mask", "with", "cupyflash", "plain", "fa4", "x plain", "vs best peer"]
    assert [line[7] for line in lines] == ["", "softcap:30"]
    assert [line[-2:] for line in lines] == [["-", "-"], ["1.10", "1.10 (fa4)"]]
    del rows[2]  # nothing to compare with
    assert "x plain" not in results.grid(rows)[1]


def test_a_plain_kernel_that_fails_is_a_failure_of_ours() -> None:
    assert results.own_failed(rows_of({"plain": [1.0]}, error="wrong: out"))
    assert not results.own_failed(rows_of({"fa4": [1.0]}, error="wrong: out"))


def test_small_figures_are_shown_in_a_smaller_unit() -> None:
    rows = rows_of({"cupyflash": [1e7]})
    title, header, lines = results.grid(rows)
    assert title == "GFLOP/s"
    assert lines[0][header.index("cupyflash")] == "55.0"


def test_a_results_file_survives_the_disk(tmp_path: Path) -> None:
    document = {"env": environment.environment(), "rows": rows_of({"cupyflash": [1.0]})}
    path = tmp_path / results.file_name(document["env"], "cpu")
    results.save(document, path)
    assert results.load(path) == document


@pytest.mark.parametrize("text", ["", "[]", '{"rows": 3, "env": {}}', '{"rows": []}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match="must be a results file"):
        results.load(path)


def test_files_are_named_by_card_date_and_suite() -> None:
    env = {"gpu": "NVIDIA H200", "date": "2026-11-29T12:00:00+00:00"}
    assert results.file_name(env, "generic") == "h200-2026-11-29-generic.json"
    assert results.file_name({**env, "gpu": None}, "cpu") == "cpu-2026-11-29-cpu.json"


def test_csv_has_a_line_per_row_and_json_in_nested_fields() -> None:
    lines = results.csv_text(rows_of({"cupyflash": [1.0], "fa2": [2.0]})).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("suite,pass,dtype")
    assert "[1.0]" in lines[1]


def test_faults_name_the_row() -> None:
    rows = rows_of({"fa3": [1.0]}, error="RuntimeError: no")
    assert results.faults(rows) == ["fa3 bf16 S8192 D128 causal: RuntimeError: no"]


def test_the_environment_says_what_results_depend_on() -> None:
    env = environment.environment()
    names = {"gpu", "driver", "cuda", "nvrtc", "cupy", "torch", "peers", "clocks", "date", "commit"}
    assert names <= set(env)
    json.dumps(env)


def test_the_help_names_every_suite() -> None:
    (option,) = (option for option in cli.bench.params if option.name == "suite")
    assert option.help == f"One of {', '.join(suites.suites())}."


@pytest.mark.parametrize(
    ("suite", "kernel"),
    [("generic", "attention_fwd_sm80"), ("backward-generic", "attention_bwd_sm80")],
)
def test_suites_hold_the_rows_that_the_bars_are_set_on(suite: str, kernel: str) -> None:
    bf16, fp32, *biased = suites.suites()[suite]
    assert {(c.head_dim, c.len_q, c.mask) for c in bf16.cases} == {
        (d, s, m) for d in (64, 128) for s in (1024, 8192) for m in ("full", "causal")
    }
    for group in (bf16, fp32):
        assert group.kernel == kernel
        assert group.backward == (suite != "generic")
        for case in group.cases:
            assert case.batch * case.len_q == 16384
            assert case.heads_q * case.head_dim == 2048
    assert [p.name for p in bf16.peers] == ["fa2"]
    assert [p.name for p in fp32.peers] == ["efficient"]
    assert [str(case) for group in biased for case in group.cases] == (
        ["bf16 B4 S4096 H16 D128 full bias"] if suite == "backward-generic" else []
    )
    assert all(group.plain and group.kernel == kernel for group in biased)


def test_the_hopper_suite_holds_the_rows_of_the_kernel() -> None:
    cases = [case for group in suites.hopper() for case in group.cases]
    assert len(set(cases)) == len(cases) == 49
    bf16 = {
        (c.head_dim, c.len_q, c.mask)
        for c in cases
        if (c.dtype, c.heads_k, c.head_dim_v) == ("bf16", 2048 // c.head_dim, c.head_dim)
    }
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    squares = {(d, s, m) for d in (64, 128, 256) for s in lengths for m in ("full", "causal")}
    assert bf16 == squares | {(128, 8192, "window:1024,0")}
    assert all(case.batch * case.len_q == 16384 for case in cases)
    others = [case for case in cases if case.dtype != "bf16" or case.heads_k == 2]
    assert {str(case) for case in others} == {
        f"{problem} {mask}"
        for mask in ("full", "causal")
        for problem in (
            "bf16 B2 S8192 H16/2 D128",
            "fp16 B2 S8192 H16 D128",
            "e4m3 B2 S8192 H32 D64",
            "e4m3 B2 S8192 H16 D128",
            "e4m3 B2 S8192 H8 D256",
        )
    }
    assert sum((case.head_dim, case.head_dim_v) == (192, 128) for case in cases) == 2


def test_the_modifiers_are_timed_beside_the_plain_kernel_and_all_who_have_them() -> None:
    found = {
        f"{case.mask} {case.variant}".strip(): (group.plain, [peer.name for peer in group.peers])
        for group in suites.modifiers()
        for case in group.cases
    }
    assert found == {
        "causal": (False, ["fa3", "fa4", "cudnn", "fa2", "flex"]),
        "causal softcap:30": (True, ["fa3", "fa4", "flex"]),
        "causal alibi": (True, ["fa4", "flex"]),
        "causal sink": (True, ["fa4", "flex"]),
        "causal dropout:0.1": (True, ["cudnn", "efficient", "fa2"]),
        "causal bias": (True, ["fa4", "cudnn", "efficient", "flex"]),
        "window:1024,0": (True, ["fa4", "flex"]),
        "causal mask": (True, ["cudnn", "efficient", "flex"]),
        "causal documents": (True, ["flex"]),
        "full prefix:1024": (True, ["flex"]),
    }
    for group in (*suites.modifiers(), *suites.varlen()):
        for case in group.cases:
            assert (case.dtype, case.heads_q * case.head_dim) == ("bf16", 2048)
            assert case.lengths or (case.batch, case.len_q, case.len_k) == (4, 4096, 4096)
            assert all(case.features <= set(peer.features) for peer in group.peers)


def test_packed_sequences_are_timed_with_equal_and_with_drawn_lengths() -> None:
    (group,) = suites.varlen()
    assert [peer.name for peer in group.peers] == ["fa4", "fa3", "fa2", "flex"]
    assert [(case.mask, sum(case.lengths)) for case in group.cases] == [
        (mask, total) for mask in ("causal", "full") for total in (16384, 32768)
    ]
    equal, drawn = group.cases[:2]
    assert equal.lengths == (1024,) * 16
    assert min(drawn.lengths[:-1]) >= 32
    assert 4096 < max(drawn.lengths) <= 8192


def test_eight_bit_rows_are_found_by_fp8() -> None:
    (group,) = suites.narrowed(suites.hopper(), rows="fp8")
    assert {case.dtype for case in group.cases} == {"e4m3"}
    assert len(group.cases) == 6


def test_a_part_of_a_suite_by_rows_and_peers() -> None:
    groups = suites.hopper()
    (group,) = suites.narrowed(groups, rows="bf16 .*S8192 H16 D128 causal", without="fa4")
    assert [str(case) for case in group.cases] == ["bf16 B2 S8192 H16 D128 causal"]
    assert [peer.name for peer in group.peers] == ["fa3", "cudnn", "fa2"]
    (group,) = suites.narrowed(groups, rows="fp16", peers="cudnn,fa3", kernel="x")
    assert [peer.name for peer in group.peers] == ["cudnn"]
    assert group.kernel == "x"
    assert not any(group.peers for group in suites.narrowed(groups, peers="none"))
    assert suites.narrowed(groups, rows="no such row") == ()
    for part, words in [({"rows": "("}, "`rows` must be"), ({"without": "fa9"}, "`peers` must be")]:
        with pytest.raises(InvalidArgument, match=words):
            suites.narrowed(groups, **part)


def test_no_problem_begins_when_the_time_is_up(monkeypatch) -> None:
    now = iter([10.0, 20.0, 21.0])
    monkeypatch.setattr(run.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(run, "measure", lambda case, *_: [{"len_q": case.len_q}])
    cases = tuple(Case("fp32", 1, n, n, 1, 1, 8, 8) for n in (1, 2, 3))
    told: list[str] = []
    rows = list(run.run("test", [run.Group(cases, (), "cpu")], QUICK, told.append, until=15.0))
    assert rows == [[{"suite": "test", "len_q": 1}]]
    assert told[1:] == [f"{case}: left out, the time is up" for case in cases[1:]]


def test_absent_peers_are_told_once_and_left_out() -> None:
    there = peers.Peer("there", "", (), ("cpu",), oracle)
    absent = peers.Peer("absent", "", ("no_such_package",), ("cpu",), oracle)
    groups = tuple(run.Group((SMALL,), (absent, there), "cpu") for _ in range(2))
    told: list[str] = []
    assert [g.peers for g in sweep.installed(groups, told.append)] == [(there,), (there,)]
    assert told == ["absent is not installed: it is left out"]


@pytest.fixture
def script(monkeypatch, tmp_path: Path):
    """``bench/run.py`` on two small problems, which writes into a folder of its own."""
    path = Path(__file__).resolve().parents[1] / "bench" / "run.py"
    spec = importlib.util.spec_from_file_location("bench_run", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    env = {"gpu": None, "date": "2026-11-29T00:00:00", "commit": None}
    monkeypatch.setattr(environment, "environment", lambda: dict(env))
    group = run.Group((SMALL, modified("softcap:2")), (peer("broken", broken),), "cpu")
    monkeypatch.setattr(sweep, "suites", lambda: {"cpu": (group,)})
    monkeypatch.setattr(sweep, "installed", lambda groups, tell: groups)
    monkeypatch.setitem(peers.PEERS, "broken", group.peers[0])

    def invoke(*words: str):
        short = ("--rounds", "1", "--turn", "0.0001", "--out", str(tmp_path))
        return CliRunner().invoke(script.main, ["cpu", *short, *words])

    return invoke


@pytest.mark.parametrize(
    ("words", "name", "problems"),
    [
        ((), "cpu", 2),
        (("--budget", "600"), "cpu", 2),
        (("--budget", "0"), "cpu-part", 0),
        (("--rows", "softcap"), "cpu-part", 1),
    ],
)
def test_the_script_writes_what_it_measured(
    script, tmp_path: Path, words: tuple[str, ...], name: str, problems: int
) -> None:
    done = script(*words)
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.iterdir()
    assert path.name == f"cpu-2026-11-29-{name}.json"
    rows = results.load(path)["rows"]
    assert len(results.problems(rows)) == problems
    assert done.stderr.count("broken fp32 S") == problems  # told, and the others went on


def test_what_there_is_is_kept_after_each_case() -> None:
    kept: list[int] = []
    groups = (run.Group((SMALL, SMALL), (), "cpu"),)
    document = sweep.document(
        "test", groups, QUICK, str, keep=lambda part: kept.append(len(part["rows"]))
    )
    assert kept == [1, 2]
    assert len(document["rows"]) == 2


def test_inputs_are_drawn_once_for_cases_of_one_size() -> None:
    cases = [Case("bf16", 1, 8, 8, heads, heads, 32 // heads, 32 // heads) for heads in (2, 4)]
    first, second = (case.shared_inputs() for case in cases)
    assert all(map(np.shares_memory, first, second))
    assert not np.array_equal(first[0], first[1])
    assert [x.shape for x in second] == [(1, 8, 4, 8)] * 3


def test_the_oracle_is_asked_once_for_all_results_of_a_case(monkeypatch) -> None:
    asked = []
    plain = reference.plain
    monkeypatch.setattr(reference, "plain", lambda *a, **o: asked.append(1) or plain(*a, **o))
    group = run.Group((SMALL,), (peer("a", oracle), peer("b", oracle)), "cpu")
    assert all("error" not in row for row in measured(group))
    assert len(asked) == 4  # the first and last rows of the first and last head


def test_all_that_a_suite_needs_is_compiled_before_it_starts(monkeypatch) -> None:
    asked: list[Case] = []
    monkeypatch.setattr(_jit, "compute_capability", lambda device: 90)
    monkeypatch.setattr(units.Unit, "compile", lambda unit: asked.append(unit.case))
    sweep.compile_ahead(suites.hopper())
    cases = [case for group in suites.hopper() for case in group.cases]
    assert set(asked) >= {case for case in cases if case.dtype != "e4m3"}
    asked.clear()
    with_masks = modified("prefix:70", "bf16"), modified("documents", "bf16")
    sweep.compile_ahead((run.Group(with_masks, passes=True),))
    assert set(asked) == set(with_masks)
    asked.clear()
    sweep.compile_ahead((run.Group((SMALL,), (), "cpu"),))
    assert asked == []
    kernels: set[str] = set()
    monkeypatch.setattr(units.Unit, "compile", lambda unit: kernels.add(unit.launch.symbol))
    for kernel in (None, "attention_bwd_sm80"):
        sweep.compile_ahead((run.Group((SMALL,), (), kernel=kernel, backward=True),))
        assert kernels == {"attention_fwd_sm80", "attention_bwd_delta", "attention_bwd_sm80",
                           "attention_bwd_dq"}  # fmt: skip
        kernels.clear()


@pytest.mark.frameworks
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_backward_passes_of_the_cpu_are_timed_beside_a_peer(dtype: str) -> None:
    pytest.importorskip("torch")
    case = Case(dtype, 1, 96, 96, 2, 2, 32, 32, "causal")
    group = run.Group((case,), (peers.PEERS["sdpa"],), "cpu", backward=True)
    own, sdpa = measured(group)
    assert (own["pass"], own["kernel"], sdpa["impl"]) == ("bwd", "cpu", "sdpa")
    for row in (own, sdpa):
        assert "error" not in row
        assert 0 < row["max_error"] < 0.1
        assert row["call_us"] > 0
    groups = suites.suites()["cpu"]
    assert [group.backward for group in groups] == [False, True]


@pytest.mark.frameworks
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_both_passes_are_timed_together_beside_peers(mask: str) -> None:
    pytest.importorskip("torch")
    case = Case("fp16", 1, 96, 96, 2, 2, 32, 32, mask)
    everyone = (peers.PEERS["sdpa"], peers.PEERS["eager"])
    group = run.Group((case,), everyone, "cpu", passes=True)
    backward = run.Group((case,), everyone, "cpu", backward=True)
    rows = measured(group)
    assert [row["impl"] for row in rows] == ["cupyflash", "sdpa", "eager"]
    assert rows[0]["kernel"] == "cpu, cpu"
    for row, alone in zip(rows, measured(backward), strict=True):
        assert row["pass"] == "fwd+bwd"
        assert "error" not in row
        assert row["max_error"] == alone["max_error"]  # the same gradients, whoever is asked
        assert row["tflops"] * row["kernel_us"] == pytest.approx(3.5 * case.flops() / 1e6)
        assert "extra_mib" not in row  # of which a CPU knows nothing


@pytest.mark.frameworks
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_gradient_of_a_bias_is_timed_and_held_against_fp64(mask: str) -> None:
    pytest.importorskip("torch")
    case = Case("bf16", 2, 96, 96, 4, 2, 32, 32, mask, modifier="bias")
    group = run.Group((case,), (peers.PEERS["sdpa"],), "cpu", plain=True, backward=True)
    own, plain, sdpa = measured(group)
    assert [row["impl"] for row in (own, plain, sdpa)] == ["cupyflash", "plain", "sdpa"]
    assert all("error" not in row for row in (own, plain, sdpa))
    arrays = case.shared_inputs()
    truth = gradients.GradientTruth(case, arrays, "cpu")
    for build in (gradients.own, functools.partial(gradients.of_peer, peers.PEERS["sdpa"].runner)):
        built = build(case, arrays, "cpu")
        with built.context():
            results = [x.clone() for x in built.view(built.call())]
        assert [tuple(x.shape) for x in results] == [*case.shapes, (1, 1, 96, 96)]
        assert build is not gradients.own or truth.compare(results)[1] == ""
        results[3][0, 0, 7, 3] += 2
        assert truth.compare(results)[1].startswith("wrong: dbias")


@pytest.mark.frameworks
def test_a_fixed_order_of_sums_is_timed_beside_any_order() -> None:
    pytest.importorskip("torch")
    case = Case("bf16", 1, 96, 96, 2, 2, 32, 32, "causal", modifier="deterministic")
    own, plain = measured(run.Group((case,), (), "cpu", plain=True, backward=True))
    assert (own["impl"], plain["impl"]) == ("cupyflash", "plain")
    assert own["variant"] == "deterministic"
    assert all("error" not in row and row["pass"] == "bwd" for row in (own, plain))
    (line,) = results.grid([own, plain])[2]
    assert line[results.grid([own, plain])[1].index("x plain")] != "-"


def test_the_memory_of_a_call_is_the_most_beside_what_there_was() -> None:
    told: list[str] = []
    clock = timing.TorchClock.__new__(timing.TorchClock)
    clock.cuda = types.SimpleNamespace(
        synchronize=lambda: told.append("wait"),
        memory_allocated=lambda: 100,
        reset_peak_memory_stats=lambda: told.append("reset"),
        max_memory_allocated=lambda: 100 + 3 * 2**20,
    )
    assert clock.extra_bytes(lambda: told.append("call")) == 3 * 2**20
    assert told == ["wait", "reset", "call", "wait"]
    own, eager = rows_of({"cupyflash": [2.0], "eager": [8.0]})
    title, header, lines = results.grid([{**own, "extra_mib": 3.0}, eager], "extra_mib")
    assert title == "MiB beside the inputs, at the most"
    assert [lines[0][header.index(name)] for name in ("cupyflash", "eager")] == ["3.00", "-"]


def test_the_papers_row_and_lengths_for_its_memory() -> None:
    (group,) = suites.paper()
    assert group.name == "fwd+bwd"
    assert [str(case) for case in group.cases] == [
        "fp16 B64 S1024 H16 D64 full",
        *(f"fp16 B4 S{length} H16 D64 full" for length in (512, 1024, 2048, 4096)),
    ]
    assert [peer.name for peer in group.peers] == ["eager", "fa2", "fa4", "cudnn"]


def test_fixed_orders_of_sums_are_timed_at_each_head_dim() -> None:
    (group,) = suites.deterministic()
    assert group.backward
    assert group.plain
    assert {(c.head_dim, c.len_q, c.mask) for c in group.cases} == {
        (d, s, m) for d in (64, 128, 256) for s in (1024, 8192) for m in ("full", "causal")
    }
    for case in group.cases:
        assert case.variant == "deterministic"
        assert case.arguments(np.asarray)["deterministic"] is True


@pytest.mark.frameworks
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_gradients_are_held_against_fp64(mask: str) -> None:
    pytest.importorskip("torch")
    case = Case("bf16", 2, 96, 96, 4, 2, 32, 32, mask)
    arrays = case.shared_inputs()
    runner = gradients.own(case, arrays, "cpu")
    truth = gradients.GradientTruth(case, arrays, "cpu")
    results = runner.view(runner.call())
    error, wrong = truth.compare(results)
    assert not wrong
    assert error is not None
    assert 0 < error < 0.1
    for n, name in enumerate(("dq", "dk", "dv")):
        spoilt = [x.clone() for x in results]
        spoilt[n][0, 5, 0, 3] += 0.25
        assert truth.compare(spoilt)[1].startswith(f"wrong: {name}")
    assert "shape" in truth.compare([results[0][:1], *results[1:]])[1]
