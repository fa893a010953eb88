"""What every test file may use: the skipping of GPU tests, a kernel cache, random inputs."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits
from tiny import Tiny

# Workers share the processors: of threads of BLAS in each of them, all wait for one another.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for child processes and torch
    threadpool_limits(1)  # NumPy is loaded

# Set before the first import of the frameworks: JAX would otherwise take most of a GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# The checkout's own, which stays from run to run: a kernel's key holds all that it depends on.
CACHE = Path(__file__).resolve().parents[1] / "build" / "kernels"
os.environ.setdefault("CUPYFLASH_CACHE_DIR", str(CACHE))


def gpu_present() -> bool:
    """Whether CuPy is installed and sees a GPU."""
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    return bool(cupy.cuda.is_available())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu`` where there is none."""
    if gpu_present():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU and CuPy")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def rng() -> np.random.Generator:
    """Return a random generator of a fixed seed."""
    return np.random.default_rng(2026)


@pytest.fixture
def cp() -> Any:
    """Return CuPy, for the tests that a GPU is there for."""
    return pytest.importorskip("cupy")


@pytest.fixture
def torch_cuda() -> Any:
    """Return torch where it is built for CUDA."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this build of torch has no CUDA")
    return torch


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """Return a kernel of one line whose sources and cache are this test's own."""
    return Tiny(tmp_path, monkeypatch)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every problem be big enough for four threads, on a machine of any size."""
    from drawn import FourThreads

    from cupyflash import _threads

    monkeypatch.setattr(_threads, "PRODUCTS_PER_THREAD", 1)
    monkeypatch.setattr(_threads, "one_blas_thread", FourThreads())
    with threadpool_limits(2):  # BLAS has a limit that can be seen to be restored
        yield
