"""Barriers in shared memory: phases and their parities, arrivals, announced bytes."""

import numpy as np
import pytest
from machine import Kernel, Machine, Out

THREADS = 64
ROUNDS = 7
SHARED = """
struct Shared {
  u32 x[1024];
  u64 full, empty;
};
"""
PHASES = Kernel(
    "mbarrier memory warp",
    "u32 *to; u32 rounds;",
    """
  Shared &s = ptx::shared<Shared>();
  const u32 t = threadIdx.x, n = blockDim.x;
  const u32 full = ptx::smem_address(&s.full), empty = ptx::smem_address(&s.empty);
  if (t == 0) {
    ptx::mbarrier_init(full, n / 2);
    ptx::mbarrier_init(empty, n / 2);
  }
  ptx::barrier();
  for (u32 i = 0; i < p.rounds; ++i) {
    if (t < n / 2) {
      ptx::mbarrier_wait(empty, (i & 1) ^ 1);  // nothing to wait for at first
      s.x[t] = i * 1000 + t;
      ptx::mbarrier_arrive(full);
    } else {
      ptx::mbarrier_wait(full, i & 1);
      p.to[i * (n / 2) + t - n / 2] = s.x[n - 1 - t];
      ptx::mbarrier_arrive(empty);
    }
  }
""",
    SHARED,
    threads=THREADS,
    shared=8192,
    capability=90,
)
BYTES = Kernel(
    "mbarrier bulk memory warp",
    "const u32 *from; u32 *to; u32 first, second, rounds, whole;",
    """
  Shared &s = ptx::shared<Shared>();
  const u32 t = threadIdx.x, words = p.first + p.second;
  const u32 full = ptx::smem_address(&s.full);
  if (t == 0) {
    ptx::mbarrier_init(full, p.whole ? 1 : 2);
    ptx::fence_mbarrier_init();
  }
  ptx::barrier();
  for (u32 i = 0; i < p.rounds; ++i) {
    const u32 *from = p.from + i * words;
    const u32 x = ptx::smem_address(s.x), after = x + p.first * 4;
    if (t == 0) {
      ptx::mbarrier_arrive_expect_tx(full, (p.whole ? words : p.first) * 4);
      ptx::bulk_load(x, from, p.first * 4, full);
      if (p.whole) ptx::bulk_load(after, from + p.first, p.second * 4, full);
    }
    if (t == 32 && !p.whole) {
      ptx::mbarrier_arrive_expect_tx(full, p.second * 4);
      ptx::bulk_load(after, from + p.first, p.second * 4, full);
    }
    ptx::mbarrier_wait(full, i & 1);
    for (u32 j = t; j < words; j += blockDim.x) p.to[i * words + j] = s.x[j];
    ptx::barrier();  // all have read what the next copies overwrite
  }
""",
    SHARED,
    threads=THREADS,
    shared=8192,
    capability=90,
)


def test_phases_alternate_and_a_new_barrier_is_past_parity_1(machine: Machine) -> None:
    half = THREADS // 2
    (to,) = machine.run(PHASES, Out.empty((ROUNDS, half), np.uint32), np.uint32(ROUNDS))
    expected = np.arange(ROUNDS)[:, None] * 1000 + np.arange(half)[::-1]
    np.testing.assert_array_equal(to, expected)


@pytest.mark.parametrize("whole", [1, 0], ids=["announced at once", "in two arrivals"])
@pytest.mark.parametrize("words", [(4, 4), (256, 12), (4, 1020)], ids=str)
def test_a_phase_ends_when_all_announced_bytes_have_come(
    machine: Machine, words: tuple[int, int], whole: int
) -> None:
    from_ = np.arange(ROUNDS * sum(words), dtype=np.uint32)
    numbers = (np.uint32(x) for x in (*words, ROUNDS, whole))
    (to,) = machine.run(BYTES, from_, Out.empty(from_.shape, np.uint32), *numbers)
    np.testing.assert_array_equal(to, from_)
