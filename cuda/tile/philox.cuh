// Philox4x32-10, the counter-based random number generator of Salmon et al. 2011 ("Parallel random numbers: as easy as
// 1, 2, 3").
#pragma once
#include "device.cuh"

// The block of the counter x, which it replaces.
DEVICE void philox4x32(u32 (&x)[4], u32 key_low, u32 key_high) {
#pragma unroll
  for (u32 round = 0; round < 10; ++round) {
    const u64 product0 = u64{0xd2511f53u} * x[0], product2 = u64{0xcd9e8d57u} * x[2];
    x[0] = static_cast<u32>(product2 >> 32) ^ x[1] ^ (key_low + round * 0x9e3779b9u);
    x[1] = static_cast<u32>(product2);
    x[2] = static_cast<u32>(product0 >> 32) ^ x[3] ^ (key_high + round * 0xbb67ae85u);
    x[3] = static_cast<u32>(product0);
  }
}
