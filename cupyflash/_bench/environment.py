"""What a result depends on besides the code: card, driver, versions, clocks, commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from .. import _jit
from .._versions import DISTRIBUTIONS, smi
from ..errors import DeviceUnavailable

# Name in the results -> the distributions that may carry it.
PEER_DISTRIBUTIONS = {
    "fa2": ("flash-attn",),
    "fa3": ("fa3-fwd", "flash-attn-3"),
    "fa4": ("flash-attn-4",),
    "flashinfer": ("flashinfer-python",),
}
_SMI_FIELDS = (
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)


def version_of(distributions: tuple[str, ...]) -> str | None:
    """Return the version of the first distribution that is installed; nothing is imported."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def versions(table: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the versions of what is installed of a table of distributions."""
    found = {name: version_of(distributions) for name, distributions in table.items()}
    return {name: version for name, version in found.items() if version is not None}


def gpu_present() -> bool:
    """Whether CuPy is installed and sees a GPU."""
    try:
        return bool(_jit.import_cupy().cuda.is_available())
    except DeviceUnavailable:
        return False


def gpu() -> dict[str, Any]:
    """Return name, architecture, memory and driver of the current GPU; empty without one.

    Where CuPy is not there, the driver's own tool tells less.
    """
    if not gpu_present():
        return driver_says()
    cupy = _jit.import_cupy()
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {
        "gpu": properties["name"].decode(),
        "arch": f"sm_{properties['major']}{properties['minor']}",
        "gpu_memory": int(properties["totalGlobalMem"]),
        "gpus": cupy.cuda.runtime.getDeviceCount(),
        "driver": smi(("driver_version",)).get("driver_version"),
        "cuda": cuda_version(cupy.cuda.runtime.runtimeGetVersion()),
        "driver_cuda": cuda_version(cupy.cuda.runtime.driverGetVersion()),
    }


def driver_says() -> dict[str, Any]:
    """Return what nvidia-smi tells of the first GPU; empty where there is none."""
    told = smi(("name", "compute_cap", "driver_version"))
    if len(told) < 3:
        return {}
    arch = f"sm_{told['compute_cap'].replace('.', '')}"
    return {"gpu": told["name"], "arch": arch, "driver": told["driver_version"]}


def cuda_version(number: int) -> str:
    """Return CUDA's version number (13000) as text (13.0)."""
    return f"{number // 1000}.{number % 1000 // 10}"


def nvrtc() -> str | None:
    """Return the version of NVRTC, or None where it cannot be loaded."""
    try:
        return _jit.nvrtc_version()
    except DeviceUnavailable:
        return None


def clocks() -> dict[str, str]:
    """Return clocks, power and temperature of the GPU at this moment."""
    return smi(_SMI_FIELDS)


def cpu() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the commit of the working tree that the package lies in, "-dirty" where it differs."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty"]
        return subprocess.run(
            git, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def environment() -> dict[str, Any]:
    """Return the `env` of a results file."""
    from .. import __version__

    return {
        "cupyflash": __version__,
        "gpu": None,
        "driver": None,
        "cuda": None,
        **gpu(),
        "nvrtc": nvrtc(),
        **{name: version_of(names) for name, names in DISTRIBUTIONS.items()},
        "peers": versions(PEER_DISTRIBUTIONS),
        "cpu": cpu(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "clocks": clocks(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
    }
