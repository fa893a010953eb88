// A block of attention_bwd_sm90: its warpgroups take their roles.
#pragma once
#include "ptx/group.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "roles/backward_producer_sm90.cuh"

namespace backward {

template <class Consumer>
DEVICE void differentiate(const Params &p, Shared &shared) {
  const int group = ptx::uniform(threadIdx.x / 128), warp = ptx::uniform(threadIdx.x / 32 % 4);
  if (threadIdx.x / 32 == 0) {
    const Place place = place_of<Sequences>(p, p.sequences);
    if (ptx::lane() == 0) {
      shared.place = place, shared.blocks = 0;
      for (Walk walk(p, place); !walk.done(); walk.advance()) ++shared.blocks;
    }
  }
  if (threadIdx.x == 0) {
    shared.k_ring.init(1);
    shared.v_ring.init(1);
    shared.q_ring.init(4 * CONSUMERS);
    shared.dout_ring.init(4 * CONSUMERS);
    shared.ds_ring.init(4 * CONSUMERS, WIDE ? 4 : 4 * CONSUMERS);
    shared.passed.init();
    shared.tail.init();
    ptx::fence_mbarrier_init();
  }
  ptx::barrier();  // the barriers are made, and the place is known
  if (group == CONSUMERS) {
    ptx::registers_decrease<24>();
    if (warp == 0) {
      if (ptx::elect()) Loader(p, shared, shared.place).run();
    } else if (warp <= CONSUMERS) {
      if (ptx::elect()) drain(p, shared, shared.place, warp - 1);
    } else {
      clear_tails(shared);
    }
  } else {
    ptx::registers_increase<240>();
    Consumer(p, shared, group, warp).run();
  }
}

}  // namespace backward
