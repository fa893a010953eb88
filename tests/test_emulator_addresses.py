"""Emulated kernels under AddressSanitizer: what guard pages cannot see, arrays of one thread."""

import subprocess
import sys
from pathlib import Path

import pytest
from cases import SMOKE
from emulated import needs_compiler
from harness import run_child

from cupyflash._emulator import build

pytestmark = [pytest.mark.nightly, needs_compiler]
SCRIPT = Path(__file__).with_name("addresses.py")
# Python leaks, and the emulator has handlers of its own. A fiber has no fake stack.
OPTIONS = "detect_leaks=0:detect_stack_use_after_return=0:handle_segv=0:handle_sigfpe=0"


@pytest.fixture(scope="module")
def library() -> str:
    """Return the sanitizer's library."""
    command = [build.compiler().path, "-print-file-name=libasan.so"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip("g++ has no libasan")
    return path


def sanitized(library: str, what: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, str(SCRIPT), what)
    return run_child(*command, timeout=1000, LD_PRELOAD=library, ASAN_OPTIONS=OPTIONS)


def test_an_index_past_an_array_of_a_thread_is_seen(library: str) -> None:
    child = sanitized(library, "fault")
    assert child.returncode != 0
    assert "AddressSanitizer: stack-buffer-overflow" in child.stdout, child.stdout[-3000:]
    assert "unit.cpp:8" in child.stdout


@pytest.mark.timeout(1000)
def test_the_smoke_cases_are_clean(library: str) -> None:
    child = sanitized(library, "clean")
    assert child.returncode == 0, child.stdout[-5000:]
    for case in SMOKE:
        assert case.id in child.stdout
    assert child.stdout.count("on sm_90") == 2
