// O = softmax(scale Q K^T) V and LSE for Hopper: TMA, wgmma and warp specialisation. The schedule, its barriers and the
// measurements are in docs/kernels/attention_fwd_sm90.md. A persistent block takes tiles of the output one after the
// other. One thread of the producer warpgroup copies tiles of Q, K and V into rings; each consumer warpgroup owns 64
// rows of the tile, from the scores to the output. Key blocks are walked from the last to the first. While a consumer
// weighs the scores of one key block, the tensor cores multiply the weights of the block before with V, and its last
// block's with the first block of its next tile; of 8-bit elements, the products of other consumers.
//
// Reads Config: T, Mask, Score, Dropout, Sink, Sequences, HEAD_DIM, HEAD_DIM_V, BLOCK_K, CONSUMERS, K_STAGES, V_STAGES,
// Q_BUFFERS, TURNS (consumers issue their products in turn, or weigh), LANDINGS, PARTS (of the product with V, of 8-bit
// elements), PARAMS_BYTES, SMEM_BYTES.
#include "ptx/group.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "roles/forward_consumer_sm90.cuh"
#include "roles/forward_fp8_sm90.cuh"
#include "roles/forward_producer_sm90.cuh"

namespace forward {

// The warpgroups share the registers of an SM as their roles need them.
template <int CONSUMERS>
struct Registers;
template <>
struct Registers<2> {
  static constexpr int PRODUCER = LOOKS<Mask> ? 56 : FP8 || VARIES || !PLAIN ? 40 : 24;
  static constexpr int CONSUMER = (504 - PRODUCER) / 16 * 8;
};
template <>
struct Registers<3> {
  static constexpr int PRODUCER = 32, CONSUMER = 160;
};
template <>
struct Registers<4> {
  static constexpr int PRODUCER = 32, CONSUMER = 112;
};

// By whether elements have 8 bits.
template <bool>
struct ConsumerOf {
  using Type = Consumer;
};
template <>
struct ConsumerOf<true> {
  using Type = Fp8Consumer;
};

DEVICE void attend(const Params &p, Shared &shared) {
  const int group = ptx::uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    for (auto &ring : shared.q_ring) ring.init(4);
    shared.k_ring.init(4 * CONSUMERS);
    shared.v_ring.init(4 * CONSUMERS, FP8 ? TRANSPOSERS : 1);
    shared.landing.init(TRANSPOSERS);
    shared.tail.init();
    shared.sight.init();
    ptx::fence_mbarrier_init();
  }
  ptx::barrier();  // the barriers are made
  if (group == CONSUMERS) {
    ptx::registers_decrease<Registers<CONSUMERS>::PRODUCER>();
    const int warp = ptx::uniform(threadIdx.x / 32 % 4);
    if (warp == 0) {
      if (ptx::elect()) Producer(p, shared).run();
    } else if (LOOKS<Mask> && warp == 3) {
      Scout(p).run(shared);
    } else if (FP8) {
      transpose_v(shared, warp - 1);
    } else if (warp == 1) {
      clear_tails(shared);
    }
  } else {
    ptx::registers_increase<Registers<CONSUMERS>::CONSUMER>();
    ConsumerOf<FP8>::Type(p, shared, group, ptx::uniform(threadIdx.x / 32 % 4)).run();
  }
}

}  // namespace forward

// Counters of tiles, one for each launch that may be under way; see Params::tickets.
extern "C" __device__ u32 tickets[16384][2] = {};

extern "C" __global__ void __launch_bounds__(forward::THREADS, 1)
    attention_fwd_sm90(const __grid_constant__ forward::Params p) {
  forward::attend(p, ptx::shared<forward::Shared>());
}
