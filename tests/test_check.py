"""`cupyflash check`: it passes what is right, and a planted fault makes it fail."""

import json
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from fake_gpu import FakeArray, install

from cupyflash import UnsupportedProblem, _check, _cpu, _kernels
from cupyflash._bench.case import DTYPES, Case
from cupyflash._bench.timing import HostClock
from cupyflash.cli import main

SMALL = (
    ("causal", Case("fp32", 1, 40, 50, 2, 1, 16, 16, "causal"), ()),
    ("sink", Case("bf16", 1, 40, 40, 2, 2, 16, 16, "full"), ("sink",)),
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the table hold two small cases."""
    monkeypatch.setattr(_check, "_TABLE", SMALL)


def plant(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    """Let the CPU path compute rightly, and then ``fault`` spoil its output and LSE."""
    right = _cpu.attention

    def wrong(q, k, v, out, lse, **options) -> None:
        right(q, k, v, out, lse, **options)
        fault(out, lse)

    monkeypatch.setattr(_cpu, "attention", wrong)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["check", "--kernel", "cpu", *arguments])


def test_the_cpu_path_passes_every_quick_case(monkeypatch) -> None:
    monkeypatch.setattr(_check, "TIMING_S", 0.0)
    done = run("--quick", "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["ok"]
    statuses = {
        op: [o["status"] for o in answer["outcomes"] if o["op"] == op]
        for op in ("forward", "backward")
    }
    table = _check.table(quick=True)
    assert statuses["forward"] == ["ok"] * len(table)
    no_gradients = [
        "unsupported" if case.dtype in ("e4m3", "e5m2") else "ok" for _, case, _ in table
    ]
    assert statuses["backward"] == no_gradients
    assert all(o["bound_ratio"] <= 1 for o in answer["outcomes"] if o["status"] == "ok")


@pytest.mark.usefixtures("small")
def test_the_table_shows_errors_times_and_throughput() -> None:
    done = run()
    assert done.exit_code == 0
    for word in ("max error", "LSE error", "time", "GFLOP/s", "causal", "sink", "ok"):
        assert word in done.stdout
    assert "cpu: 2 passed, 0 failed" in done.stdout
    assert done.stderr == ""


def spoil_one_element(out: np.ndarray, lse: np.ndarray) -> None:
    out[-1, -1, -1, -1] += 0.1


def spoil_the_lse(out: np.ndarray, lse: np.ndarray) -> None:
    lse[-1, -1, -1] += 0.01


def leave_a_nan(out: np.ndarray, lse: np.ndarray) -> None:
    out[0, 0, 0, 0] = np.nan


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("fault", [spoil_one_element, spoil_the_lse, leave_a_nan])
def test_a_planted_fault_fails_the_check(monkeypatch, fault) -> None:
    plant(monkeypatch, fault)
    done = run()
    assert done.exit_code == 1
    assert "cpu: 0 passed, 2 failed" in done.stdout
    assert done.stderr.count("failed: cpu:") == 2
    assert "fp32 B1 S40x50 H2/1 D16 causal" in done.stderr


@pytest.mark.usefixtures("small")
def test_a_fault_in_one_case_is_told_from_the_others(monkeypatch) -> None:
    def spoil_bf16(out: np.ndarray, lse: np.ndarray) -> None:
        if out.dtype == DTYPES["bf16"]:
            out[...] = 0

    plant(monkeypatch, spoil_bf16)
    done = run("--json")
    assert done.exit_code == 1
    outcomes = json.loads(done.stdout)["outcomes"]
    statuses = [(o["op"], o["status"]) for o in outcomes]
    # The gradients follow from an output that is wrong.
    assert statuses == [(op, s) for s in ("ok", "failed") for op in ("forward", "backward")]


@pytest.mark.usefixtures("small")
def test_a_crash_is_a_failure(monkeypatch) -> None:
    def crash(out: np.ndarray, lse: np.ndarray) -> None:
        raise ZeroDivisionError("planted")

    plant(monkeypatch, crash)
    done = run()
    assert done.exit_code == 1
    assert "ZeroDivisionError: planted" in done.stderr


@pytest.mark.usefixtures("small")
def test_a_refusal_is_no_failure_unless_all_is_refused(monkeypatch) -> None:
    refused = {"sink"}

    def call(*arrays, **options):
        if "learnable_sink" in options or "causal" in refused:
            raise UnsupportedProblem("not here")
        return right(*arrays, **options)

    right = _check.attention
    monkeypatch.setattr(_check, "attention", call)
    done = run()
    assert done.exit_code == 0
    assert "cpu: 1 passed, 0 failed, 1 not for this kernel" in done.stdout
    refused.add("causal")
    done = run()
    assert done.exit_code == 1
    assert "it took no case of the table" in done.stderr


def test_an_unknown_kernel_is_a_usage_error() -> None:
    done = CliRunner().invoke(main, ["check", "--kernel", "attention_fwd_sm10"])
    assert done.exit_code == 2
    assert "`kernel` must be one of attention_fwd_sm90, attention_fwd_sm80, cpu" in " ".join(
        done.stderr.split()
    )


def test_every_case_has_its_own_inputs_and_every_feature_is_used() -> None:
    rows = [(case, features) for _, case, features in _check.table()]
    assert len(set(rows)) == len(rows)
    assert {f for _, features in rows for f in features} == {*_check.FEATURES, "bhsd"}
    assert {case.dtype for case, _ in rows} == set(DTYPES)


@pytest.mark.gpu
def test_every_kernel_of_the_gpu_passes() -> None:
    done = CliRunner().invoke(main, ["check", "--json"])
    answer = json.loads(done.stdout)
    statuses = {
        (row.op, row.name): [
            o["status"] for o in answer["outcomes"] if (o["op"], o["kernel"]) == (row.op, row.name)
        ]
        for row in _check.available()
    }
    assert statuses.keys() >= {("forward", "cpu"), ("forward", "attention_fwd_sm80")}
    for kernel, found in statuses.items():
        assert "ok" in found, kernel
        assert len(found) == len(_check.table()), kernel
    assert done.exit_code == 0, done.stderr


@pytest.mark.parametrize(
    ("arch", "hopper"), [(80, False), (89, False), (90, True), (100, False), (120, False)]
)
def test_the_table_is_for_every_kernel_of_the_architecture(
    monkeypatch: pytest.MonkeyPatch, arch: int, hopper: bool
) -> None:
    monkeypatch.setattr(_check.environment, "gpu_present", lambda: True)
    monkeypatch.setattr(_check._jit, "compute_capability", lambda device: arch)
    expected = ["attention_fwd_sm90"] * hopper + ["attention_fwd_sm80", "cpu"]
    rows = _check.available()
    assert rows == _check.chosen(None)
    assert [row.name for row in rows if row.op == "forward"] == expected
    backward = [row for row in rows if row.op == "backward"]
    assert backward
    assert all(row.arch is None or arch in row.arch for row in backward)


def test_hopper_takes_every_half_of_the_table_that_it_should() -> None:
    refused = [
        check
        for check, case, features in _check.table()
        if case.dtype in ("fp16", "bf16")
        and set(features) <= {"bhsd", "scale"}
        and not case.lengths
        and _kernels.FORWARD_SM90.refusal(case.request(90).problem)
    ]
    assert refused == ["head dim 33", "v wider than k"]


def test_code_is_compiled_before_the_first_case(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        ("packed", Case("bf16", 2, 40, 40, 2, 1, 16, 16, "full", lengths=(40, 9)), ("seqused",)),
        ("layout", Case("fp16", 1, 40, 50, 2, 1, 33, 33, "causal"), ("bhsd", "bias", "prefix")),
        ("fp8", Case("e4m3", 2, 40, 50, 2, 1, 64, 64, "causal"), ("descale",)),
        ("fp8", Case("e5m2", 2, 40, 50, 2, 1, 64, 64, "full"), ()),
        ("double", Case("fp64", 1, 9, 9, 2, 2, 8, 8, "full"), ()),
    )
    gpu = install(monkeypatch)
    gpu.capability = 90
    monkeypatch.setattr(_check, "_TABLE", table)
    monkeypatch.setattr(_check, "cupy_array", FakeArray)
    monkeypatch.setattr(_check, "cupy_host", lambda x: x.host)
    monkeypatch.setattr(_check, "clock", lambda kind: HostClock())
    units: list[set[str]] = []
    kernels = [_kernels.FORWARD_SM90, _kernels.FORWARD_SM80]
    outcomes = _check.run(
        kernels, False, lambda text: units.append({unit for unit, _, _ in gpu.compiled})
    )
    statuses = {row.name: [o.status for o in outcomes if o.kernel == row.name] for row in kernels}
    other = "unsupported"
    assert statuses["attention_fwd_sm90"] == ["ok", other, "ok", "ok", other], outcomes
    assert statuses["attention_fwd_sm80"] == ["ok", "ok", other, other, other], outcomes
    refused = [o.message for o in outcomes if o.check == "fp8" and o.status == other]
    assert all("takes float16, bfloat16, float32" in message for message in refused), refused
    assert len(units[0]) == 5
    assert units[-1] == units[0]


# Gradients


@pytest.mark.usefixtures("small")
def test_gradients_are_held_to_the_oracle() -> None:
    done = run("--json")
    assert done.exit_code == 0, done.output
    outcomes = json.loads(done.stdout)["outcomes"]
    assert [(o["op"], o["status"]) for o in outcomes] == [("forward", "ok"), ("backward", "ok")] * 2
    found = [o for o in outcomes if o["op"] == "backward"]
    assert all(o["error"] > 0 and 0 < o["bound_ratio"] <= 1 for o in found)
    assert all(o["lse_error"] is None and o["us"] > 0 for o in found)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("place", range(5))
def test_a_fault_in_one_gradient_fails_the_check(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = _check.attention_backward

    def wrong(*arrays: Any, **options: Any) -> Any:
        grads = right(*arrays, **options)
        spoilt = grads[place]
        if spoilt is not None:
            spoilt[(-1,) * spoilt.ndim] += 1
        return grads

    monkeypatch.setattr(_check, "attention_backward", wrong)
    done = run()
    name = ("dq", "dk", "dv", "dbias", "dsink")[place]
    wrong_cases = {"dbias": 0, "dsink": 1}.get(name, 2)
    assert done.exit_code == int(wrong_cases > 0)
    assert f"cpu (backward): {2 - wrong_cases} passed, {wrong_cases} failed" in done.stdout
    assert "cpu: 2 passed, 0 failed" in done.stdout
    assert done.stderr.count("failed: cpu (backward): ") == wrong_cases
    assert done.stderr.count(f": {name}[") == wrong_cases


def test_gradients_in_every_layout_and_of_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [row for row in _check.table(quick=True) if row[0] in ("all at once", "layout bhsd")]
    table += [row for row in _check.table() if row[0] in ("all at once, packed", "bias", "fp8")]
    monkeypatch.setattr(_check, "_TABLE", tuple(table))
    answer = json.loads(run("--json", "--quick").stdout)
    statuses = [(o["check"], o["status"]) for o in answer["outcomes"] if o["op"] == "backward"]
    assert len(statuses) == len(table) >= 6
    for check, status in statuses:
        assert status == ("unsupported" if check == "fp8" else "ok"), check
