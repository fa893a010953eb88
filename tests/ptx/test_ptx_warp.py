"""Shuffles, votes and lanes of a warp, and the order that barriers make."""

import numpy as np
import pytest
from machine import Kernel, Machine, Out
from model import LANES

WARPS = 3
THREADS = 32 * WARPS
WARP = Kernel(
    "warp",
    "const float *x; float *xor_; u32 *xor_word, *any, *lane, *uniform, *opaque; i64 *wide;",
    """
  const u32 t = threadIdx.x;
  const float x = p.x[t];
  const u32 n = blockDim.x;
  for (int mask = 1; mask < 32; ++mask) p.xor_[(mask - 1) * n + t] = ptx::shfl_xor(x, mask);
  for (int mask = 1; mask < 32; ++mask) p.xor_word[(mask - 1) * n + t] = ptx::shfl_xor(t, mask);
  for (u32 i = 0; i < 32; ++i) p.any[i * n + t] = ptx::any(t % 32 == i && t / 32 != 1);
  p.lane[t] = ptx::lane();
  p.uniform[t] = ptx::uniform(1000 + t);
  p.opaque[t] = ptx::opaque(t);
  p.wide[t] = ptx::opaque(static_cast<i64>(t) << 40);
""",
    threads=THREADS,
)
ROTATE = Kernel(
    "warp memory",
    "u32 *to; u32 rounds, warp;",
    """
  u32 *shared = ptx::shared<u32[96]>();
  const u32 t = threadIdx.x, first = p.warp ? t / 32 * 32 : 0, size = p.warp ? 32 : blockDim.x;
  shared[t] = t;
  for (u32 i = 0; i < p.rounds; ++i) {
    if (p.warp) ptx::warp_barrier(); else ptx::barrier();
    const u32 next = shared[first + (t - first + 1) % size];
    if (p.warp) ptx::warp_barrier(); else ptx::barrier();
    shared[t] = next;
  }
  p.to[t] = shared[t];
""",
    threads=THREADS,
    shared=THREADS * 4,
)


def test_lanes_exchange_and_vote(machine: Machine) -> None:
    x = np.arange(THREADS, dtype=np.float32) + 0.5
    xors = [Out.empty((31, THREADS), dtype) for dtype in (np.float32, np.uint32)]
    outs = [Out.empty(shape, np.uint32) for shape in ((32, THREADS), THREADS, THREADS, THREADS)]
    wide = Out.empty(THREADS, np.int64)
    got, got_words, votes, lane, uniform, opaque, got_wide = machine.run(
        WARP, x, *xors, *outs, wide
    )
    threads = np.arange(THREADS)
    others = threads ^ np.arange(1, 32)[:, None]
    np.testing.assert_array_equal(got, x[others])
    np.testing.assert_array_equal(got_words, others)
    np.testing.assert_array_equal(votes, np.broadcast_to(threads // 32 != 1, (32, THREADS)))
    np.testing.assert_array_equal(lane, np.tile(LANES, WARPS))
    np.testing.assert_array_equal(uniform, 1000 + threads // 32 * 32)
    np.testing.assert_array_equal(opaque, threads)
    np.testing.assert_array_equal(got_wide, threads << 40)


@pytest.mark.parametrize("warp", [0, 1])
def test_a_barrier_orders_shared_memory(machine: Machine, warp: int) -> None:
    (to,) = machine.run(ROTATE, Out.empty(THREADS, np.uint32), np.uint32(40), np.uint32(warp))
    size = 32 if warp else THREADS
    threads = np.arange(THREADS)
    np.testing.assert_array_equal(to, threads // size * size + (threads + 40) % size)
