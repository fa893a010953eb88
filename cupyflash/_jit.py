"""From CUDA text to a loaded kernel: NVRTC, a cubin cache keyed by content, and CuPy's loader.

Nothing here knows of attention. A *unit* is a translation unit whose includes are our own files of
``cuda/``, which NVRTC gets as virtual headers: no path enters a compile, so the same text gives the
same key on every machine. Compiling needs CuPy and NVRTC, but neither a GPU nor a driver.

The entry of a kernel is the folder ``<symbol>-<16 digits of its key>`` of the cache, with
``unit.cu``, ``kernel.cubin``, ``log.txt`` (all that NVRTC said) and ``meta.json``.
"""

import functools
import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from . import _cache, _nvrtc
from ._cache import clear as clear_cache
from ._cache import directory as cache_dir
from ._nvrtc import import_cupy, nvrtc_version, supported_archs
from .errors import (
    CompileFailed,
    CupyflashError,
    DeviceUnavailable,
    InvalidArgument,
    UnsupportedProblem,
)

__all__ = [
    "Cubin",
    "Resources",
    "cache_dir",
    "cache_entries",
    "clear_cache",
    "compile",
    "compute_capability",
    "digest",
    "import_cupy",
    "load",
    "multiprocessors",
    "nvrtc_version",
    "sources",
    "supported_archs",
]

SCHEMA = 1  # of keys and entries: raise it when either changes its meaning
# Without -no-source-include NVRTC searches the working directory, which no key can see.
OPTIONS = ("-std=c++20", "-ftz=true", "--ptxas-options=-v", "-no-source-include")

_ROUTINE = re.compile(  # the lines that `ptxas -v` writes about every kernel, good or bad
    r"ptxas info\s*: (\d+ bytes gmem|Compiling entry|Function properties|Used \d+ reg|Compile time)"
    r"|(ptxas\s*\.)?\s*\d+ bytes stack frame"
)
_loaded: dict[tuple[Path, int, int], Any] = {}


class Resources(NamedTuple):
    """What a kernel takes, as ptxas reports it: bytes of a thread, but ``shared`` of a block."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int  # static
    seconds: float  # that the compile took
    nvrtc_version: str


class Cubin(NamedTuple):
    """A compiled kernel on disk; ``log`` has NVRTC's remarks, of which a good kernel has none."""

    path: Path
    symbol: str
    arch: str
    log: str
    resources: Resources


# The sources


def sources() -> dict[str, str]:
    """Return the text of every CUDA file by its name from the root, as an ``#include`` has it."""
    root = _cuda_dir().as_posix()
    paths = sorted(p.as_posix() for p in Path(root).rglob("*.cu*") if p.suffix in (".cu", ".cuh"))
    return {path[len(root) + 1 :]: Path(path).read_text("utf-8") for path in paths}


def digest() -> str:
    """Return the SHA-256 of all CUDA files: any edit of any of them changes it."""
    return _sha256(sources())


def _cuda_dir() -> Path:
    chosen = os.environ.get("CUPYFLASH_CUDA_DIR")
    package = Path(__file__).resolve().parent
    places = [package / "cuda", package.parent / "cuda"]
    for path in [_cache.expanded(chosen)] if chosen else places:
        if (path / "device.cuh").is_file():
            return path
    if chosen:
        raise InvalidArgument(
            f"`CUPYFLASH_CUDA_DIR` must be a copy of cupyflash's cuda folder, got {chosen!r}, "
            "which has no device.cuh: correct or unset it"
        )
    raise CupyflashError(f"the CUDA sources are not beside {package}: reinstall cupyflash")


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# Compiling


def compile(unit: str, symbol: str, arch: str) -> Cubin:
    """Compile a unit to a cubin, or find it in the cache.

    Parameters
    ----------
    unit : str
        The translation unit; its ``#include`` lines name files of ``cuda/`` from its root.
    symbol : str
        The kernel's name, declared ``extern "C"``.
    arch : str
        NVRTC's name of an architecture: ``"sm_80"``, ``"sm_90a"``.

    Returns
    -------
    Cubin
        The compiled kernel.
    """
    _nvrtc.check_arch(arch)
    files = sources()
    options = (f"-arch={arch}", *OPTIONS, *(["-lineinfo"] if _debug() else []))
    version = nvrtc_version()
    key = _sha256([SCHEMA, unit, _sha256(files), symbol, options, version])
    name = f"{symbol}-{key[:16]}"

    def make() -> tuple[dict[str, Any], dict[str, bytes]]:
        start = time.perf_counter()
        image, log = _nvrtc.run(unit, files, options)
        text = {"unit.cu": unit.encode(), "log.txt": log.encode()}
        if image is None or not _usage(symbol, log):
            kept = _cache.keep(name, text) / "unit.cu"
            problem = f"`{symbol}` is not among its kernels" if image else "it does not compile"
            raise CompileFailed(
                f"NVRTC {version} made no `{symbol}` for {arch} of {kept}: {problem}\n{log}"
            )
        seconds = round(time.perf_counter() - start, 3)
        facts = {"schema": SCHEMA, "symbol": symbol, "arch": arch, "options": options}
        facts |= {"nvrtc": version, "seconds": seconds}
        return facts, {**text, "kernel.cubin": image}

    return _cubin(_cache.get(name, key, make))


def _debug() -> bool:
    return os.environ.get("CUPYFLASH_DEBUG", "0") not in ("", "0")


def _usage(symbol: str, log: str) -> str:
    """Return ptxas's line on the registers of a kernel, or nothing."""
    match = re.search(rf"Compiling entry function '{symbol}' .*?(Used \d+ reg[^\n]*)", log, re.S)
    return match[1] if match else ""


def _cubin(entry: _cache.Entry) -> Cubin:
    meta, log = entry.meta, entry.files["log.txt"].decode()
    usage = _usage(meta["symbol"], log)
    stack, stores, loads = (
        [int(n) for n in re.findall(rf"(\d+) bytes {what}", log)]  # also of functions it calls
        for what in ("(?:stack frame|cumulative stack)", "spill stores", "spill loads")
    )
    registers, shared = (
        next((int(n) for n in re.findall(pattern, usage)), 0)
        for pattern in (r"Used (\d+)", r"(\d+) bytes smem")
    )
    resources = Resources(
        registers, max(stack), sum(stores), sum(loads), shared, meta["seconds"], meta["nvrtc"]
    )
    remarks = "\n".join(line for line in log.splitlines() if not _ROUTINE.match(line)).strip()
    return Cubin(entry.path / "kernel.cubin", meta["symbol"], meta["arch"], remarks, resources)


def cache_entries() -> list[Cubin]:
    """Return every intact kernel of the cache."""
    return [_cubin(entry) for entry in _cache.entries() if entry.meta.get("schema") == SCHEMA]


# The device


@functools.cache
def compute_capability(device: int) -> int:
    """Return the compute capability of a CUDA device as one number: 90 is 9.0."""
    cupy = import_cupy()
    try:
        return int(cupy.cuda.Device(device).compute_capability)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceUnavailable(
            f"CUDA device {device} cannot be used ({error}): see what `nvidia-smi` lists"
        ) from error


@functools.cache
def multiprocessors(device: int) -> int:
    """Return how many multiprocessors a CUDA device has."""
    return int(import_cupy().cuda.Device(device).attributes["MultiProcessorCount"])


def load(cubin: Cubin, device: int, shared_bytes: int) -> Any:
    """Return the kernel as a `cupy.cuda.function.Function` of that device, loading it once.

    Parameters
    ----------
    cubin : Cubin
        The compiled kernel.
    device : int
        CUDA ordinal; the current device is left as it is.
    shared_bytes : int
        Dynamic shared memory of a launch, above 48 KiB too.
    """
    key = (cubin.path, device, shared_bytes)
    if key not in _loaded:
        with _cache.thread_lock(key):
            if key not in _loaded:
                _loaded[key] = _load(cubin, device, shared_bytes)
    return _loaded[key]


def _load(cubin: Cubin, device: int, shared_bytes: int) -> Any:
    cupy = import_cupy()
    driver = cupy.cuda.driver
    try:
        with cupy.cuda.Device(device) as current:
            limit = current.attributes["MaxSharedMemoryPerBlockOptin"]
            if shared_bytes + cubin.resources.shared > limit:
                raise UnsupportedProblem(
                    f"`{cubin.symbol}` needs {shared_bytes + cubin.resources.shared} bytes of "
                    f"shared memory in a block and CUDA device {device} has {limit}"
                )
            module = cupy.cuda.function.Module()
            module.load(cubin.path.read_bytes())
            function = module.get_function(cubin.symbol)
            attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.funcSetAttribute(function.ptr, attribute, shared_bytes)
    except (cupy.cuda.runtime.CUDARuntimeError, driver.CUDADriverError) as error:
        raise DeviceUnavailable(
            f"CUDA device {device} cannot load the {cubin.arch} kernel {cubin.path} of NVRTC "
            f"{cubin.resources.nvrtc_version} ({error}): see that the installed extra "
            "(cuda12 or cuda13) is not newer than the driver"
        ) from error
    return function
