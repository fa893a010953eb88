// Where dQ is summed in global memory, in fp32: 16 rows of COLUMNS numbers after 16 rows, in the order of what adds to
// them. A thread owns four numbers of each 16 x 8 piece n, as in an accumulator of m16n8k16.
#pragma once
#include "ptx/atomic.cuh"
#include "tile/load.cuh"

// Row by row.
struct RowOrder {
  static constexpr int TOGETHER = 2;  // how many of a thread's numbers are neighbours
  template <int COLUMNS>
  DEVICE static u32 at(int n, int i, u32 lane) {
    return (i / 2 * 8 + lane / 4) * COLUMNS + n * 8 + lane % 4 * 2 + i % 2;
  }
};

// Piece by piece, a thread's four numbers side by side: one instruction of a GPU that adds four adds 512 bytes in a
// row.
struct ThreadOrder {
  static constexpr int TOGETHER = 4;
  template <int COLUMNS>
  DEVICE static u32 at(int n, int i, u32 lane) {
    return (n * 32 + lane) * 4 + i;
  }
};

// Piece by piece, a warp's numbers side by side: one instruction of a GPU that adds one adds 128 bytes in a row.
struct LaneOrder {
  static constexpr int TOGETHER = 1;
  template <int COLUMNS>
  DEVICE static u32 at(int n, int i, u32 lane) {
    return (n * 4 + i) * 32 + lane;
  }
};

// Adds a thread's four numbers of piece n to those at `sums`.
template <class Order, int COLUMNS>
DEVICE void add(float *sums, int n, const float (&x)[4], u32 lane) {
  if constexpr (Order::TOGETHER == 4) {
    ptx::reduce_add(sums + Order::template at<COLUMNS>(n, 0, lane), x);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::reduce_add(sums + Order::template at<COLUMNS>(n, i, lane), x[i]);
  }
}

// Reads them.
template <class Order, int COLUMNS>
DEVICE void read(float (&x)[4], const float *sums, int n, u32 lane) {
  constexpr int TOGETHER = Order::TOGETHER;
#pragma unroll
  for (int i = 0; i < 4; i += TOGETHER) {
    const auto words = *reinterpret_cast<const Packet<4 * TOGETHER> *>(sums + Order::template at<COLUMNS>(n, i, lane));
#pragma unroll
    for (int j = 0; j < TOGETHER; ++j) x[i + j] = ptx::bits_float(words.word[j]);
  }
}
