// 8-bit element types, and their V: tensor cores take 8-bit operands only with K along the rows, so that V, whose keys
// run down its columns, is transposed on its way to them.
#pragma once
#include "ptx/fp8.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/ring.cuh"
#include "tile/warpgroup.cuh"

struct Float8E4m3 {
  using Storage = unsigned char;
  using Output = Bfloat16;
  DEVICE static void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { ptx::mma_m16n8k32_e4m3(d, a, b0, b1); }
};

struct Float8E5m2 {
  using Storage = unsigned char;
  using Output = Bfloat16;
  DEVICE static void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { ptx::mma_m16n8k32_e5m2(d, a, b0, b1); }
};

// V^T as slices of 32 keys, the K of one product: a row is 32 bytes, and chunk c of 16 bytes of row r lies at chunk
// c ^ r / 4 % 2 (PTX ISA, "Swizzling modes").
template <int DV, int KEYS>
struct Slices {
  static constexpr u32 SLICE = DV * 32, BYTES = KEYS / 32 * SLICE;
  static_assert(KEYS % 32 == 0 && DV % 32 == 0, "whole slices, each where the swizzle begins");

  alignas(1024) unsigned char data[BYTES];

  DEVICE static u32 offset(u32 row, u32 chunk) { return chunk / 2 * SLICE + row * 32 + (chunk ^ row / 4) % 2 * 16; }
};

// An operand of slices. Its descriptor says: groups of eight rows follow each other at 256 bytes, 32-byte swizzle.
template <class Tile>
struct AlongSlices {
  static constexpr u32 HIGH = 256 / 16 | 3u << 30;
  DEVICE static u32 low(u32 tile) { return tile / 16; }
  DEVICE static constexpr u32 advance(int step) { return step * Tile::SLICE / 16; }
};

template <>
struct Wgmma<Float8E4m3> {
  static constexpr int K = 32;
  template <int KEYS, int DV>
  using Values = Slices<DV, KEYS>;  // transposed
  template <class Tile>
  using ValueOperand = AlongSlices<Tile>;

  template <int R>
  DEVICE static void qk(float (&d)[R], u64 a, u64 b, bool keep) {
    ptx::wgmma_e4m3(d, a, b, keep);
  }
  template <int R>
  DEVICE static void pv(float (&d)[R], const u32 (&a)[4], u64 b, bool keep) {
    ptx::wgmma_e4m3(d, a, b, keep);
  }
};

template <>
struct Wgmma<Float8E5m2> : Wgmma<Float8E4m3> {
  template <int R>
  DEVICE static void qk(float (&d)[R], u64 a, u64 b, bool keep) {
    ptx::wgmma_e5m2(d, a, b, keep);
  }
  template <int R>
  DEVICE static void pv(float (&d)[R], const u32 (&a)[4], u64 b, bool keep) {
    ptx::wgmma_e4m3_e5m2(d, a, b, keep);
  }
};

// Weights of 8 bits, e4m3 whatever V is. An accumulator has the keys 2t, 2t + 1, 8 + 2t and 8 + 2t + 1 of sixteen where
// the operand has 4t to 4t + 3 (t = lane % 4). A sum over keys may go in any order: V^T has the same one.
template <int N>
struct Weights8 {
  u32 a[N / 32][4];

  DEVICE void pack(const Accumulator<N> &p) {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const int first = i / 4 * 16 + i % 4 / 2 * 8 + i % 2 * 2;
      a[i / 4][i % 4] =
          ptx::word_of(ptx::e4m3x2(p.x[first], p.x[first + 1]), ptx::e4m3x2(p.x[first + 4], p.x[first + 5]));
    }
  }
};
template <int N>
struct Weights<Float8E4m3, N> : Weights8<N> {};
template <int N>
struct Weights<Float8E5m2, N> : Weights8<N> {};

// Where V lands before it is transposed; elements of 16 bits need no such place.
template <class Element, int KEYS, int DV, int SLOTS>
struct Landing {
  DEVICE void init(u32) {}
};

template <int KEYS, int DV, int SLOTS>
struct Landing<unsigned char, KEYS, DV, SLOTS> {
  using Tile = Panels<unsigned char, KEYS, DV>;
  Tile v[SLOTS];
  Ring<SLOTS> ring;
  int rows[SLOTS];  // that are the sequence's; 0: nothing has landed, nor will

  DEVICE void init(u32 readers) { ring.init(readers); }
};

// The matrices of 32 keys by 16 columns that V is transposed in, shared out to warps strip by strip: some of the
// matrices below each other, whose addresses differ by constants.
template <int KEYS, int DV>
struct Matrices {
  static constexpr int ROWS = KEYS / 32, STRIPS = DV / 16 < 6 && ROWS % 2 == 0 ? 2 : 1;  // of each column, for balance
  static constexpr int COUNT = STRIPS * (DV / 16), STRIP = ROWS / STRIPS;

  DEVICE static u32 key(int n) { return n % STRIPS * STRIP * 32; }
  DEVICE static u32 column(int n) { return n / STRIPS * 16; }
};

// Makes the keys of V from `rows` on zeros, of what one warp of `warps` is going to transpose.
template <int KEYS, int DV>
DEVICE void clear_share(Panels<unsigned char, KEYS, DV> &v, u32 rows, int warp, int warps, u32 lane) {
  using Share = Matrices<KEYS, DV>;
  for (int n = warp; n < Share::COUNT; n += warps) {
    for (int i = 0; i < Share::STRIP; ++i) {
      const u32 row = Share::key(n) + i * 32 + lane;
      if (row >= rows) *reinterpret_cast<Chunk *>(v.data + v.offset(row, Share::column(n) / 16)) = {};
    }
  }
}

// One warp's share, of `warps`, of V^T from V. ldmatrix transposes pairs of bytes; a permutation of bytes parts the
// pairs into their two columns, and joins the keys of two pairs.
template <int KEYS, int DV>
DEVICE void transpose(u32 from, u32 to, int warp, int warps, u32 lane) {
  using Share = Matrices<KEYS, DV>;
  using From = Panels<unsigned char, KEYS, DV>;
  using To = Slices<DV, KEYS>;
  // Both tiles are swizzled: of a chunk's address the lane has one part, the matrix's place the other. A matrix begins
  // where the swizzle of V^T does.
  const u32 source = from + From::offset(lane, 0);
  // Of eight rows that are stored together four are even and four are odd columns of V: they lie in different banks.
  const u32 target_row = lane % 8 * 2 + (lane / 8 % 2 ^ lane % 8 / 4), target = to + To::offset(target_row, lane / 16);
  const u32 first_half = lane < 16 ? 0x6420 : 0x7531, other_half = 0x6420 ^ 0x7531 ^ first_half;
#pragma unroll 1
  for (int n = warp; n < Share::COUNT; n += warps) {
    const u32 key = Share::key(n), column = Share::column(n);
    const u32 read = (source ^ column % 128) + column / 128 * From::PANEL + key * 128;
    const u32 write = target + key / 32 * To::SLICE + column * 32;
    u32 pair[Share::STRIP][4];  // all at once: one after the other would wait
#pragma unroll
    for (int i = 0; i < Share::STRIP; ++i) ptx::ldmatrix_x4_trans(pair[i], read + i * 32 * 128);
#pragma unroll
    for (int i = 0; i < Share::STRIP; ++i) {
      u32 row[4];
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        row[j] = ptx::permute_bytes(pair[i][j], pair[i][j + 1], first_half);
        row[j + 1] = ptx::permute_bytes(pair[i][j], pair[i][j + 1], other_half);
      }
      ptx::stmatrix_x4(write + i * To::SLICE, row);
    }
  }
}
