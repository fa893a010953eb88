// Rows of O from the registers of a warpgroup to where they go.
#pragma once
#include "ptx/stmatrix.cuh"
#include "ptx/warp.cuh"
#include "tile/warpgroup.cuh"

// One warp's sixteen rows of the accumulator into a tile of panels.
template <class T, class Tile, int N>
DEVICE void stage(const Accumulator<N> &o, u32 tile, int warp, u32 lane) {
#pragma unroll
  for (int chunk = 0; chunk < N / 8; chunk += 2) {
    u32 d[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = T::pair(o.x[4 * chunk + 2 * i], o.x[4 * chunk + 2 * i + 1]);
    ptx::stmatrix_x4(tile + Tile::offset(warp * 16 + lane % 16, chunk + lane / 16), d);
  }
}

// The four lanes of a quad hold a row's chunk of 8 columns in w[i] between them; afterwards each holds one chunk.
DEVICE void gather_chunk(u32 (&w)[4], u32 lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = lane & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const u32 other = ptx::shfl_xor(upper ? w[i] : w[i + bit], bit);
      (upper ? w[i] : w[i + bit]) = other;
    }
  }
}

// One warp's sixteen rows to global memory, of which `count` exist, `columns` elements each; columns is a multiple of 8
// and rows are 16-byte aligned. Row r goes to target + r * stride.
template <class T, int N>
DEVICE void store_rows(const Accumulator<N> &o, typename T::Storage *target, i64 stride, int count, int columns,
                       u32 lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = Accumulator<N>::row(r, lane);
#pragma unroll
    for (int chunk = 0; chunk < N / 8; chunk += 4) {
      u32 w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = T::pair(o.x[4 * (chunk + i) + 2 * r], o.x[4 * (chunk + i) + 2 * r + 1]);
      gather_chunk(w, lane);
      const int column = 8 * (chunk + static_cast<int>(lane % 4));
      if (row < count && column < columns)
        *reinterpret_cast<Chunk *>(target + row * stride + column) = {w[0], w[1], w[2], w[3]};
    }
  }
}
