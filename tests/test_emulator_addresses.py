"""Emulated kernels under AddressSanitizer: what guard pages cannot see, arrays of one thread."""

import dbias
import mutations_bwd_sm80
import mutations_bwd_sm90
import mutations_dbias
import pytest
from cases import SMOKE
from emulated import needs_compiler, sanitized

pytestmark = [pytest.mark.nightly, needs_compiler]
BACKWARD = {
    "attention_bwd_sm80": mutations_bwd_sm80.PROBLEMS,
    "attention_bwd_sm90": mutations_bwd_sm90.PROBLEMS,
    dbias.NAME: mutations_dbias.PROBLEMS,
}
# Python leaks, and the emulator has handlers of its own. A fiber has no fake stack.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:handle_segv=0:handle_sigfpe=0"
}


def test_an_index_past_an_array_of_a_thread_is_seen() -> None:
    child = sanitized("libasan.so", "addresses.py", "fault", **OPTIONS)
    assert child.returncode != 0
    assert "AddressSanitizer: stack-buffer-overflow" in child.stdout, child.stdout[-3000:]
    assert "unit.cpp:8" in child.stdout


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("kernel", BACKWARD)
def test_gradients_are_clean(kernel: str) -> None:
    child = sanitized("libasan.so", "addresses.py", "differentiate", kernel, **OPTIONS)
    assert child.returncode == 0, child.stdout[-5000:]
    assert child.stdout.splitlines() == list(BACKWARD[kernel])


@pytest.mark.timeout(2000)
def test_the_smoke_cases_are_clean() -> None:
    child = sanitized("libasan.so", "addresses.py", "attend", **OPTIONS)
    assert child.returncode == 0, child.stdout[-5000:]
    for case in SMOKE:
        assert case.id in child.stdout
    assert child.stdout.count("on sm_90") == 2
