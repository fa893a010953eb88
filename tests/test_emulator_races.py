"""Emulated kernels under ThreadSanitizer: a second opinion on where a barrier lacks."""

import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from emulated import needs_compiler, sanitized
from mutations import AT_ANOTHER, SYNCHRONISATION, Mutation
from races import ORDERS, PROBLEMS

pytestmark = [pytest.mark.nightly, needs_compiler]
FOUND = 66  # the exit status
# Its library knows the lines of what was loaded before its first report, which therefore ends the
# process. What the runtime and Python do by functions of the C library is not looked at.
OPTIONS = {
    "TSAN_OPTIONS": f"halt_on_error=1:exitcode={FOUND}:ignore_interceptors_accesses=1:"
    "report_thread_leaks=0:report_mutex_bugs=0:report_signal_unsafe=0:"
    "handle_segv=0:handle_sigbus=0:handle_sigill=0:handle_sigfpe=0"
}
# Threads that part, which are no race.
PARTED = (AT_ANOTHER, "DEADLOCK", "exited, while other lanes", "while other lanes of warp")
RACES = [mutation for mutation in SYNCHRONISATION if mutation.report not in PARTED]
REPORT = "WARNING: ThreadSanitizer: data race"
ACCESS = r"(?:[Rr]ead|[Ww]rite) of size \d+ at \w+ by [^\n]*\n"
PLACE = r"(?:    #[^\n]*\n)*?    #[^\n]* cuda/(\S+:\d+)"  # the first in the sources


def checked(*what: str) -> CompletedProcess[str]:
    return sanitized("libtsan.so", "races.py", *what, **OPTIONS)


@pytest.mark.timeout(1000)
def test_the_problems_are_clean() -> None:
    child = checked("clean")
    assert child.returncode == 0, child.stdout[-5000:]
    assert REPORT not in child.stdout
    assert child.stdout.splitlines() == [*ORDERS, *PROBLEMS]


@pytest.mark.parametrize("name", ORDERS)
def test_what_lacks_an_order_is_a_race(name: str) -> None:
    child = checked("unordered", name)
    assert child.returncode == FOUND, child.stdout[-5000:]
    assert re.search(rf"{REPORT}.*\n.*\n    #0 .*\bunit\.cpp:\d+ ", child.stdout), child.stdout


@pytest.mark.parametrize("mutation", RACES, ids=lambda mutation: mutation.name)
def test_a_missing_barrier_is_a_race(mutation: Mutation, tmp_path: Path) -> None:
    child = checked("fault", mutation.name, str(tmp_path))
    assert child.returncode == FOUND, child.stdout[-5000:]
    report = child.stdout.partition(REPORT)[2]
    places = re.findall(ACCESS + PLACE, report)
    assert len(places) == 2, report
