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

SOURCES = Path(__file__).resolve().parents[1] / "cuda" / "kernels"
SCRIPT = Path(__file__).with_name("sanitized.py")
TOOLS = ("memcheck", "racecheck", "synccheck")
FOUND = 86  # the exit status that the tool is told to give where it finds an error


def sanitize(tool: str, *what: str) -> subprocess.CompletedProcess[str]:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND)]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]  # CuPy asks the driver what may have no answer
    return run_child(*command, sys.executable, str(SCRIPT), *what, timeout=280)


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
def test_gradients_are_clean(tool: str, kernel: str) -> None:
    q, k, v = next(iter(GRADIENTS[kernel].values())).arrays()
    gradients.check(kernel, q, k, v)  # skips where this GPU is not the kernel's
    child = sanitize(tool, "differentiate", kernel)
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
