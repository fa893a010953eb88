// The scores of one warp once more, by warp-wide products from the same tiles in shared memory; the layout of their
// accumulators is that of a warpgroup's.
#pragma once
#include "ptx/ldmatrix.cuh"
#include "ptx/warp.cuh"
#include "tile/warpgroup.cuh"

template <class T, class Queries, class Keys, int D, int N>
DEVICE void rescore(Accumulator<N> &s, u32 q, u32 k, int warp, u32 lane) {
#pragma unroll
  for (int n = 0; n < N; n += 16) {
    float d[2][4] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < D * static_cast<int>(sizeof(typename T::Storage)) / 16; chunk += 2) {
      u32 a[4], b[4];
      ptx::ldmatrix_x4(a, q + Queries::offset(warp * 16 + lane % 16, chunk + lane / 16));
      ptx::ldmatrix_x4(b, k + Keys::offset(n + lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2));
      T::mma(d[0], a, b[0], b[1]);
      T::mma(d[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) s.x[n / 2 + i] = d[i / 4][i % 4];
  }
  ptx::warp_barrier();  // every lane has read what the warp may give back or overwrite
}
