"""A kernel of one line with its own sources and cache: what the tests of floor 1 compile."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cupyflash import _cache, _jit, _nvrtc

HEADER = "constexpr int STEP = 1;\n"
KERNEL = """#include "tile/step.cuh"
extern "C" __global__ void add(float *x) { x[threadIdx.x] += STEP * Config::SCALE; }
"""
UNIT = """struct Config { static constexpr int SCALE = 3; };
#include "kernels/add.cu"
"""


class Tiny:
    """The folders of one test, the compiles that it made, and what it compiles."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cuda, self.cache = root / "cuda", root / "cache"
        self.runs: list[str] = []  # the units that NVRTC was given
        for name, text in {
            "device.cuh": "#define DEVICE __device__\n",
            "tile/step.cuh": HEADER,
            "kernels/add.cu": KERNEL,
            "README.md": "no source",
        }.items():
            path = self.cuda / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setenv("CUPYFLASH_CUDA_DIR", str(self.cuda))
        monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(self.cache))
        monkeypatch.delenv("CUPYFLASH_DEBUG", raising=False)
        monkeypatch.setattr(_cache, "_private", {})  # no fallback of an earlier test
        run = _nvrtc.run

        def counted(unit: str, headers: Any, options: Any) -> Any:
            self.runs.append(unit)
            return run(unit, headers, options)

        monkeypatch.setattr(_nvrtc, "run", counted)

    def compile(self, arch: str = "sm_80") -> _jit.Cubin:
        """Compile the unit, or find it."""
        return _jit.compile(UNIT, "add", arch)


def in_threads(count: int, work: Callable[[], None]) -> None:
    """Run `work` in threads that start it at once."""
    barrier = threading.Barrier(count)

    def run() -> None:
        barrier.wait()
        work()

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
