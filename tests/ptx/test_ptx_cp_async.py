"""Asynchronous copies of threads: widths, zero fill, groups."""

import numpy as np
import pytest
from machine import Kernel, Machine, Out

THREADS = 64
COPY = Kernel(
    "cp_async memory warp",
    "const unsigned char *from; const u32 *present; unsigned char *to; u32 bytes, ways;",
    """
  unsigned char *shared = ptx::shared<unsigned char[1024]>();
  const u32 t = threadIdx.x, place = t * 16;
  for (u32 i = 0; i < 16; ++i) shared[place + i] = 0xee;
  ptx::barrier();
  const u32 to = ptx::smem_address(shared + place);
  // The copies of 16 bytes go to another thread's place, so that a barrier has to follow the wait.
  const u32 other = ptx::smem_address(shared + (blockDim.x - 1 - t) * 16);
  // What is not present may lie anywhere.
  const unsigned char *from = p.from + (p.present[t] ? place : 0x100000);
  if (p.bytes == 4) ptx::cp_async<4>(to, from, p.present[t]);
  if (p.bytes == 8) ptx::cp_async<8>(to + 8, from, p.present[t]);
  if (p.bytes == 16) ptx::cp_async<16>(other, from, p.present[t]);
  if (p.ways == 0) {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  } else {
    ptx::cp_async_wait_all();
  }
  ptx::barrier();
  for (u32 i = 0; i < 16; ++i) p.to[place + i] = shared[place + i];
""",
    threads=THREADS,
    shared=THREADS * 16,
)
GROUPS = Kernel(
    "cp_async memory warp",
    "const u32 *from; u32 *to; u32 groups;",
    """
  u32 *slots = ptx::shared<u32[3 * 64]>();
  const u32 t = threadIdx.x, n = blockDim.x;
  for (u32 group = 0; group < 2; ++group) {
    ptx::cp_async<4>(ptx::smem_address(slots + group * n + t), p.from + group * n + t, true);
    ptx::cp_async_commit();
  }
  for (u32 group = 0; group < p.groups; ++group) {
    ptx::cp_async_wait<1>();  // this group's; the next one's may be in flight
    ptx::barrier();
    p.to[group * n + t] = slots[group % 3 * n + (t + 1) % n];
    if (group + 2 < p.groups) {
      const u32 next = group + 2;
      ptx::cp_async<4>(ptx::smem_address(slots + next % 3 * n + t), p.from + next * n + t, true);
    }
    ptx::cp_async_commit();
  }
  ptx::cp_async_wait<0>();
""",
    threads=THREADS,
    shared=3 * THREADS * 4,
)


@pytest.mark.parametrize("ways", [0, 1], ids=["group", "all"])
@pytest.mark.parametrize("width", [4, 8, 16])
def test_a_copy_moves_its_bytes_or_zeros(
    machine: Machine, rng: np.random.Generator, width: int, ways: int
) -> None:
    from_ = rng.integers(0, 256, (THREADS, 16), np.uint8)
    present = rng.integers(0, 2, THREADS, np.uint32)
    out = Out.empty((THREADS, 16), np.uint8)
    (to,) = machine.run(COPY, from_, present, out, np.uint32(width), np.uint32(ways))
    copied = np.where(present[:, None] != 0, from_, 0)[:, :width]
    expected = np.full((THREADS, 16), 0xEE, np.uint8)
    first = 8 if width == 8 else 0
    expected[:, first : first + width] = copied[::-1] if width == 16 else copied
    np.testing.assert_array_equal(to, expected)


def test_a_wait_leaves_the_newest_groups_in_flight(machine: Machine) -> None:
    groups = 9
    from_ = np.arange(groups * THREADS, dtype=np.uint32).reshape(groups, THREADS)
    out = Out.empty((groups, THREADS), np.uint32)
    (to,) = machine.run(GROUPS, from_, out, np.uint32(groups))
    np.testing.assert_array_equal(to, np.roll(from_, -1, axis=1))
