"""Many threads that call at once, on streams of their own and at the very first use."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import SMOKE, Case
from harness import GPU_KERNELS, HOPPER, KERNELS, attend, judge, run, run_child, same_bits

# Sixteen threads meet, then each makes the first call of the process; prints the compiled kernels.
FIRST_USE = """
import sys
import threading
import cupy
import numpy as np
import cupyflash
from cupyflash import _jit

threads, results = [], []
barrier = threading.Barrier(16)

def work():
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.ones((1, 40, 2, 64), np.float16)
        barrier.wait()
        results.append(cupyflash.attention(x, x, x, kernel=sys.argv[1]).get())

for _ in range(16):
    threads.append(threading.Thread(target=work))
    threads[-1].start()
for thread in threads:
    thread.join()
assert len(results) == 16
assert all((result == 1).all() for result in results)
print("compiled", len(_jit.cache_entries()))
"""


def own_stream(kernel: str) -> AbstractContextManager[object]:
    if kernel == "cpu":
        return nullcontext()
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_pool_of_threads_gives_what_one_thread_gives(kernel: str) -> None:
    each = (SMOKE[0], SMOKE[1], SMOKE[5]) if kernel == HOPPER else SMOKE
    cases = each * 6
    serial = {case: run(kernel, *case.arrays(), **case.options) for case in each}

    def work(case: Case) -> tuple[np.ndarray, np.ndarray]:
        with own_stream(kernel):
            return run(kernel, *case.arrays(), **case.options)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, cases))
    for case, result in zip(cases, results, strict=True):
        assert same_bits(result[0], serial[case][0]), case.id
        assert same_bits(result[1], serial[case][1]), case.id


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", GPU_KERNELS)
def test_threads_that_launch_thousands_of_times(kernel: str) -> None:
    import cupy

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        arrays = [rng.standard_normal((1, 60, 2, 64)).astype(np.float16) for _ in "qkv"]
        with cupy.cuda.Stream(non_blocking=True):
            q, k, v = (cupy.asarray(x) for x in arrays)
            options = {"causal": True, "return_lse": True}
            out, lse = attend(kernel, q, k, v, **options)
            expected = out.get()
            judge((expected, lse.get()), *arrays, causal=True)
            for _ in range(10_000):
                attend(kernel, q, k, v, out=out, **options)
            assert same_bits(out.get(), expected)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", GPU_KERNELS)
@pytest.mark.parametrize("repeat", range(2))
def test_threads_that_meet_at_the_first_use(
    tmp_path: Path, cp: Any, kernel: str, repeat: int
) -> None:
    x = cp.ones((1, 40, 2, 64), np.float16)
    attend(kernel, x, x, x)  # skips where this GPU is not the kernel's
    child = run_child(
        sys.executable, "-c", FIRST_USE, kernel, timeout=200, CUPYFLASH_CACHE_DIR=str(tmp_path)
    )
    assert child.returncode == 0, child.stdout
    assert child.stdout.split()[-2:] == ["compiled", "1"]
