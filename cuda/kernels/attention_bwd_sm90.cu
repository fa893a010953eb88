// dQ, dK and dV for Hopper, head dims up to 128: TMA, wgmma and warp specialisation. The schedule, its barriers and the
// measurements are in docs/kernels/attention_bwd_sm90.md. A block owns BLOCK_K keys of one kv head; each of its two
// consumer warpgroups has dK and dV of 64 of them in registers, and walks the query blocks that see them. What a query
// block adds to dQ goes to a fp32 accumulator in global memory.
//
// Reads Config: T, Mask, Score, Dropout, Sink, Sequences, HEAD_DIM, BLOCK_Q, DETERMINISTIC, SPLITS, FINISHES,
// PARAMS_BYTES, SMEM_BYTES.
#include "roles/backward_block_sm90.cuh"
#include "roles/backward_narrow_sm90.cuh"

extern "C" __global__ void __launch_bounds__(backward::THREADS, 1)
    attention_bwd_sm90(const __grid_constant__ backward::Params p) {
  backward::differentiate<backward::NarrowConsumer>(p, ptx::shared<backward::Shared>());
}
