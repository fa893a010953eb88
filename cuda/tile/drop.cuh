// Dropout of the weights that a warp's registers hold.
#pragma once
#include "tile/dropout.cuh"
#include "tile/fragment.cuh"

// Drops weights in columns [first, first + COLUMNS) of a fragment that begins at row q and column k of its sequence,
// multiples of 16. One draw decides about 32 columns, of which 16 may be there.
template <int COLUMNS, class Dropout, int M, int N>
DEVICE void drop(Fragment<M, N> &p, const Dropout &dropout, int q, int k, int first, u32 lane) {
  if constexpr (Dropout::DROPS) {
    static_assert(COLUMNS == 16 || COLUMNS == 32, "a draw, or half of one");
    const bool upper = COLUMNS == 16 && (k + first) % 32 != 0;
#pragma unroll
    for (int m = 0; m < M / 16; ++m)
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        u32 x[4];
        dropout.draw(q + p.row(2 * m, lane), k + first + p.column(odd, lane), x);
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const bool kept = upper ? dropout.keep(x, half, n % 2 + 2) : dropout.keep(x, half, n);
            if (!kept) p.x[m][first / 8 + n][2 * half + odd] = 0.0f;
          }
      }
  }
}

// Which weights of a transposed fragment are kept: its rows are keys from k on, its columns queries from q on,
// multiples of 16. A draw decides about 32 keys, of which 16 may be there.
template <class Dropout, int M, int N>
struct Kept {
  static_assert(M <= 64, "the weights of 16 queries have a bit each in a word");
  u32 bits[N / 16];

  DEVICE Kept(const Dropout &dropout, int q, int k, u32 lane) {
    if constexpr (Dropout::DROPS) {
      const bool upper = M == 16 && k % 32 != 0;
#pragma unroll
      for (int n = 0; n < N / 16; ++n) {
        bits[n] = 0;
#pragma unroll
        for (int m = 0; m < M / 16; m += 2)
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            u32 x[4];
            dropout.draw(q + 16 * n + Fragment<M, N>::column(odd, lane), k + Fragment<M, N>::row(2 * m, lane), x);
#pragma unroll
            for (int key = 0; key < (M == 16 ? 2 : 4); ++key)
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const bool kept = upper ? dropout.keep(x, half, key % 2 + 2) : dropout.keep(x, half, key);
                if (kept) bits[n] |= bit(2 * m + key, 8 * half + odd);
              }
          }
      }
    }
  }

  // Of a row and column as Fragment::each counts them.
  DEVICE bool at(int row, int column) const {
    return !Dropout::DROPS || (bits[column / 16] & bit(row, column % 16)) != 0;
  }

 private:
  DEVICE static constexpr u32 bit(int row, int column) { return 1u << (row * 4 + column / 8 * 2 + column % 2); }
};

// What the weights that are left are multiplied by.
template <class Dropout>
DEVICE float rescale(const Dropout &dropout) {
  if constexpr (Dropout::DROPS) return dropout.rescale();
  return 1.0f;
}
