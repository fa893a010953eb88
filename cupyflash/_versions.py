"""The versions of all that a result may depend on; nothing is imported to find them."""

import importlib.metadata
import platform
import subprocess

from . import __version__, _jit
from .errors import CupyflashError

__all__ = ["report"]

# Name -> the distributions that may carry it.
DISTRIBUTIONS = {
    "numpy": ("numpy",),
    "ml_dtypes": ("ml_dtypes",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "torch": ("torch",),
    "jax": ("jax",),
}


def report() -> str:
    """Return a table of names and versions."""
    rows = {"cupyflash": __version__, "python": platform.python_version()}
    rows |= {"platform": platform.platform()}
    for name, distributions in DISTRIBUTIONS.items():
        rows[name] = next(filter(None, map(_version, distributions)), "not installed")
    try:
        rows["nvrtc"] = _jit.nvrtc_version()
    except CupyflashError:
        rows["nvrtc"] = "not installed"
    rows["gpu"] = _gpu()
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu() -> str:
    try:
        capability = _jit.compute_capability(0)
    except CupyflashError:
        name = smi(("name",)).get("name")
        return f"{name}, which needs CuPy to be used" if name else "none"
    return f"compute capability {capability // 10}.{capability % 10}"


def smi(fields: tuple[str, ...]) -> dict[str, str]:
    """Ask nvidia-smi about the first GPU; empty where there is no nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, map(str.strip, answer.stdout.strip().split(",")), strict=False))
