"""A folder of sealed entries on disk, shared by any number of processes and threads.

An entry is a folder of files whose ``meta.json`` holds a seal over all of them. It is written
beside its final place and renamed, so that a reader sees a whole entry or none, and one that was
truncated or changed is no entry. Entries are made once: by one thread under a lock of this process,
by one process under a lock file. Where the folder cannot be used, a private temporary one serves.
"""

import atexit
import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import platformdirs

from .errors import CompileFailed

LOCK_SECONDS = 600  # a holder that takes longer is stuck: go on without it
MOVES = 10  # attempts to replace a damaged entry while others do the same without a lock
STALE_SECONDS = 3600  # a half-written entry this old belongs to a process that was killed

# The names that are written here, and nothing else is ever removed: entries, and with a suffix
# their lock files, what could not be compiled, and entries that are being written.
_NAME = re.compile(r"\w+-[0-9a-f]{16}(\.lock|\.failed|\.tmp-[0-9a-f]{32})?")

_locks: dict[Hashable, threading.Lock] = {}
_private: dict[Path, Path] = {}  # a folder that cannot be used -> the temporary one in its place


class Entry(NamedTuple):
    """One intact entry: its folder, its facts and the bytes of its files by name."""

    path: Path
    meta: dict[str, Any]
    files: dict[str, bytes]


def get(name: str, key: str, make: Callable[[], tuple[dict[str, Any], dict[str, bytes]]]) -> Entry:
    """Return the entry `name` of this `key`; `make` gives its facts and files where there is none.

    Whatever `make` raises passes through, and nothing is stored.
    """
    with thread_lock(name):
        for root in _readable():
            if entry := _read(root / name, key):
                return entry
        root = directory()
        with _process_lock(root / f"{name}.lock"):
            if entry := _read(root / name, key):  # another process was quicker
                return entry
            meta, files = make()
            return _store(name, {"key": key, **meta}, files)


def keep(name: str, files: dict[str, bytes]) -> Path:
    """Keep files that are no entry in ``<name>.failed``, to be looked at; return that folder."""
    return _store(f"{name}.failed", {}, files).path


def entries() -> list[Entry]:
    """Return every intact entry."""
    return [entry for path in _stored() if _is_entry(path) and (entry := _read(path))]


def clear() -> int:
    """Remove what was stored, nothing else that may lie in the folder; return how many entries."""
    removed = 0
    for path in _stored():
        if ".tmp-" in path.name and _age(path) < STALE_SECONDS:
            continue  # somebody is writing it
        _delete(path)
        removed += _is_entry(path) and not path.exists()
    return removed


def _stored() -> list[Path]:
    """Return all that was stored in the folders, whole or not."""
    paths: list[Path] = []
    for root in _readable():
        with contextlib.suppress(OSError):
            paths += sorted(path for path in root.iterdir() if _NAME.fullmatch(path.name))
    return paths


def _is_entry(path: Path) -> bool:
    return not path.suffix


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:  # gone
        return 0.0


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


# Which folder


def directory() -> Path:
    """Return the folder that is written to, made if need be: a temporary one if it cannot be."""
    root = _configured()
    if root not in _private:
        try:
            _refuse_foreign(root)
            make_writable(root)
        except OSError as error:
            return _fall_back(error)
    return _private.get(root, root)


def is_temporary() -> bool:
    """Whether what is stored is lost when this process ends, since no other folder can be used."""
    return _configured() in _private


def make_writable(path: Path) -> None:
    """Make a folder, and raise OSError unless files can be made in it."""
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
        pass


def _configured() -> Path:
    chosen = os.environ.get("CUPYFLASH_CACHE_DIR")
    if chosen:
        return expanded(chosen).absolute()
    return platformdirs.user_cache_path("cupyflash", appauthor=False).absolute()


def expanded(path: str) -> Path:
    """Return a path that a user wrote, where no shell may have replaced a leading ``~``."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # nobody of that name
        return Path(path)


def _refuse_foreign(root: Path) -> None:
    """Raise if the default folder is another user's: its code is not ours to run or to add to."""
    if os.environ.get("CUPYFLASH_CACHE_DIR") or not hasattr(os, "getuid"):
        return
    if root.exists() and root.stat().st_uid != os.getuid():
        raise PermissionError("it belongs to another user")


def _readable() -> list[Path]:
    """Return the folders to read from: one that came with an image may be read-only and full."""
    root = _configured()
    roots = [_private[root]] if root in _private else []
    with contextlib.suppress(OSError):
        _refuse_foreign(root)
        roots.insert(0, root)
    return roots


def _fall_back(error: OSError) -> Path:
    """Return the private temporary folder in place of the configured one, warning once."""
    root = _configured()
    with thread_lock("private"):
        if root in _private:
            return _private[root]
        try:
            path = _private[root] = Path(tempfile.mkdtemp(prefix="cupyflash-"))
        except OSError as second:
            raise _nowhere(root, second) from error
    atexit.register(_remove, path, os.getpid())
    warnings.warn(
        f"the kernel cache {root} cannot be used ({error}), so this process compiles its kernels "
        "for itself: set CUPYFLASH_CACHE_DIR to a writable folder",
        RuntimeWarning,
        stacklevel=2,
    )
    return path


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child may leave first
        shutil.rmtree(path, ignore_errors=True)


def _nowhere(root: Path, error: OSError) -> CompileFailed:
    return CompileFailed(
        f"neither {root} nor a temporary folder can hold a compiled kernel ({error}): "
        "set CUPYFLASH_CACHE_DIR to a writable folder with free space"
    )


# Locks


def thread_lock(key: Hashable) -> threading.Lock:
    """Return this process's lock of that key."""
    return _locks.setdefault(key, threading.Lock())


@contextlib.contextmanager
def _process_lock(path: Path) -> Iterator[None]:
    lock = filelock.FileLock(path, timeout=LOCK_SECONDS)
    # A file system without locks or a stuck holder costs a second compile, nothing worse.
    with contextlib.suppress(OSError, NotImplementedError):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _after_fork() -> None:
    """Drop, in a forked child, the locks that nobody will release and the parent's folder."""
    _locks.clear()
    _private.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# One entry


def _seal(meta: dict[str, Any], files: dict[str, bytes]) -> str:
    parts = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return hashlib.sha256(json.dumps([meta, parts], sort_keys=True).encode()).hexdigest()


def _read(path: Path, key: str | None = None) -> Entry | None:
    """Return the entry in that folder if it is intact and, where a key is given, of that key."""
    try:
        meta = json.loads((path / "meta.json").read_bytes())
        files = {name: (path / name).read_bytes() for name in meta.pop("files")}
        intact = meta.pop("seal") == _seal(meta, files)
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None
    return Entry(path, meta, files) if intact and key in (None, meta.get("key")) else None


def _store(name: str, meta: dict[str, Any], files: dict[str, bytes]) -> Entry:
    try:
        return _write(directory() / name, meta, files)
    except OSError as error:  # the disk is full, or the folder has gone
        folder = _fall_back(error)
    try:
        return _write(folder / name, meta, files)
    except OSError as error:
        raise _nowhere(_configured(), error) from error


def _write(path: Path, meta: dict[str, Any], files: dict[str, bytes]) -> Entry:
    facts = {**meta, "files": sorted(files), "seal": _seal(meta, files)}
    draft = path.with_name(f"{path.stem}.tmp-{uuid.uuid4().hex}")
    draft.mkdir()
    try:
        for name, content in files.items():
            (draft / name).write_bytes(content)
        (draft / "meta.json").write_text(json.dumps(facts, indent=1), "utf-8")
        _move(draft, path)
    finally:
        _delete(draft)
    entry = _read(path)
    if entry is None:
        raise OSError(f"{path} does not hold what was written to it")
    return entry


def _move(draft: Path, path: Path) -> None:
    """Rename a folder into place; an intact entry that is there stays, a damaged one goes."""
    for attempt in range(MOVES):
        try:
            draft.rename(path)
            return
        except OSError:
            if _read(path):
                return
            if attempt == MOVES - 1:
                raise
        aside = path.with_name(f"{path.stem}.tmp-{uuid.uuid4().hex}")
        with contextlib.suppress(OSError):  # somebody else has moved it
            path.rename(aside)
            _delete(aside)
