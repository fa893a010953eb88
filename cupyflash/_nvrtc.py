"""NVRTC through CuPy, imported late: neither a GPU nor a driver is needed."""

import functools
import os
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _cache
from .errors import DeviceUnavailable, InvalidArgument, UnsupportedProblem, shown

OLDEST_ARCH = 80  # Ampere: the first with cp.async and bfloat16 tensor cores

_INSTALL = (
    'install CuPy and NVRTC with `pip install "cupyflash[cuda13]"` '
    '(`"cupyflash[cuda12]"` where the driver is of CUDA 12)'
)


def import_cupy() -> Any:
    """Import CuPy, also where its cache folder cannot be made, or say how to install it."""
    if "cupy" not in sys.modules and "CUPY_CACHE_DIR" not in os.environ:
        # CuPy makes its folder when it is imported, or cannot be imported.
        try:
            _cache.make_writable(Path("~/.cupy/kernel_cache").expanduser())
        except (OSError, RuntimeError):
            os.environ["CUPY_CACHE_DIR"] = str(_cache.directory() / "cupy")
    try:
        import cupy
    except (ImportError, OSError) as error:
        raise DeviceUnavailable(f"CuPy cannot be imported ({error}): {_INSTALL}") from error
    return cupy


def _library() -> Any:
    # The first call loads NVRTC, then its builtins: a thread that came between would lack those.
    with _cache.thread_lock("nvrtc"):
        import_cupy()
        try:
            from cupy.cuda import nvrtc

            nvrtc.getVersion()
        except (ImportError, OSError, RuntimeError) as error:
            raise DeviceUnavailable(f"NVRTC cannot be loaded ({error}): {_INSTALL}") from error
    return nvrtc


def nvrtc_version() -> str:
    """Return the version of NVRTC, like ``"13.0"``."""
    return "{}.{}".format(*_library().getVersion())


def supported_archs() -> tuple[int, ...]:
    """Return the compute capabilities (90 is 9.0) that this NVRTC and cupyflash both support."""
    return tuple(sorted(arch for arch in _library().getSupportedArchs() if arch >= OLDEST_ARCH))


def check_arch(arch: str) -> None:
    """Raise unless `arch` is the name of an architecture that NVRTC and cupyflash both support."""
    match = re.fullmatch(r"sm_(\d{2,})[af]?", arch)
    if not match:
        raise InvalidArgument(f'`arch` must be like "sm_80" or "sm_90a", got {shown(arch)}')
    capability, known = int(match[1]), supported_archs()
    if capability in known:
        return
    version = nvrtc_version()
    names = ", ".join(f"{a // 10}.{a % 10}" for a in known)
    problem = f"compute capability {capability // 10}.{capability % 10}"
    if capability < OLDEST_ARCH:
        raise UnsupportedProblem(
            f"{problem} is too old: cupyflash with NVRTC {version} compiles for {names}"
        )
    raise UnsupportedProblem(
        f"{problem} is unknown to NVRTC {version}, which compiles for {names}: "
        f'try `pip install --upgrade "cuda-toolkit[nvrtc]=={version.split(".")[0]}.*"`'
    )


def run(unit: str, headers: Mapping[str, str], options: Sequence[str]) -> tuple[bytes | None, str]:
    """Compile a unit against virtual headers; return the cubin (None if refused) and the log."""
    nvrtc = _library()
    options = (*options, *_cacheless(nvrtc))
    names = tuple(name.encode() for name in headers)
    texts = tuple(text.encode() for text in headers.values())
    program = nvrtc.createProgram(unit, "unit.cu", texts, names)
    image, verdict = None, ""
    try:
        nvrtc.compileProgram(program, options)
        image = _whole(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        verdict = str(error)
    log = nvrtc.getProgramLog(program).replace("\0", "")
    nvrtc.destroyProgram(program)
    return image, f"{log.strip()}\n{verdict}".strip() + "\n"


@functools.cache
def _cacheless(nvrtc: Any) -> tuple[str, ...]:
    """Return the option that keeps NVRTC from its own cache, whose hits have an empty log."""
    option = "--no-cache"
    program = nvrtc.createProgram("", "empty.cu", (), ())
    try:
        nvrtc.compileProgram(program, (option,))
    except nvrtc.NVRTCError:  # an NVRTC that knows no such option has no such cache
        return ()
    finally:
        nvrtc.destroyProgram(program)
    return (option,)


def _whole(image: bytes) -> bytes:
    """Give back the last byte, which CuPy's getCUBIN takes for the end of a string.

    The program headers are the last thing in a cubin, and their last byte is a zero.
    """
    (start,) = struct.unpack_from("<Q", image, 0x20)  # e_phoff, e_phentsize, e_phnum of ELF
    size, count = struct.unpack_from("<HH", image, 0x36)
    return image.ljust(start + size * count, b"\0")
