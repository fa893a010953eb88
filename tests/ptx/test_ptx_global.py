"""Conditional loads: nothing is read where the condition does not hold."""

import numpy as np
import pytest
from machine import Kernel, Machine, Out

LOADS = {
    f"u{bits}": Kernel(
        "global",
        f"const u{bits} *from; const u32 *where; u{bits} *to; u32 count;",
        """
  for (u32 i = threadIdx.x; i < p.count; i += blockDim.x)
    p.to[i] = ptx::load_if(p.where[i] < p.count, p.from + p.where[i]);
""",
    )
    for bits in (16, 32, 64)
}
KERNELS = tuple(LOADS.values())
BYTES = Kernel(
    "global",
    "const u16 *from; u32 *to; u32 count;",
    """
  for (u32 i = threadIdx.x; i < p.count; i += blockDim.x) p.to[i] = ptx::load_u16(p.from + i);
""",
)


@pytest.mark.parametrize("word", LOADS)
def test_loads_where_a_condition_holds(
    machine: Machine, rng: np.random.Generator, word: str
) -> None:
    dtype = np.dtype(f"{word[0]}{int(word[1:]) // 8}")
    count = 100
    x = rng.integers(1, 2 ** (8 * dtype.itemsize) - 1, count, dtype)
    where = rng.integers(0, count, count, np.uint32)
    where[::3] = 2**31
    (got,) = machine.run(LOADS[word], x, where, Out.empty(count, dtype), np.uint32(count))
    expected = np.where(where < count, x[where % count], 0)
    np.testing.assert_array_equal(got, expected)


def test_two_bytes_fill_the_low_half(machine: Machine, rng: np.random.Generator) -> None:
    x = rng.integers(1, 2**16, 100, np.uint16)
    (got,) = machine.run(BYTES, x, Out.empty(100, np.uint32), np.uint32(100))
    np.testing.assert_array_equal(got, x)
