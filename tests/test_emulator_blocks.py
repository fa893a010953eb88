"""Blocks that share numbers: a counter that hands out work, an order in which they add up."""

import re
from dataclasses import replace

import numpy as np
import pytest
from emulated import Numbers, needs_compiler, numbers, tiny

import cupyflash
from cupyflash import _emulator

pytestmark = needs_compiler

BLOCKS = 6
RESIDENTS = {0: 3, 1: 2, 2: 1, 12: 2}  # by the seed: blocks that run at a time

# Each block takes a ticket; who has ticket i adds i-th.
TICKETS = """
  if (i == 0) shared[0] = ptx::atomic_add(p.counts, 1);
  ptx::barrier();
  const u32 ticket = shared[0];
  if (i == 0) {
    ptx::acquire_when(p.counts + 1, ticket);
    p.counts[2 + ticket] = blockIdx.x;
    ptx::release_add(p.counts + 1, 1);
  }
"""
# The same, in the order of the blocks' indices, which nobody promises.
INDICES = TICKETS.replace("ptx::atomic_add(p.counts, 1)", "blockIdx.x")


@pytest.mark.parametrize("seed", range(12))
def test_blocks_may_wait_for_those_that_took_a_ticket_before(seed: int) -> None:
    with numbers() as given:
        assert given.run(TICKETS, seed, BLOCKS).blocks == BLOCKS
        assert list(given.counts[:2]) == [BLOCKS, BLOCKS]
        assert sorted(given.counts[2:]) == list(range(BLOCKS))


@pytest.mark.parametrize("seed", RESIDENTS)
def test_blocks_that_wait_for_one_that_has_not_begun_are_a_deadlock(seed: int) -> None:
    body = "if (i == 0) ptx::acquire_when(p.counts + 1, blockIdx.x + 1);"
    left = BLOCKS - RESIDENTS[seed]
    with numbers() as given, pytest.raises(cupyflash.KernelFault) as caught:
        given.run(body, seed, BLOCKS)
    heading, *lines = str(caught.value).splitlines()
    assert heading.startswith(f"tiny (seed {seed}): DEADLOCK; blocks that have not begun: {left}; ")
    assert len(lines) == RESIDENTS[seed]
    for line in lines:
        block = int(line.partition("block (")[2][0])
        assert f"({block},0,0) threads 0 wait: for counts +4 of 32 bytes to be {block + 1}" in line
        assert line.endswith(", it is 0")


def test_an_order_by_index_is_found_out() -> None:
    with numbers() as given, pytest.raises(cupyflash.KernelFault, match="not begun: 5"):
        given.run(INDICES, 2, BLOCKS)


# The same with a sum by the bulk engine, which has a view of global memory of its own.
SUMS = """
  if (i == 0) {
    const u32 ticket = ptx::atomic_add(p.counts, 1);
    for (int j = 0; j < 4; ++j) shared[j] = 1.0f;
    ptx::fence_proxy_async();
    ptx::acquire_when(p.counts + 1, ticket);
    if (ticket == 0)
      for (int j = 0; j < 4; ++j) p.x[j] = 0.0f;
    ptx::fence_proxy_async_global();
    ptx::bulk_reduce_add_f32(p.x, ptx::smem_address(shared), 16);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
    ptx::release_add(p.counts + 1, 1);
  }
"""


def test_a_copy_after_a_number_of_other_blocks_needs_a_fence() -> None:
    def run(body: str, given: Numbers, seed: int) -> None:
        launch = tiny(body, given.params, BLOCKS)
        _emulator.run(replace(launch, unit=f'#include "ptx/bulk.cuh"\n{launch.unit}'), seed)

    for seed in range(4):
        with numbers() as given:
            run(SUMS, given, seed)
            np.testing.assert_array_equal(given.x, [BLOCKS] * 4)
        with numbers() as given, pytest.raises(cupyflash.KernelFault) as caught:
            run(SUMS.replace("ptx::fence_proxy_async_global();", ""), given, seed)
        assert re.search(
            r"cp.reduce.async.bulk: no fence.proxy.async.global has followed what this thread "
            r"acquired at unit.cpp:\d+",
            str(caught.value),
        )


def test_each_block_has_shared_memory_and_a_barrier_of_its_own() -> None:
    body = """
      shared[i] = 100 * blockIdx.x + i;
      ptx::barrier();
      if (i == 0) {
        ptx::atomic_add(p.counts, 1);
        ptx::acquire_when(p.counts, 3);  // all three are here
      }
      ptx::barrier();
      if (i == 0) p.x[blockIdx.x] = shared[63];
    """
    with numbers(3) as given:
        stats = given.run(body, 0, 3)
        assert stats.barriers == 6
        np.testing.assert_array_equal(given.x, [63, 163, 263])
