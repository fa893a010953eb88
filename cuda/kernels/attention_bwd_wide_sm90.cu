// The same as attention_bwd_sm90 for head dims above 128, where dK and dV of 64 keys fill the registers of two consumer
// warpgroups: each has half of their columns.
//
// Reads Config: T, Mask, Score, Dropout, Sink, Sequences, HEAD_DIM, BLOCK_Q, DETERMINISTIC, PARAMS_BYTES, SMEM_BYTES.
#include "roles/backward_block_sm90.cuh"
#include "roles/backward_wide_sm90.cuh"

extern "C" __global__ void __launch_bounds__(backward::THREADS, 1)
    attention_bwd_wide_sm90(const __grid_constant__ backward::Params p) {
  backward::differentiate<backward::WideConsumer>(p, ptx::shared<backward::Shared>());
}
