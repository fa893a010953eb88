"""The tuner on the CPU: candidates are compiled, refused, checked and raced; the winner leads."""

import dataclasses
import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from cupyflash import _forward_sm80, _jit, _kernels, reference
from cupyflash._bench import candidates, environment, run, runner, tune
from cupyflash._bench.case import DTYPES, Case
from cupyflash._bench.timing import HostClock

pytest.importorskip("cupy", reason="needs CuPy and NVRTC")

CASE = Case("bf16", 1, 40, 40, 1, 1, 16, 16, "causal")
EFFORT = run.Effort(rounds=4, budget_s=1e-4, preheat_s=0.0)
ROW = _kernels.FORWARD_SM80


class ByKeys(HostClock):
    """A clock to which a configuration of fewer keys a block is faster."""

    def __init__(self, keys: int) -> None:
        self.keys = keys

    def kernel_us(self, prepared: Any, budget_s: float) -> float:
        return float(self.keys)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a GPU of 9.0 be here, on which the oracle stands for the kernel."""

    def build(case: Case, arrays: Any, device: str, *, kernel: str) -> runner.Runner:
        # What `using` has put in the place of the row's own function, which the launch asks.
        config = _forward_sm80.config(case.request(90).problem)

        def call() -> np.ndarray:
            out, _ = reference.attention(*arrays, **case.options)
            return (out + (config.block_k == 48)).astype(DTYPES[case.dtype])

        return runner.Runner(call, ByKeys(config.block_k), runner.first)

    monkeypatch.setattr(_jit, "compute_capability", lambda device: 90)
    monkeypatch.setattr(tune, "cupyflash", build)


def configs(*keys: int) -> list[Any]:
    base = ROW.config(CASE.request(90).problem)
    return [dataclasses.replace(base, block_k=n) for n in keys]


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every configuration compile: into 100 registers, and spills where it has 96 keys."""

    def compile(unit: str, symbol: str, arch: str) -> Any:
        spills = 8 if "BLOCK_K = 96" in unit else 0
        return _jit.Cubin(Path(), symbol, arch, "", _jit.Resources(100, 0, spills, 0, 0, 1.0, ""))

    monkeypatch.setattr(_jit, "compile", compile)


@pytest.mark.usefixtures("no_compiler")
def test_the_fastest_right_configuration_leads_and_the_refused_come_last() -> None:
    rows = tune.fastest(CASE, ROW, configs(64, 32, 48, 96, 80), EFFORT)
    assert [row["config"] for row in rows] == [
        {"block_k": 32}, {}, {"block_k": 80}, {"block_k": 48}, {"block_k": 96},
    ]  # fmt: skip
    assert rows[0]["registers"] == 100
    assert rows[3]["error"].startswith("wrong:")
    assert rows[4]["error"] == "spills 8 bytes"
    assert [len(row["rounds_us"]) for row in rows] == [4, 4, 4, 0, 0]
    json.dumps(rows)
    shown = list(tune.lines(rows))
    assert "block_k=32" in shown[0]
    assert "as it is" in shown[1]
    assert shown[3].startswith("  refused: block_k=48: wrong:")


@pytest.mark.usefixtures("no_compiler")
def test_only_the_fastest_are_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "FINALISTS", 2)
    rows = tune.fastest(CASE, ROW, configs(64, 32, 80, 112), EFFORT)
    assert [row["config"] for row in rows] == [
        {"block_k": 32}, {}, {"block_k": 80}, {"block_k": 112},
    ]  # fmt: skip
    assert [len(row["rounds_us"]) for row in rows] == [4, 4, 2, 2]


def test_candidates_are_compiled_by_their_own_units() -> None:
    good, bad = configs(64, 24)  # 24 keys are no multiple of what the kernel's loops take
    found = tune.compiled(CASE, ROW, [good, bad])
    assert found[good].registers > 0
    assert found[bad].startswith("does not compile:")
    assert ROW.config(CASE.request(90).problem) == good


def test_candidates_of_a_row_start_with_the_present_one_and_fit() -> None:
    case = Case("bf16", 2, 8192, 8192, 16, 16, 128, 128, "causal")
    base, *others = found = candidates.sm80(ROW, case, 90)
    assert base == ROW.config(case.request(90).problem)
    assert len(set(found)) == len(found) > 20
    assert {config.block_k for config in others} >= {32, 64, 128}
    for config in found:
        assert max(1, config.min_blocks) * (config.smem_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_candidates_of_the_hopper_kernel_fit_and_use_what_there_is(dims: tuple[int, int]) -> None:
    case = Case("bf16", 2, 8192, 8192, 16, 16, *dims, "causal")
    kernel = _kernels.FORWARD_SM90
    base, *others = found = candidates.sm90(kernel, case, 90)
    assert base == kernel.config(case.request(90).problem)
    assert len(set(found)) == len(found) > 2
    assert all(config.smem_bytes <= 227 * 1024 for config in found)
    tiles = [(c.block_k, c.consumers, c.q_buffers, c.k_stages, c.v_stages) for c in others]
    for block_k, consumers, q_buffers, k_stages, v_stages in tiles:
        assert (block_k, consumers, q_buffers, k_stages + 1, v_stages) not in tiles
        assert (block_k, consumers, q_buffers, k_stages, v_stages + 1) not in tiles


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_candidates_of_8_bits_hold_the_product_beside_o(dim: int) -> None:
    """The present tiles are within what is tried, which takes turns or not."""
    case = Case("e4m3", 2, 8192, 8192, 2048 // dim, 2048 // dim, dim, dim, "causal")
    base, *others = candidates.sm90(_kernels.FORWARD_SM90, case, 90)
    assert {config.turns for config in (base, *others)} == {False, True}
    assert base.block_k in {config.block_k for config in others}
    most = {
        consumers: max(c.block_k for c in (base, *others) if c.consumers == consumers)
        for consumers in {config.consumers for config in others}
    }
    # By a thread's registers, 232 and 160, for the scores and O, and by shared memory.
    assert most == {64: {2: 256, 3: 192}, 128: {2: 224, 3: 128}, 256: {2: 128}}[dim]


def test_another_configuration_of_the_hopper_kernel_is_launched() -> None:
    case = Case("bf16", 1, 256, 256, 1, 1, 128, 128)
    kernel = _kernels.FORWARD_SM90
    problem, operands, *_ = case.request(90)
    one = next(c for c in candidates.sm90(kernel, case, 90) if c.block_k == 128)
    with tune.using(kernel, one):
        launch = kernel.launch(problem, operands)
    assert "BLOCK_K = 128" in launch.unit
    assert launch.shared_bytes == one.smem_bytes
    assert "BLOCK_K = 128" not in kernel.launch(problem, operands).unit


def test_the_problems_of_a_table_are_those_that_its_kernel_takes() -> None:
    cases = list(candidates.problems(ROW, 90))
    assert {case.dtype for case in cases} == {"bf16", "fp32"}
    assert {(case.len_q, case.mask) for case in cases} == set(
        itertools.product((1024, 8192), ("full", "causal"))
    )
    assert all(case.batch * case.len_q == 16384 for case in cases)


@pytest.mark.usefixtures("no_compiler")
def test_the_script_prints_winners_and_writes_a_results_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = Path(__file__).resolve().parents[1] / "bench" / "tune.py"
    spec = importlib.util.spec_from_file_location("bench_tune", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    env = {"gpu": "NVIDIA H200", "date": "2026-11-29T00:00:00", "commit": None}
    monkeypatch.setattr(environment, "environment", lambda: dict(env))
    monkeypatch.setattr(script, "problems", lambda row, arch: [CASE])
    monkeypatch.setitem(script.CANDIDATES, ROW.name, lambda *_: configs(64, 32))
    words = ["--kernel", ROW.name, "--out", str(tmp_path), "--rounds", "2", "--turn", "0.0001"]
    done = CliRunner().invoke(script.main, words)
    assert done.exit_code == 0, done.output
    assert str(CASE) in done.stdout
    document = json.loads((tmp_path / "h200-2026-11-29-tune.json").read_text())
    assert [row["config"] for row in document["rows"]] == [{"block_k": 32}, {}]
