"""Words of two integers: neither half reaches into the other."""

import numpy as np
from machine import Kernel, Machine, Out

HALVES = Kernel(
    "halves",
    "const u32 *x, *y; u32 *sums, *least; u32 count;",
    """
  for (u32 i = threadIdx.x; i < p.count; i += blockDim.x) {
    p.sums[i] = ptx::add_u16x2(p.x[i], p.y[i]);
    p.least[i] = ptx::min_u16x2(p.x[i], p.y[i]);
  }
""",
    threads=256,
)


def test_halves_are_added_and_compared_apart(machine: Machine, rng: np.random.Generator) -> None:
    edges = np.array([0, 1, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF], np.uint16)
    pairs = np.stack(np.meshgrid(edges, edges, edges, edges), axis=-1).reshape(-1, 2, 2)
    drawn = rng.integers(0, 2**16, (500, 2, 2), np.uint16)
    x, y = np.concatenate((pairs, drawn)).transpose(1, 0, 2)
    words = [np.ascontiguousarray(half).view("<u4").ravel() for half in (x, y)]
    count = len(x)
    outs = [Out.empty(count, np.uint32) for _ in range(2)]
    sums, least = machine.run(HALVES, *words, *outs, np.uint32(count))
    np.testing.assert_array_equal(sums.view(np.uint16).reshape(-1, 2), x + y)
    np.testing.assert_array_equal(least.view(np.uint16).reshape(-1, 2), np.minimum(x, y))
