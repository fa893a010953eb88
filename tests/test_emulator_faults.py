"""What the emulator says of kernels of a few lines that do what they must not."""

import re

import numpy as np
import pytest
from emulated import SEEDS, TINY_LINE, needs_compiler, numbers

import cupyflash

pytestmark = needs_compiler

OURS = np.zeros(1, np.int8)  # memory of the host, which is no kernel's
FAULTS = {
    "if (i < p.n + 1) p.x[i] = 1;": r"thread \d+: a store of 4 bytes at x \+16 of 16 bytes",
    "if (i == 40) shared[i] = p.x[-2000];": r"thread 40: a load of 4 bytes at x -8000 of 16 bytes",
    "shared[256 + i] = 1;": r"a store of 4 bytes at shared memory \+1\d\d\d of 1024 bytes",
    "if (i == 5) p.x[0] = *static_cast<float *>(nullptr);": "thread 5: a load .* in no allocation",
    "if (i == 6) *reinterpret_cast<char *>(%d) = 1;": "thread 6: a store of 1 bytes at .* in no al",
    "if (i == 7) p.x[0] = *reinterpret_cast<char *>(%d);": "thread 7: a load of 1 .* in no al",
    # Barriers
    "if (i < 16) ptx::warp_barrier(); ptx::barrier();": r"DEADLOCK\n(.*\n)*.*warp barrier",
    "\n  if (i < 32) ptx::barrier();\n  ptx::barrier();": "at the barrier of unit.cpp:",
    "if (i < 8) ptx::shfl_xor(1.0f, 1);": "thread .*(exited|DEADLOCK)",
    # Plain accesses
    "shared[i] = 1; if (i == 0) p.x[0] = shared[40];": "memory \\+160, .*no barrier stands between",
    "shared[i / 2] = 1;": r"a store overwrites .*, which thread \d+ has written, and no barrier",
    # Undefined operations
    "if (i == 3) shared[0] = i / static_cast<int>(blockDim.y - 1);": "thread 3: a division by zero",
    "if (i == 1) *(float *)((char *)p.x + 2) = 1;": r"thread 1: an access at x \+2 .* not 4-byte",
    "float a[4] = {1, 2, 3, 4}; p.x[0] = a[i / 8];": r"thread \d+: index [4-7] is not in the array",
    "if (i == 2) p.x[0] = 1 << (i + 31);": "thread 2: a shift by 33",
    "if (i == 9) p.x[0] = i + 0x7ffffff8;": r"thread 9: an overflow in \+",
}


@pytest.mark.parametrize("body", FAULTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_fault_names_the_line_and_the_thread(body: str, seed: int) -> None:
    words, body = FAULTS[body], body.replace("%d", str(OURS.ctypes.data))
    lines = "|".join(str(TINY_LINE + i) for i in range(3))
    with numbers() as given:
        with pytest.raises(cupyflash.KernelFault, match=words) as caught:
            given.run(body, seed)
        text = str(caught.value)
        assert text.startswith(f"tiny (seed {seed}): ")
        assert re.search(rf"unit\.cpp:({lines}) block \(0,0,0\) threads? \d", text)
        right = "if (i < p.n) p.x[i] = shared[i];"
        assert given.run(right, seed).blocks == 1, "the next launch is as good as any"
        assert np.isnan(given.x).all(), "shared memory is NaN"
    assert not OURS.any()
