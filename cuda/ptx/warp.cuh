// The block's and the warp's synchronisation, shuffles and votes. All of them are called by full warps.
#pragma once
#include "device.cuh"

namespace ptx {

DEVICE void barrier() { __syncthreads(); }
DEVICE void warp_barrier() { __syncwarp(); }
DEVICE float shfl_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE u32 shfl_xor(u32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE bool any(bool predicate) { return __any_sync(0xffffffffu, predicate) != 0; }

// This thread's lane, read anew at each call: an address computed from it need not be kept across a loop.
DEVICE u32 lane() {
  u32 lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// The x of lane 0, which the compiler then knows to be the same in every lane: it may live in a uniform register.
DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// x itself, but the compiler cannot know that: what is computed from it is computed here, instead of being hoisted out
// of a loop where it would hold a register.
DEVICE u32 opaque(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}
DEVICE i64 opaque(i64 x) {
  asm volatile("" : "+l"(x));
  return x;
}

}  // namespace ptx
