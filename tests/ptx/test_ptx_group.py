"""Groups of warps: named barriers, the elected lane, registers that change hands."""

import numpy as np
from machine import Kernel, Machine, Out

HANDOFF = Kernel(
    "group memory",
    "u32 *to; u32 rounds;",
    """
  enum : u32 { PRODUCERS = 1, FULL = 2, EMPTY = 15 };
  u32 *shared = ptx::shared<u32[128]>();
  const u32 t = threadIdx.x;
  for (u32 i = 0; i < p.rounds; ++i) {
    if (t < 64) {
      ptx::named_barrier_sync(EMPTY, 128);
      shared[t] = i * 1000 + t;
      ptx::named_barrier_sync(PRODUCERS, 64);
      shared[64 + t] = shared[63 - t];
      ptx::named_barrier_arrive(FULL, 128);
    } else {
      ptx::named_barrier_arrive(EMPTY, 128);
      ptx::named_barrier_sync(FULL, 128);
      p.to[i * 64 + t - 64] = shared[64 + (t - 63) % 64];
    }
  }
""",
    threads=128,
    shared=512,
    capability=90,
)
ELECT = Kernel(
    "group",
    "u32 *to;",
    "  for (u32 i = 0; i < 3; ++i) p.to[i * blockDim.x + threadIdx.x] = ptx::elect();",
    threads=128,
    capability=90,
)
REGISTERS = Kernel(
    "group memory warp",
    "u32 *to;",
    """
  const u32 group = threadIdx.x / 128;
  if (group == 0) {
    ptx::registers_decrease<24>();
  } else {
    ptx::registers_increase<240>();
  }
  p.to[threadIdx.x] = group;
""",
    threads=384,
    capability=90,
)


def test_named_barriers_hand_over_shared_memory(machine: Machine) -> None:
    rounds = 6
    (to,) = machine.run(HANDOFF, Out.empty((rounds, 64), np.uint32), np.uint32(rounds))
    expected = np.arange(rounds)[:, None] * 1000 + 63 - (np.arange(64) + 1) % 64
    np.testing.assert_array_equal(to, expected)


def test_one_lane_of_each_warp_is_elected(machine: Machine) -> None:
    (to,) = machine.run(ELECT, Out.empty((3, 4, 32), np.uint32))
    np.testing.assert_array_equal(np.sort(to, axis=2), np.arange(32) // 31 * np.ones((3, 4, 1)))


def test_registers_go_from_one_warpgroup_to_the_others(machine: Machine) -> None:
    (to,) = machine.run(REGISTERS, Out.empty(384, np.uint32))
    np.testing.assert_array_equal(to, np.arange(384) // 128)
