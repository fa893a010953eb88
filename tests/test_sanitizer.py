"""The smoke cases under compute-sanitizer, in a child process (GPU)."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import GPU_KERNELS, attend, run_child

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).with_name("sanitized.py")
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


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("sanitizer")
@pytest.mark.parametrize("kernel", GPU_KERNELS)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_the_smoke_cases_are_clean(cp: Any, tool: str, kernel: str) -> None:
    from sanitized import CASES

    x = cp.ones((1, 8, 1, 64), cp.float16)
    attend(kernel, x, x, x)  # skips where this GPU is not the kernel's
    child = sanitize(tool, "smoke", kernel)
    assert child.returncode == 0, child.stdout[-5000:]
    for case in CASES[kernel]:
        assert case.id in child.stdout
