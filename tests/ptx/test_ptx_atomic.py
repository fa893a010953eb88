"""Numbers in global memory that blocks share."""

import numpy as np
from machine import Kernel, Machine, Out

BLOCKS, THREADS = 4, 64
COUNT = BLOCKS * THREADS
LAST = 6
ATOMIC = Kernel(
    "atomic",
    "u32 *sum, *turn; float *one, *four; u32 *added, *taken; u32 last;",
    """
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  p.added[i] = ptx::atomic_add(p.sum, i + 1);
  p.taken[i] = ptx::atomic_inc(p.turn, p.last);
  ptx::reduce_add(p.one, static_cast<float>(i));
  const float x[4] = {1, -2, static_cast<float>(i), 0.5f};
  ptx::reduce_add(p.four + threadIdx.x % 2 * 4, x);
""",
    threads=THREADS,
    blocks=BLOCKS,
    capability=90,
)
ORDER = Kernel(
    "atomic warp",
    "u32 *data, *turn, *to; u32 rounds;",
    """
  const u32 t = threadIdx.x, block = blockIdx.x;
  for (u32 i = 0; i < p.rounds; ++i) {
    // Block 0 adds first, then block 1, and so on around.
    if (t == 0) ptx::acquire_when(p.turn, i * gridDim.x + block);
    ptx::barrier();
    const u32 before = p.data[(t + 1) % blockDim.x];
    p.to[(i * gridDim.x + block) * blockDim.x + t] = before;
    ptx::barrier();
    p.data[t] = p.data[t] + block + 1;
    ptx::barrier();
    if (t == 0) ptx::release_add(p.turn, 1);
  }
""",
    threads=THREADS,
    blocks=2,
    capability=90,
)


def test_every_thread_adds_once(machine: Machine) -> None:
    zeros = [Out(np.zeros(n, dtype)) for n, dtype in ((1, "u4"), (1, "u4"), (1, "f4"), (8, "f4"))]
    before = [Out.empty(COUNT, np.uint32) for _ in range(2)]
    total, turn, one, four, added, taken = machine.run(ATOMIC, *zeros, *before, np.uint32(LAST))
    threads = np.arange(COUNT)
    # What each found is what those before it have added, in some order.
    order = np.argsort(added)
    np.testing.assert_array_equal(added[order], np.cumsum(order + 1) - (order + 1))
    assert total[0] == (threads + 1).sum()
    np.testing.assert_array_equal(np.sort(taken), np.sort(threads % (LAST + 1)))
    assert turn[0] == COUNT % (LAST + 1)
    assert one[0] == threads.sum()
    halves = [threads[half::2] for half in range(2)]
    expected = [[half.size, -2 * half.size, half.sum(), half.size / 2] for half in halves]
    np.testing.assert_array_equal(four.reshape(2, 4), expected)


def test_a_counter_beyond_the_last_returns_to_zero(machine: Machine) -> None:
    """PTX ISA, "atom": inc gives 0 where the number is not below the operand."""
    outs = [Out(np.full(n, x, d)) for n, x, d in ((1, 0, "u4"), (1, 40, "u4"), (1, 0, "f4"))]
    outs += [Out(np.zeros(8, np.float32)), *(Out.empty(COUNT, np.uint32) for _ in range(2))]
    *_, taken = machine.run(ATOMIC, *outs, np.uint32(LAST))
    expected = np.sort(np.append(np.arange(COUNT - 1) % (LAST + 1), 40))
    np.testing.assert_array_equal(np.sort(taken), expected)


def test_blocks_take_turns_and_see_what_was_written_before(machine: Machine) -> None:
    rounds, blocks = 3, ORDER.blocks
    arrays = [Out(np.zeros(THREADS, np.uint32)), Out(np.zeros(1, np.uint32))]
    to = Out.empty((rounds, blocks, THREADS), np.uint32)
    _, turn, seen = machine.run(ORDER, *arrays, to, np.uint32(rounds))
    step = np.tile(np.arange(1, blocks + 1), rounds)
    expected = (np.cumsum(step) - step).reshape(rounds, blocks, 1)
    np.testing.assert_array_equal(seen, np.broadcast_to(expected, seen.shape))
    assert turn[0] == rounds * blocks
