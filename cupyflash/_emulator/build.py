"""From a unit to code that the host executes: g++, the kernel cache, ctypes.

The runtime is one shared library; each unit is another one that names it as needed. Both are
entries of the kernel cache, keyed by everything that g++ reads and by its version. What g++ reads
lies in a temporary folder under the names that reports use (``cuda/kernels/...``), so that no path
of this machine enters a library.
"""

import ctypes
import functools
import hashlib
import json
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from .. import _cache, _driver, _jit
from .._launch import Launch
from ..errors import CompileFailed, DeviceUnavailable
from .stats import Counters

__all__ = ["Unit", "compiler", "runtime", "unit"]

SCHEMA = 5  # of keys and entries: raise it when either changes its meaning
# -Og, and no search for the places of variables, which no report names: a unit runs nearly as fast
# as with -O2 and is compiled in a third of the time.
FLAGS = (
    "-std=c++20", "-Og", "-g1", "-fno-var-tracking", "-gdwarf-4", "-fPIC", "-shared",
    "-fno-strict-aliasing", "-ffp-contract=off", "-fno-gnu-unique", "-w",
)  # fmt: skip
RUNTIME_FLAGS = ("-O2", "-fno-semantic-interposition", "-Wl,-Bsymbolic")
# What a unit is compiled to call at its loads and stores and at undefined operations. The runtime
# has these functions: the sanitizers' own libraries stay away. g++ knows that undefined operations
# end a launch, and has less to do.
WATCHED = (
    "-fsanitize=thread,alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero",
    "-fno-sanitize-recover=all",
    "-nodefaultlibs",
)
TWINS = Path(__file__).parent / "cpp"
RUNTIME = "runtime.so"
OWN = "_emulator"  # where they lie while g++ runs: reports leave out what is there
LIBRARY = "library.so"
INCLUDE = re.compile(r'#include "([^"]+)"')
DIGEST = re.compile(r"(?<=cuda/ digest )[0-9a-f]{16}")  # in the first line of a rendered unit

Files = dict[str, bytes]
Sources = tuple[tuple[str, str], ...]  # names and texts

_units: dict[str, "Unit"] = {}  # the loaded ones, by key; a library stays loaded


class Compiler(NamedTuple):
    """The g++ of this machine."""

    path: str
    version: str


class Unit(NamedTuple):
    """A unit as host code."""

    kernel: ctypes.c_void_p  # what `emu_launch` calls
    params_bytes: int  # of the struct that it takes


@functools.cache
def compiler() -> Compiler:
    """Return the g++ of this machine, which must be there."""
    path = shutil.which("g++")
    if path is None:
        raise DeviceUnavailable(
            "the emulator compiles the kernels with g++, which is not on the PATH: install it "
            "(Debian and Ubuntu: apt install g++)"
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    return Compiler(path, version.stdout.partition("\n")[0])


@functools.cache
def twins() -> dict[str, str]:
    """Return the text of the emulator's own sources by name: its headers and its runtime."""
    paths = sorted(path for path in TWINS.rglob("*") if path.is_file())
    return {path.relative_to(TWINS).as_posix(): path.read_text("utf-8") for path in paths}


@functools.cache
def runtime() -> ctypes.CDLL:
    """Return the runtime, compiled once for this compiler and loaded once in this process."""
    library = ctypes.CDLL(str(_runtime().path / LIBRARY))
    library.emu_alloc.restype = ctypes.c_void_p
    library.emu_alloc.argtypes = [ctypes.c_size_t, ctypes.c_char_p, ctypes.c_int]
    library.emu_free.restype = None
    library.emu_free.argtypes = [ctypes.c_void_p]
    library.emu_tensor_map.restype = ctypes.c_char_p
    library.emu_tensor_map.argtypes = _driver.SIGNATURES["cuTensorMapEncodeTiled"]
    library.emu_launch.restype = ctypes.c_int
    library.emu_launch.argtypes = [
        ctypes.c_void_p, *[ctypes.c_uint] * 5, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ulonglong,
        ctypes.POINTER(Counters), ctypes.c_char_p, ctypes.c_size_t,
    ]  # fmt: skip
    return library


def unit(launch: Launch) -> Unit:
    """Return a launch's unit, compiled and loaded once for each content of what it includes."""
    own = twins()
    text, cuda = _read_by(launch.unit, _kept(tuple(_jit.sources().items())))
    key = _key(text, launch.symbol, *(_digest(tuple(x.items())) for x in (cuda, own)))
    if key not in _units:
        with _cache.thread_lock(("emulator", key)):
            if key not in _units:
                _units[key] = _load(launch.symbol, text, key, cuda, own)
    return _units[key]


@functools.lru_cache(maxsize=64)
def _read_by(text: str, sources: Sources) -> tuple[str, dict[str, str]]:
    """Return a unit, with the digest of what it includes, and that by name: `ptx/` has its twins.

    An edit of another kernel leaves both as they are.
    """
    there = dict(sources) | twins()
    found: set[str] = set()
    new = {text, twins()["emu.h"]}
    while new:
        names = set(INCLUDE.findall("".join(new))) & there.keys() - found
        found |= names
        new = {there[name] for name in names}
    cuda = {name: there[name] for name in sorted(found - twins().keys())}
    return DIGEST.sub(_digest(tuple(cuda.items()))[:16], text, count=1), cuda


@functools.lru_cache(maxsize=4)  # most launches are of the sources of the one before
def _kept(sources: Sources) -> Sources:
    """Return the sources, always the same object where they are equal: other caches hold it."""
    return sources


def _load(symbol: str, text: str, key: str, cuda: dict[str, str], own: dict[str, str]) -> Unit:
    runtime()  # first: the unit needs the library by its name alone
    files: Files = {"unit.cpp": f"{text}\nEMU_ENTRY({symbol})\n".encode()}
    files |= {f"cuda/{name}": text.encode() for name, text in cuda.items()}
    files |= {f"{OWN}/{name}": text.encode() for name, text in own.items()}
    files[RUNTIME] = _runtime().files[LIBRARY]
    options = (*WATCHED, "-I", f"./{OWN}", "-I", "./cuda", "-include", "emu.h")
    name = f"emulated_{symbol}-{key[:16]}"
    made = _compiled(name, key, files, (*options, "unit.cpp", RUNTIME, "-lm", "-lc"))
    library = ctypes.CDLL(str(made.path / LIBRARY))
    library.emu_params_bytes.restype = ctypes.c_size_t
    kernel = ctypes.cast(library.emu_entry, ctypes.c_void_p)
    return Unit(kernel, library.emu_params_bytes())


@functools.cache
def _runtime() -> _cache.Entry:
    own = twins()
    key = _key(own)
    files = {f"{OWN}/{name}": text.encode() for name, text in own.items()}
    # One text, for which g++ reads the headers once: a third of the time.
    parts = (f'#include "{name}"\n' for name in own if name.endswith(".cpp"))
    files["runtime.cpp"] = "".join(parts).encode()
    # The name by which units find it, whatever folder it was loaded from.
    soname = f"-Wl,-soname,cupyflash-emulator-{key[:16]}.so"
    options = (*RUNTIME_FLAGS, soname, "-I", f"./{OWN}", "runtime.cpp")
    return _compiled(f"emulator-{key[:16]}", key, files, options)


@functools.lru_cache(maxsize=64)
def _digest(sources: Sources) -> str:
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def _key(*parts: Any) -> str:
    content = json.dumps(
        [SCHEMA, FLAGS, RUNTIME_FLAGS, WATCHED, compiler().version, *parts], sort_keys=True
    )
    return hashlib.sha256(content.encode()).hexdigest()


def _compiled(name: str, key: str, files: Files, arguments: tuple[str, ...]) -> _cache.Entry:
    """Return the cache's entry of a library, compiled from these files if need be."""

    def make() -> tuple[dict[str, Any], dict[str, bytes]]:
        start = time.perf_counter()
        library, log = _run(files, arguments)
        text = {path: files[path] for path in files.keys() & {"unit.cpp"}}
        if library is None:
            kept = _cache.keep(name, text | {"log.txt": log.encode()})
            raise CompileFailed(f"{compiler().version} made no library of {kept}:\n{log}")
        seconds = round(time.perf_counter() - start, 3)
        return {"compiler": compiler().version, "seconds": seconds}, text | {LIBRARY: library}

    return _cache.get(name, key, make)


def _run(files: Files, arguments: tuple[str, ...]) -> tuple[bytes | None, str]:
    """Compile in a temporary folder that holds the files; return the library and the log."""
    with tempfile.TemporaryDirectory(prefix="cupyflash-") as folder:
        root = Path(folder)
        for name, content in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        done = subprocess.run(
            [compiler().path, *FLAGS, f"-ffile-prefix-map={folder}=.", *arguments, "-o", LIBRARY],
            cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        library = root / LIBRARY
        return (library.read_bytes() if done.returncode == 0 else None), done.stdout
