"""Copies of contiguous bytes by the bulk copy engine, and sums of fp32 numbers by it."""

import numpy as np
import pytest
from machine import Kernel, Machine, Out

STORE = Kernel(
    "bulk memory warp",
    "const float *from; float *to, *sum; u32 count, rounds;",
    """
  float *shared = ptx::shared<float[2048]>();
  const u32 t = threadIdx.x;
  const float *from = p.from + blockIdx.x * p.rounds * p.count;
  float *to = p.to + blockIdx.x * p.rounds * p.count;
  for (u32 i = 0; i < p.rounds; ++i) {
    // Two buffers: the copies of the round before may still read the other one.
    float *buffer = shared + i % 2 * 1024;
    for (u32 j = t; j < p.count; j += blockDim.x) buffer[j] = from[i * p.count + j];
    ptx::fence_proxy_async();
    ptx::barrier();
    if (t == 0) {
      ptx::bulk_store(to + i * p.count, ptx::smem_address(buffer), p.count * 4);
      ptx::bulk_reduce_add_f32(p.sum, ptx::smem_address(buffer), p.count * 4);
      ptx::bulk_commit();
      ptx::bulk_wait_read<1>();
    }
    ptx::barrier();
  }
  if (t == 0) ptx::bulk_wait<0>();
""",
    threads=64,
    blocks=4,
    shared=8192,
    capability=90,
)
RELAY = Kernel(
    "bulk mbarrier memory warp",
    "const u32 *from; u32 *to; u32 count;",
    """
  struct Shared {
    u32 x[1024];
    u64 full;
  };
  Shared &s = ptx::shared<Shared>();
  if (threadIdx.x == 0) {
    const u32 full = ptx::smem_address(&s.full), x = ptx::smem_address(s.x);
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(full, p.count * 4);
    ptx::bulk_load(x, p.from, p.count * 4, full);
    ptx::mbarrier_wait(full, 0);
    ptx::bulk_store(p.to, x, p.count * 4);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
  }
""",
    shared=5120,
    capability=90,
)
ORDER = Kernel(
    "atomic bulk memory warp",
    "float *sum; u32 *turn, *ticket; u32 count, rounds;",
    """
  float *shared = ptx::shared<float[1024]>();
  if (threadIdx.x == 0) {
    const u32 own = ptx::atomic_add(p.ticket, 1);  // blocks that wait have those before them there
    for (u32 j = 0; j < p.count; ++j) shared[j] = own == 0 ? 1.0f : 0x1p-24f;
    ptx::fence_proxy_async();
    for (u32 i = 0; i < p.rounds; ++i) {
      ptx::acquire_when(p.turn + i, own);
      ptx::fence_proxy_async_global();
      ptx::bulk_reduce_add_f32(p.sum + i * p.count, ptx::smem_address(shared), p.count * 4);
      ptx::bulk_commit();
      ptx::bulk_wait<0>();
      ptx::release_add(p.turn + i, 1);
    }
  }
""",
    blocks=3,
    shared=4096,
    capability=90,
)


@pytest.mark.parametrize("count", [4, 100, 1024])
def test_bytes_leave_shared_memory_and_numbers_are_added(
    machine: Machine, rng: np.random.Generator, count: int
) -> None:
    rounds = 5
    from_ = rng.integers(-99, 100, (STORE.blocks, rounds, count)).astype(np.float32)
    before = rng.integers(-99, 100, count).astype(np.float32)
    to, sum_ = machine.run(
        STORE, from_, Out.empty(from_.shape, np.float32), Out(before), np.uint32(count),
        np.uint32(rounds),
    )  # fmt: skip
    np.testing.assert_array_equal(to, from_)
    np.testing.assert_array_equal(sum_, before + from_.sum(axis=(0, 1)))


@pytest.mark.parametrize("count", [4, 100, 1024])
def test_blocks_add_in_turns(machine: Machine, count: int) -> None:
    """1 + 2^-24 + 2^-24 is 1 in this order, and more than 1 where the small ones meet first."""
    rounds = 50
    sums, turns = Out(np.zeros((rounds, count), np.float32)), Out(np.zeros(rounds, np.uint32))
    ticket = Out(np.zeros(1, np.uint32))
    sums, turns, _ = machine.run(ORDER, sums, turns, ticket, np.uint32(count), np.uint32(rounds))
    assert np.all(sums == 1)
    assert np.all(turns == ORDER.blocks)


@pytest.mark.parametrize("count", [4, 12, 1024])
def test_bytes_pass_through_shared_memory(machine: Machine, count: int) -> None:
    from_ = np.arange(count, dtype=np.uint32)
    (to,) = machine.run(RELAY, from_, Out.empty(count, np.uint32), np.uint32(count))
    np.testing.assert_array_equal(to, from_)
