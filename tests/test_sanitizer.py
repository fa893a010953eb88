"""Small cases under compute-sanitizer, in a child process (GPU)."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gradients
import pytest
import sanitized
from emulated import needs_compiler
from harness import GPU_KERNELS, attend, run_child
from sanitized import CASES, GRADIENTS

import cupyflash
from cupyflash import _backward_sm90

SOURCES = Path(__file__).resolve().parents[1] / "cuda" / "kernels"
SCRIPT = Path(__file__).with_name("sanitized.py")
TOOLS = ("memcheck", "racecheck", "synccheck")
FOUND = 86  # the exit status that the tool is told to give where it finds an error


def sanitize(tool: str, *what: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND)]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]  # CuPy asks the driver what may have no answer
    command += [sys.executable, str(SCRIPT), *what]
    return run_child(*command, timeout=280, **environment)


@pytest.fixture(scope="module")
def sanitizer() -> None:
    """Skip where the tool is absent, or does not see a fault that is there."""
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not on PATH")
    planted = sanitize("memcheck", "fault")
    if "Invalid __global__ write" not in planted.stdout:
        pytest.skip(f"compute-sanitizer does not work on this machine: {planted.stdout[-300:]}")


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("sanitizer")
@pytest.mark.parametrize("kernel", GPU_KERNELS)
@pytest.mark.parametrize("tool", TOOLS)
def test_the_smoke_cases_are_clean(cp: Any, tool: str, kernel: str) -> None:
    x = cp.ones((1, 8, 1, 64), cp.float16)
    attend(kernel, x, x, x)  # skips where this GPU is not the kernel's
    child = sanitize(tool, "attend", kernel)
    assert child.returncode == 0, child.stdout[-5000:]
    for name in CASES[kernel]:
        assert name in child.stdout.splitlines()


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("sanitizer")
@pytest.mark.parametrize("kernel", GRADIENTS)
@pytest.mark.parametrize("tool", TOOLS)
def test_gradients_are_clean(tool: str, kernel: str, tmp_path: Path) -> None:
    q, k, v = next(iter(GRADIENTS[kernel].values())).arrays()
    gradients.check(kernel, q, k, v)  # skips where this GPU is not the kernel's
    environment = sanitized.sources_for(tool, kernel, tmp_path / "cuda")
    child = sanitize(tool, "differentiate", kernel, **environment)
    assert child.returncode == 0, child.stdout[-5000:]
    for name in GRADIENTS[kernel]:
        assert name in child.stdout.splitlines()


@needs_compiler
def test_the_cases_launch_every_kernel() -> None:
    with cupyflash.emulate(seed=2) as session:
        for kernel in CASES:
            sanitized.attend(kernel, place="cpu")
        for kernel in GRADIENTS:
            sanitized.differentiate(kernel, place="cpu")
    assert session.stats.keys() == {path.stem for path in SOURCES.glob("*.cu")}


@needs_compiler
def test_gradients_are_right_where_every_lane_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = _backward_sm90.NAME
    environment = sanitized.sources_for("racecheck", kernel, tmp_path / "cuda")
    monkeypatch.setenv("CUPYFLASH_CUDA_DIR", environment["CUPYFLASH_CUDA_DIR"])
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    with cupyflash.emulate(seed=2) as session:  # copies as late as possible
        sanitized.differentiate(kernel, place="cpu")
    assert {kernel, _backward_sm90.WIDE} <= session.stats.keys()
    assert capsys.readouterr().out.splitlines() == list(GRADIENTS[kernel])
