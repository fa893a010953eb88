"""What compute-sanitizer watches, in a process of its own: ``python sanitized.py WHAT``.

``smoke KERNEL`` runs the kernel's smoke cases on the GPU and holds them against the oracle;
``fault`` writes past an array, to see whether the tool works on this machine. Every array is an
allocation of its own and ends where the allocation ends, so that the tool sees the first byte too
many.
"""

import contextlib
import sys

import cupy
import gpu
import numpy as np
from cases import SMOKE
from harness import GPU_KERNEL, HOPPER, judge
from strided import GUARD, Strided

import cupyflash

CASES = {GPU_KERNEL: SMOKE, HOPPER: SMOKE[:2]}
FAULT = 'extern "C" __global__ void fault(char *array, int size) { array[size] = 1; }'


def exact(array: Strided) -> Strided:
    """Copy an array into a storage without guard bands."""
    offset = array.layout.offset - GUARD
    return Strided.of(array.host, array.layout._replace(offset=offset, guard=0))


def smoke(kernel: str) -> None:
    for case in CASES[kernel]:
        arrays = [exact(x) for x in case.arrays()]
        if kernel == HOPPER:
            arrays[1].host[:, :8] *= 64  # met last: warps have to look at their tiles again
        operands = [x.device for x in arrays]
        out, lse = cupyflash.attention(*operands, kernel=kernel, return_lse=True, **case.options)
        judge((gpu.fetch(out), gpu.fetch(lse)), *arrays, **case.options)
        print(case.id)


def fault() -> None:
    array = cupy.empty(512, np.int8)
    with contextlib.suppress(Exception):  # the tool makes the launch fail, in words of its own
        cupy.RawKernel(FAULT, "fault")((1,), (1,), (array, np.int32(array.size)))
        cupy.cuda.Device().synchronize()


if __name__ == "__main__":
    cupy.cuda.set_allocator(None)
    {"smoke": smoke, "fault": fault}[sys.argv[1]](*sys.argv[2:])
