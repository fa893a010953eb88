"""The kernel cache: compiled once, whatever processes, threads, folders and disks do."""

import contextlib
import errno
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from tiny import UNIT, Tiny, in_threads

from cupyflash import _cache, _jit
from cupyflash.errors import CompileFailed

pytest.importorskip("cupy", reason="needs CuPy and NVRTC")


@contextlib.contextmanager
def recorded_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Record all warnings instead of raising them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


# Other processes and threads

CHILD = """
import sys
from cupyflash import _jit, _nvrtc
runs, run = [], _nvrtc.run
def counted(*args):
    runs.append(1)
    return run(*args)
_nvrtc.run = counted
_jit.nvrtc_version()
print("ready", flush=True)
sys.stdin.readline()
cubin = _jit.compile(sys.argv[1], "add", "sm_80")
print(len(runs), cubin.path, flush=True)
"""


def start_children(count: int) -> list[subprocess.Popen[str]]:
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", CHILD, UNIT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n", child.communicate()[1]
    return children


def finish_children(children: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Let all children compile at once; return each one's count of compiles and its cubin."""
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    answers = []
    for child in children:
        out, err = child.communicate(timeout=120)
        assert (child.returncode, err) == (0, "")
        runs, path = out.split(maxsplit=1)
        answers.append((int(runs), path.strip()))
    return answers


def test_a_second_process_compiles_nothing(tiny: Tiny) -> None:
    cubin = tiny.compile()
    assert finish_children(start_children(1)) == [(0, str(cubin.path))]


def test_eight_cold_processes_compile_once(tiny: Tiny) -> None:
    answers = finish_children(start_children(8))
    assert sum(runs for runs, _ in answers) == 1
    assert len({path for _, path in answers}) == 1
    assert str(tiny.compile().path) == answers[0][1]
    assert tiny.runs == []
    assert len([path for path in tiny.cache.iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize("locks", [True, False], ids=["lock files", "no lock files"])
def test_sixteen_cold_threads_compile_once(
    tiny: Tiny, locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not locks:  # a file system without them
        monkeypatch.setattr(_cache, "_process_lock", lambda path: contextlib.nullcontext())
    cubins: list[_jit.Cubin] = []
    in_threads(16, lambda: cubins.append(tiny.compile()))
    assert len(cubins) == 16
    assert len(set(cubins)) == len(tiny.runs) == 1


THREADS = """
import sys, threading
from cupyflash import _jit
barrier, paths = threading.Barrier(16), []
def work():
    barrier.wait()
    paths.append(_jit.compile(sys.argv[1], "add", "sm_80").path)
threads = [threading.Thread(target=work) for _ in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(paths) == 16 and len(set(paths)) == 1
"""


@pytest.mark.usefixtures("tiny")
def test_threads_of_a_fresh_process_import_and_compile_at_once() -> None:
    for _ in range(3):
        _jit.clear_cache()
        subprocess.run([sys.executable, "-W", "error", "-c", THREADS, UNIT], check=True, timeout=60)


def test_a_stuck_holder_of_the_lock_costs_one_compile(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = tiny.compile().path.parent.name
    _jit.clear_cache()
    monkeypatch.setattr(_cache, "LOCK_SECONDS", 0.1)
    with _cache._process_lock(tiny.cache / f"{name}.lock"):
        tiny.compile()
    assert len(tiny.runs) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_is_not_held_by_its_parents_locks() -> None:
    code = """
import os
from cupyflash import _cache
_cache.thread_lock("add").acquire()
child = os.fork()
if child == 0:
    os._exit(0 if _cache.thread_lock("add").acquire(timeout=5) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.usefixtures("tiny")
def test_importing_the_floor_imports_no_cupy() -> None:
    code = (
        "import sys; from cupyflash import _jit;"
        "assert not {'cupy', 'cupy_backends', 'torch', 'jax'} & set(sys.modules), 'heavy';"
        "_jit.digest(); _jit.cache_dir(); _jit.cache_entries();"
        "assert 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Damaged entries


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def scramble(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))


@pytest.mark.parametrize("name", ["unit.cu", "kernel.cubin", "log.txt", "meta.json"])
@pytest.mark.parametrize("damage", [truncate, empty, scramble, Path.unlink])
def test_a_damaged_entry_is_compiled_again(
    tiny: Tiny, damage: Callable[[Path], None], name: str
) -> None:
    good = tiny.compile()
    image = good.path.read_bytes()
    damage(good.path.with_name(name))
    again = tiny.compile()
    assert again.path == good.path
    assert again.path.read_bytes() == image
    assert tiny.compile() == again
    assert len(tiny.runs) == 2


def test_any_changed_byte_is_seen(tiny: Tiny) -> None:
    folder = tiny.compile().path.parent
    intact = _cache._read(folder)
    assert intact is not None
    chance = random.Random(1)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for _ in range(40):
            changed = bytearray(content)
            changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(changed)
            assert _cache._read(folder) in (None, intact)  # blanks of meta.json mean nothing
        path.write_bytes(content)
    assert _cache._read(folder) == intact


@pytest.mark.parametrize("kind", ["file", "empty folder", "another entry"])
def test_what_lies_in_the_place_of_an_entry_is_replaced(tiny: Tiny, kind: str) -> None:
    good = tiny.compile()
    folder = good.path.parent
    other = _jit.compile(UNIT + "//\n", "add", "sm_80").path.parent
    shutil.rmtree(folder)
    if kind == "file":
        folder.write_bytes(b"")
    elif kind == "empty folder":
        folder.mkdir()
    else:
        shutil.copytree(other, folder)
    again = tiny.compile()
    assert again[:4] == good[:4]
    assert len(tiny.runs) == 3
    assert not [path for path in tiny.cache.iterdir() if ".tmp-" in path.name]


def test_a_reader_never_sees_half_an_entry(tmp_path: Path) -> None:
    path, stop, seen = tmp_path / "add-0123456789abcdef", threading.Event(), set()

    def read() -> None:
        while not stop.is_set():
            entry = _cache._read(path)
            seen.add(entry and entry.files["kernel.cubin"])

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(50):
            _cache._write(path, {}, {"kernel.cubin": b"x" * 100_000})
            _cache._delete(path)
    finally:
        stop.set()
        reader.join()
    assert seen <= {None, b"x" * 100_000}


def write_or_lose(path: Path) -> None:
    with contextlib.suppress(OSError):  # an entry that another writer moves away at that moment
        _cache._write(path, {}, {"kernel.cubin": b"good"})


def test_writers_without_a_lock_leave_one_intact_entry(tmp_path: Path) -> None:
    path = tmp_path / "add-0123456789abcdef"
    for _ in range(20):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        (path / "kernel.cubin").write_bytes(b"damaged")
        in_threads(8, lambda: write_or_lose(path))
        assert _cache._read(path) is not None
        assert list(tmp_path.iterdir()) == [path]


# Folders of every kind


@pytest.mark.parametrize(
    "name", ["a b", "ü-日本", "c'd", 'quo"te', "$HOME", "-x", "l" * 200], ids=lambda name: name[:8]
)
def test_odd_paths_work(
    tiny: Tiny, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = shutil.copytree(tmp_path / "cuda", tmp_path / name / "cuda")
    monkeypatch.setenv("CUPYFLASH_CUDA_DIR", str(cuda))
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / name / "cache"))
    monkeypatch.chdir(tmp_path / name)
    cubin = tiny.compile()
    assert cubin.path.is_relative_to(tmp_path / name)
    assert _jit.cache_entries() == [cubin]


def test_a_relative_and_a_linked_folder_work(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", "link/cache")
    cubin = tiny.compile()
    assert cubin.path.is_absolute()
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "real/cache"))
    tiny.compile()
    assert len(tiny.runs) == 1


def use_default_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPYFLASH_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(home))


def test_the_default_folder_is_the_users_cache(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_default_cache(tmp_path / "home", monkeypatch)
    assert tiny.compile().path.is_relative_to(tmp_path / "home")


def test_an_unusable_folder_warns_once_and_works(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "file"))
    with recorded_warnings() as caught:
        first = tiny.compile()
        assert tiny.compile() == first
        assert tiny.compile("sm_90") != first
        assert _jit.cache_dir() == first.path.parents[1]
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert "set CUPYFLASH_CACHE_DIR" in str(warning.message)
    assert len(tiny.runs) == 2
    assert {cubin.path for cubin in _jit.cache_entries()} > {first.path}
    if hasattr(os, "getuid"):
        assert _jit.cache_dir().stat().st_mode & 0o777 == 0o700
    assert _jit.clear_cache() == 2


@pytest.mark.usefixtures("tiny")
def test_sixteen_threads_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", __file__)
    found: list[Path] = []

    def work() -> None:
        found.append(_jit.cache_dir())

    with recorded_warnings() as caught:
        in_threads(16, work)
    assert len(found) == 16
    assert len(set(found)) == 1
    assert len(caught) == 1


HOMELESS = """
import os, sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from cupyflash import _jit
    paths = {_jit.compile(sys.argv[1], "add", arch).path for arch in ("sm_80", "sm_90", "sm_80")}
print(len(caught), len(paths), os.environ["CUPY_CACHE_DIR"], _jit.cache_dir(), sep="\\n")
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write")
def test_a_home_that_cannot_be_written_serves_cupy_too(tiny: Tiny) -> None:
    env = {key: value for key, value in os.environ.items() if "CACHE" not in key}
    env |= {"HOME": "/proc/nobody", "TMPDIR": str(tiny.cuda.parent)}
    result = subprocess.run(
        [sys.executable, "-c", HOMELESS, UNIT],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    warned, paths, cupy_cache, cache = result.stdout.split("\n")[:4]
    assert (warned, paths) == ("1", "2")
    assert Path(cupy_cache).parent == Path(cache)
    assert Path(cache).parent == tiny.cuda.parent
    assert not Path(cache).exists()  # it left with the process


def test_a_cache_that_only_reads_is_used(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = tiny.compile()

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(_cache, "make_writable", refuse)
    assert tiny.compile() == cubin
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        other = tiny.compile("sm_90")
    assert other.path.parents[1] != cubin.path.parents[1]
    assert tiny.compile() == cubin
    assert len(tiny.runs) == 2


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs owners of files")
def test_another_users_default_folder_is_neither_read_nor_written(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_default_cache(tmp_path, monkeypatch)
    theirs = tiny.compile()
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.warns(RuntimeWarning, match="another user"):
        ours = tiny.compile()
    assert ours.path != theirs.path
    assert [cubin.path for cubin in _jit.cache_entries()] == [ours.path]
    assert len(tiny.runs) == 2


def full_disks(monkeypatch: pytest.MonkeyPatch, *roots: Path) -> None:
    write = _cache._write

    def limited(path: Path, meta: Any, files: Any) -> Any:
        if not roots or path.parent in roots:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, meta, files)

    monkeypatch.setattr(_cache, "_write", limited)


def test_a_full_disk_falls_back(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disks(monkeypatch, tiny.cache)
    with recorded_warnings() as caught:
        cubin = tiny.compile()
        assert tiny.compile() == cubin
    (warning,) = caught
    assert "No space left" in str(warning.message)
    assert len(tiny.runs) == 1


def test_no_space_anywhere_is_an_error_with_advice(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disks(monkeypatch)
    with (
        pytest.warns(RuntimeWarning, match="No space left"),
        pytest.raises(CompileFailed, match=r"No space left.*set CUPYFLASH_CACHE_DIR"),
    ):
        tiny.compile()


# Listing and clearing


def test_clearing_removes_what_was_stored_and_nothing_else(tiny: Tiny) -> None:
    tiny.compile()
    tiny.compile("sm_90")
    with pytest.raises(CompileFailed):
        _jit.compile("oops", "add", "sm_80")
    hexes = "0123456789abcdef"
    fresh, stale = (tiny.cache / f"add-{hexes}.tmp-{fill * 32}" for fill in "01")
    fresh.mkdir()
    stale.mkdir()
    long_ago = time.time() - 2 * _cache.STALE_SECONDS
    os.utime(stale, (long_ago, long_ago))
    foreign = [tiny.cache / name for name in ("notes.txt", f"x-{hexes}.bak", "thesis-2026")]
    for path in foreign:
        path.write_text("keep me")
    assert [cubin.arch for cubin in sorted(_jit.cache_entries(), key=lambda c: c.arch)] == [
        "sm_80",
        "sm_90",
    ]
    assert _jit.clear_cache() == 2
    assert sorted(tiny.cache.iterdir()) == sorted([*foreign, fresh])
    assert _jit.cache_entries() == []
    assert _jit.clear_cache() == 0


def test_listing_and_clearing_need_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", "/proc/cupyflash")
    assert _jit.cache_entries() == []
    assert _jit.clear_cache() == 0


def test_entries_of_another_schema_are_not_listed(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.compile()
    monkeypatch.setattr(_jit, "SCHEMA", _jit.SCHEMA + 1)
    assert _jit.cache_entries() == []


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("~/kernels", "/home/somebody/kernels"), ("~", "/home/somebody"), ("~nobody-here/x", None)],
)
def test_a_tilde_is_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, chosen: str, expected: str | None
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert _cache.expanded(chosen) == Path(expected or chosen)


def test_both_folders_of_the_environment_may_have_a_tilde(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "device.cuh").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", "~/kernels")
    monkeypatch.setenv("CUPYFLASH_CUDA_DIR", "~/sources")
    assert _cache.directory() == tmp_path / "kernels"
    assert list(_jit.sources()) == ["device.cuh"]


def test_tests_leave_the_users_cache_alone() -> None:
    users = platformdirs.user_cache_path("cupyflash", appauthor=False)
    assert users != _cache.directory()
