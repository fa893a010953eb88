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
  if (threadIdx.x / 32 == 4 * CONSUMERS) {
    const int index = index_of_block(p);  // on its way while the barriers are made
    const Order order = order_of(p);
    if (ptx::lane() == 0) {
      shared.k_ring.init(1);
      shared.v_ring.init(1);
      shared.q_ring.init(4 * CONSUMERS);
      shared.dout_ring.init(4 * CONSUMERS);
      shared.ds_ring.init(4 * CONSUMERS, WIDE ? 4 : 4 * CONSUMERS);
      shared.passed.init();
      shared.tail.init();
      shared.leave.init();
      ptx::fence_mbarrier_init();
    }
    const Place place = place_of<Sequences>(p, p.sequences, order, ptx::uniform(index));
    if (ptx::lane() == 0) {
      shared.place = place;
      Loader loader(p, shared);
      if constexpr (!VARIES) loader.begin();  // the sooner the better; rows to clear need another warp
      shared.blocks = Walk(p, shared.place).count();
    }
  }
  ptx::barrier();  // the barriers are made, and the place is known
  if (group == CONSUMERS) {
    ptx::registers_decrease<24>();
    if (warp == 0) {
      if (ptx::lane() == 0) {
        Loader loader(p, shared);
        if constexpr (VARIES) loader.begin();
        loader.run();
      }
    } else if (warp <= CONSUMERS) {
      // Where bounds fall, sequences may share counters or lack blocks of keys, and waits might not end.
      const bool waits = DETERMINISTIC && !falls<Sequences>(p.sequences, p.batch, p.len_q, p.len_k);
      if (ptx::elect()) drain(p, shared, shared.place, warp - 1, waits);
    } else {
      clear_tails(shared);
    }
  } else {
    ptx::registers_increase<240>();
    // Read anew where dQ has an order and at head dim 64: ptxas keeps the other one in a uniform register there, and
    // spills.
    const int own = static_cast<int>(ptx::opaque(threadIdx.x) / 32 % 4);
    Consumer(p, shared, group, DETERMINISTIC || HEAD_DIM == 64 ? own : warp).run();
  }
}

}  // namespace backward
