"""`cupyflash check --emulate`: what it counts, and that a faulty kernel fails it."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_emulated_steps as steps
from click.testing import CliRunner
from emulated import needs_compiler
from mutations import ARITHMETIC, MASKS, SYNCHRONISATION, Mutation
from test_mutations import planted

from cupyflash import _check, _check_emulated, _emulator, _kernels
from cupyflash._bench.case import Case
from cupyflash._emulator import build
from cupyflash.cli import main

SMALL = (
    ("full", Case("fp16", 1, 150, 130, 2, 1, 64, 64, "full"), ()),
    ("causal", Case("bf16", 1, 256, 256, 1, 1, 64, 64, "causal"), ("bhsd",)),
    ("odd head dim", Case("fp16", 1, 40, 40, 1, 1, 33, 33, "full"), ()),
    ("double", Case("fp64", 1, 40, 40, 2, 2, 16, 16, "full"), ()),
    ("packed", Case("bf16", 2, 40, 40, 2, 2, 16, 16, "full", lengths=(40, 9)), ("sink",)),
    ("throughput", Case("bf16", 9, 9999, 9999, 99, 99, 64, 64, "full"), ()),
)
KERNEL = "attention_fwd_sm80"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the table hold a few small cases."""
    monkeypatch.setattr(_check, "_TABLE", SMALL)


def run(*arguments: str, kernel: str = KERNEL) -> Any:
    return CliRunner().invoke(main, ["check", "--emulate", "--kernel", kernel, *arguments])


@needs_compiler
def test_what_the_kernels_moved_is_counted() -> None:
    done = run("--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["ok"]
    full, causal, odd, double, packed = answer["outcomes"]
    statuses = [o["status"] for o in answer["outcomes"]]
    assert statuses == ["ok", "ok", "ok", "unsupported", "ok"]
    # Blocks of 128 queries and 64 keys: two heads with two tiles of queries and three of keys.
    assert (full["moved"]["tiles_loaded"], full["moved"]["tiles_skipped"]) == (12, 0)
    assert (causal["moved"]["tiles_loaded"], causal["moved"]["tiles_skipped"]) == (2 + 4, 2)
    assert causal["moved"]["global_read_bytes"] == (256 + 2 * (128 + 256)) * 64 * 2
    assert full["moved"]["mma"] > causal["moved"]["mma"] > 0
    assert odd["moved"]["tiles_loaded"] is None, "its elements go by plain loads"
    assert double["moved"] is None
    assert packed["moved"]["tiles_loaded"] is None, "lengths decide them"
    assert packed["moved"]["mma"] > 0
    assert all(o["us"] is None for o in answer["outcomes"])


@needs_compiler
def test_what_the_hopper_kernel_moved_is_counted() -> None:
    done = run("--json", kernel="attention_fwd_sm90")
    assert done.exit_code == 0, done.output
    full, causal, odd, double, _ = json.loads(done.stdout)["outcomes"]
    assert odd["status"] == double["status"] == "unsupported"
    # Tiles of 256 queries and 64 keys: a head has one of queries.
    assert (full["moved"]["tiles_loaded"], full["moved"]["tiles_skipped"]) == (2 * 3, 0)
    assert (causal["moved"]["tiles_loaded"], causal["moved"]["tiles_skipped"]) == (4, 0)
    assert causal["moved"]["global_read_bytes"] == (256 + 2 * 256) * 64 * 2
    assert full["moved"]["products"] == full["moved"]["wgmma"] > 0


@needs_compiler
@pytest.mark.parametrize("kernel", ["attention_bwd_sm80", "attention_bwd_sm90"])
def test_what_the_backward_kernels_moved_is_counted(kernel: str) -> None:
    done = run("--json", kernel=kernel)
    assert done.exit_code == 0, done.output
    full, causal, odd, double, packed = (o["moved"] for o in json.loads(done.stdout)["outcomes"])
    generic = kernel == "attention_bwd_sm80"
    # Tiles of queries and of keys: 64 and 128 of the generic kernel, 128 and 128 on Hopper.
    assert (full["tiles_loaded"], full["tiles_skipped"]) == ((12 if generic else 8), 0)
    assert (causal["tiles_loaded"], causal["tiles_skipped"]) == ((6, 2) if generic else (3, 1))
    assert full["launches"] == (3 if generic else 2)  # short rows on Hopper are not converted
    assert full["mma" if generic else "wgmma"] == full["products"] > causal["products"] > 0
    assert double is None
    assert odd is None if not generic else odd["tiles_loaded"] is None, "it goes by plain loads"
    assert packed["tiles_loaded"] is None, "lengths decide them"


@needs_compiler
def test_gradients_are_of_what_a_forward_kernel_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = []

    @contextlib.contextmanager
    def session(*arguments: Any) -> Iterator[_emulator.Session]:
        with begin(*arguments) as found:
            sessions.append(found)
            yield found

    begin = _emulator.session
    monkeypatch.setattr(_emulator, "session", session)
    monkeypatch.setattr(_check, "_TABLE", SMALL[:1])
    done = run("--json", kernel="attention_bwd_sm80")
    assert done.exit_code == 0, done.output
    before, counted = (list(one.stats) for one in sessions)
    assert before == ["attention_fwd_sm90"]
    assert counted == ["attention_bwd_delta", "attention_bwd_sm80", "attention_bwd_dq"]


@needs_compiler
def test_the_table_shows_tiles_bytes_and_products() -> None:
    done = run()
    assert done.exit_code == 0, done.output
    for word in ("tiles loaded", "tiles skipped", "bytes read", "matrix products", "causal"):
        assert word in done.stdout
    assert f"{KERNEL}: 4 passed, 0 failed, 1 not for this kernel" in done.stdout
    assert f"{KERNEL}: 18 tiles loaded, 2 tiles skipped by the mask, " in done.stdout


@needs_compiler
@pytest.mark.parametrize(
    "mutation", [SYNCHRONISATION[0], ARITHMETIC[0], MASKS[0]], ids=lambda mutation: mutation.name
)
def test_a_faulty_kernel_fails(
    mutation: Mutation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.runtime()
    monkeypatch.setattr(_check, "_TABLE", SMALL[:2])
    monkeypatch.setenv("CUPYFLASH_CUDA_DIR", str(planted(mutation, tmp_path / "cuda")))
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    done = run()
    assert done.exit_code == 1
    assert f"failed: {KERNEL}: " in done.stderr
    if mutation in SYNCHRONISATION:
        assert "KernelFault: attention_fwd_sm80 (seed 0): tile/" in done.stderr


@needs_compiler
def test_a_kernel_of_the_host_is_a_usage_error() -> None:
    done = run(kernel="cpu")
    assert done.exit_code == 2
    expected = "must be one of attention_fwd_sm90, attention_fwd_sm80, "
    assert expected in " ".join(done.stderr.split())


def test_without_a_compiler_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    build.compiler.cache_clear()
    done = run()
    build.compiler.cache_clear()
    assert done.exit_code == 1
    assert "the emulator compiles the kernels with g++, which is not on the PATH" in done.stderr
    assert _check_emulated.ARCH == 90


@needs_compiler
def test_every_launch_of_a_backward_call_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = steps.row(steps.FIRST, steps.THIRD)
    monkeypatch.setattr(_kernels, "KERNELS", (*_kernels.KERNELS, made_up))
    monkeypatch.setattr(
        _check, "_TABLE", (("full", Case("fp32", 1, 6, 6, 1, 1, 8, 8, "full"), ()),)
    )
    done = run("--json", kernel="steps")
    assert done.exit_code == 1
    (outcome,) = json.loads(done.stdout)["outcomes"]
    assert (outcome["op"], outcome["status"]) == ("backward", "failed"), "it computes no gradients"
    assert outcome["message"].startswith("dq[")
    assert outcome["moved"]["launches"] == 2
    assert outcome["moved"]["global_read_bytes"] == 4 * 48 * 2
    assert outcome["moved"]["tiles_loaded"] is None
    assert "failed: steps (backward): full" in done.stderr
