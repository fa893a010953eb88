"""Emulated kernels under ThreadSanitizer: a second opinion on where a barrier lacks."""

import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from emulated import needs_compiler, sanitized
from mutations import AT_ANOTHER, Mutation
from mutations_bwd_sm80 import OTHER_BITS
from races import FAULTS, ORDERS, PROBLEMS

pytestmark = [pytest.mark.nightly, needs_compiler]
FOUND = 66  # the exit status
# Its library knows the lines of what was loaded before its first report, which therefore ends the
# process. What the runtime and Python do by functions of the C library is not looked at.
OPTIONS = {
    "TSAN_OPTIONS": f"halt_on_error=1:exitcode={FOUND}:ignore_interceptors_accesses=1:"
    "report_thread_leaks=0:report_mutex_bugs=0:report_signal_unsafe=0:"
    "handle_segv=0:handle_sigbus=0:handle_sigill=0:handle_sigfpe=0"
}
# Threads that part, which are no race, and atomic sums in another order.
PARTED = (AT_ANOTHER, "DEADLOCK", "exited, while other lanes", "while other lanes of warp")
RACES = [
    (kernel, mutation)
    for kernel, faults in FAULTS.items()
    for mutation in faults.SYNCHRONISATION
    if mutation.report not in (*PARTED, OTHER_BITS)
]
REPORT = "WARNING: ThreadSanitizer: data race"
ACCESS = r"(?:[Rr]ead|[Ww]rite) of size \d+ at \w+ by [^\n]*\n"
PLACE = r"(?:    #[^\n]*\n)*?    #[^\n]* cuda/(\S+:\d+)"  # the first in the sources


def checked(*what: str) -> CompletedProcess[str]:
    return sanitized("libtsan.so", "races.py", *what, **OPTIONS)


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("what", ["tiny", *PROBLEMS])
def test_what_is_right_is_clean(what: str) -> None:
    child = checked("clean", what)
    assert child.returncode == 0, child.stdout[-5000:]
    assert REPORT not in child.stdout
    assert child.stdout.splitlines() == list(ORDERS if what == "tiny" else PROBLEMS[what])


@pytest.mark.parametrize("name", ORDERS)
def test_what_lacks_an_order_is_a_race(name: str) -> None:
    child = checked("unordered", name)
    assert child.returncode == FOUND, child.stdout[-5000:]
    assert re.search(rf"{REPORT}.*\n.*\n    #0 .*\bunit\.cpp:\d+ ", child.stdout), child.stdout


@pytest.mark.parametrize(
    ("kernel", "mutation"), RACES, ids=lambda x: x.name if isinstance(x, Mutation) else x
)
def test_a_missing_barrier_is_a_race(kernel: str, mutation: Mutation, tmp_path: Path) -> None:
    child = checked("fault", kernel, mutation.name, str(tmp_path))
    assert child.returncode == FOUND, child.stdout[-5000:]
    report = child.stdout.partition(REPORT)[2]
    places = re.findall(ACCESS + PLACE, report)
    assert len(places) == 2, report
