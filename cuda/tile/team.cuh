// Threads that find something out together. A team says which of its SIZE threads this one is, and `join` makes of what
// each has found what all have: of words, which `add` joins with those of another thread, in any order. It is a barrier
// of the team too.
#pragma once
#include "ptx/warp.cuh"

// Loads at(0) to at(COUNT - 1) for the lines that come into the L1 cache with them.
template <int COUNT, class At>
DEVICE void bring_near(At at) {
  u32 any = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) any |= static_cast<u32>(at(i));
  ptx::opaque(any);
}

struct OneWarp {
  static constexpr int SIZE = 32;

  DEVICE static int index() { return static_cast<int>(ptx::lane()); }

  template <class Found>
  DEVICE static void join(Found &found) {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
      Found other;
#pragma unroll
      for (int i = 0; i < Found::WORDS; ++i) other.word[i] = ptx::shfl_xor(found.word[i], bit);
      found.add(other);
    }
    ptx::warp_barrier();
  }
};

// All warps of a block, with shared memory that nothing else uses meanwhile: a word a warp for each that is found.
template <int WARPS>
struct WholeBlock {
  static constexpr int SIZE = 32 * WARPS;

  u32 *scratch;

  DEVICE static int index() { return static_cast<int>(threadIdx.x); }

  template <class Found>
  DEVICE void join(Found &found) const {
    OneWarp::join(found);
    if (ptx::lane() == 0) {
#pragma unroll
      for (int i = 0; i < Found::WORDS; ++i) scratch[threadIdx.x / 32 * Found::WORDS + i] = found.word[i];
    }
    ptx::barrier();  // every warp has told what it found
    for (int warp = 0; warp < WARPS; ++warp) {
      Found other;
#pragma unroll
      for (int i = 0; i < Found::WORDS; ++i) other.word[i] = scratch[warp * Found::WORDS + i];
      if (warp == 0) {
        found = other;
      } else {
        found.add(other);
      }
    }
    ptx::barrier();  // every warp has read it
  }
};
