"""The benchmark tools on the CPU: cases, clocks, turns, a peer's failures, results, tables."""

import contextlib
import functools
import json
import math
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest

from cupyflash import InvalidArgument, _jit, reference
from cupyflash._bench import (
    environment,
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
        out, _ = reference.attention(*arrays, **case.options)
        out[:, -1, -1] += fault
        return out.astype(DTYPES[case.dtype])

    return runner.Runner(call, timing.HostClock(), np.asarray)


def peer(name: str, build) -> peers.Peer:
    return peers.Peer(name, name, (), ("cpu",), build)


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
        ["a", "b", "cupyflash"],
        ["b", "cupyflash", "a"],
        ["cupyflash", "a", "b"],
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


# --- peers ---


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
    """Put modules in the place of FlashAttention-3 and -4 that compute on the CPU."""
    import torch

    def flash_attn_func(q, k, v, causal=False, window_size=(None, None)):
        options = {"causal": causal, "window_size": window_size}
        out, lse = reference.attention(*(x.float().numpy() for x in (q, k, v)), **options)
        dtype = torch.bfloat16 if q.itemsize == 1 else q.dtype
        return torch.from_numpy(out).to(dtype), torch.from_numpy(lse)

    for name in ("flash_attn.cute.interface", "fa3_fwd_interface", "fa3_fwd._C"):
        fake = types.ModuleType(name)
        fake.flash_attn_func = flash_attn_func
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setitem(sys.modules, "fa3_fwd", types.ModuleType("fa3_fwd"))


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
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    stand_in_for_flash_attention(monkeypatch)
    group = run.Group((Case("bf16", 2, 40, 40, 4, 2, 16, 16, mask),), (peers.PEERS[name],), "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FlexAttention says that it is not compiled
        row = measured(group)[1]
    if name in ("fa2", "fa3") and mask.startswith("window"):
        assert row["error"] == "unfit: it has no sliding windows"
        return
    assert "error" not in row
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


def test_suites_hold_the_rows_that_the_bars_are_set_on() -> None:
    bf16, fp32 = suites.suites()["generic"]
    assert {(c.head_dim, c.len_q, c.mask) for c in bf16.cases} == {
        (d, s, m) for d in (64, 128) for s in (1024, 8192) for m in ("full", "causal")
    }
    for group in (bf16, fp32):
        assert group.kernel == "attention_fwd_sm80"
        for case in group.cases:
            assert case.batch * case.len_q == 16384
            assert case.heads_q * case.head_dim == 2048
    assert [p.name for p in bf16.peers] == ["fa2"]
    assert [p.name for p in fp32.peers] == ["efficient"]


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


def test_absent_peers_are_told_once_and_left_out() -> None:
    there = peers.Peer("there", "", (), ("cpu",), oracle)
    absent = peers.Peer("absent", "", ("no_such_package",), ("cpu",), oracle)
    groups = tuple(run.Group((SMALL,), (absent, there), "cpu") for _ in range(2))
    told: list[str] = []
    assert [g.peers for g in sweep.installed(groups, told.append)] == [(there,), (there,)]
    assert told == ["absent is not installed: it is left out"]


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
    sweep.compile_ahead((run.Group((SMALL,), (), "cpu"),))
    assert asked == []
