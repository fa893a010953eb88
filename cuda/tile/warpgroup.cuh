// Matrix products of a warpgroup, asynchronous: they are issued here, committed and waited for by the kernel, and until
// then their registers are not to be touched.
#pragma once
#include "ptx/wgmma.cuh"
#include "tile/panels.cuh"
#include "tile/types.cuh"

// What wgmma is for an element type: K of one product, V's tile and how its descriptor steps along it, the products.
template <class T>
struct Wgmma;

struct Wgmma16 {
  static constexpr int K = 16;
  template <int KEYS, int DV>
  using Values = Panels<u16, KEYS, DV>;
  template <class Tile>
  using ValueOperand = DownColumns<Tile>;
};

template <>
struct Wgmma<Bfloat16> : Wgmma16 {
  template <int R>
  DEVICE static void qk(float (&d)[R], u64 a, u64 b, bool keep) {
    ptx::wgmma_bf16<0, 0>(d, a, b, keep);
  }
  template <int R>
  DEVICE static void pv(float (&d)[R], const u32 (&a)[4], u64 b, bool keep) {
    ptx::wgmma_bf16<1>(d, a, b, keep);
  }
  // Both in shared memory; K runs down the rows of a tile where its DOWN is 1.
  template <int A_DOWN, int B_DOWN, int R>
  DEVICE static void multiply(float (&d)[R], u64 a, u64 b, bool keep) {
    ptx::wgmma_bf16<A_DOWN, B_DOWN>(d, a, b, keep);
  }
};

template <>
struct Wgmma<Float16> : Wgmma16 {
  template <int R>
  DEVICE static void qk(float (&d)[R], u64 a, u64 b, bool keep) {
    ptx::wgmma_f16<0, 0>(d, a, b, keep);
  }
  template <int R>
  DEVICE static void pv(float (&d)[R], const u32 (&a)[4], u64 b, bool keep) {
    ptx::wgmma_f16<1>(d, a, b, keep);
  }
  // Both in shared memory; K runs down the rows of a tile where its DOWN is 1.
  template <int A_DOWN, int B_DOWN, int R>
  DEVICE static void multiply(float (&d)[R], u64 a, u64 b, bool keep) {
    ptx::wgmma_f16<A_DOWN, B_DOWN>(d, a, b, keep);
  }
};

// 64 rows of a product in the registers of a warpgroup; each warp has sixteen rows, each thread parts of two.
template <int N>
struct Accumulator {
  float x[N / 2];

  // f(value, row, column): row 0 or 1 of this thread's, column from the accumulator's first column (lane 0's share);
  // in columns [first, first + columns), multiples of 8.
  template <class F>
  DEVICE void each(F f, int first = 0, int columns = N) {
#pragma unroll
    for (int i = first / 2; i < (first + columns) / 2; ++i) f(x[i], i / 2 % 2, i / 4 * 8 + i % 2);
  }

  // f(even, odd, row, column) of neighbours in a row, likewise.
  template <class F>
  DEVICE void each_pair(F f, int first = 0, int columns = N) {
#pragma unroll
    for (int i = first / 2; i < (first + columns) / 2; i += 2) f(x[i], x[i + 1], i / 2 % 2, i / 4 * 8);
  }

  DEVICE void zero() {
    each([](float &value, int, int) { value = 0.0f; });
  }

  // Within the warp's sixteen rows, and within the accumulator.
  DEVICE static int row(int index, u32 lane) { return index * 8 + static_cast<int>(lane / 4); }
  DEVICE static int column(int index, u32 lane) { return index + static_cast<int>(lane % 4 * 2); }
};

// The A operand of the second product: weights in registers, whose layout as an accumulator is that of the operand.
template <class T, int N>
struct Weights {
  u32 a[N / 16][4];

  // The N columns from `first` on.
  template <int COLUMNS>
  DEVICE void pack(const Accumulator<COLUMNS> &p, int first = 0) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) a[i / 4][i % 4] = T::pair(p.x[first / 2 + 2 * i], p.x[first / 2 + 2 * i + 1]);
  }
};

// S = Q K^T: 64 rows of Q against a tile of keys, both named by their shared address.
template <class T, class Queries, class Keys, int D, int N>
DEVICE void gemm_qk(Accumulator<N> &s, u32 q, u32 k) {
  const u32 rows = AlongRows<Queries>::low(q), columns = AlongRows<Keys>::low(k);
  s.each([](float &value, int, int) { ptx::undefined(value); });
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < D / Wgmma<T>::K; ++step)
    Wgmma<T>::qk(s.x, descriptor(rows + AlongRows<Queries>::advance(step)),
                 descriptor(columns + AlongRows<Keys>::advance(step)), step > 0);
}

// O += P V, or O = P V.
template <class T, class Values, int N, int DV>
DEVICE void gemm_pv(Accumulator<DV> &o, const Weights<T, N> &p, u32 v, bool keep = true) {
  using Operand = typename Wgmma<T>::template ValueOperand<Values>;
  const u32 columns = Operand::low(v);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < N / Wgmma<T>::K; ++step)
    Wgmma<T>::pv(o.x, p.a[step], descriptor(columns + Operand::advance(step), Operand::HIGH), step > 0 || keep);
}

// D = A B, where the K terms of both run down the rows of tiles: A is 64 columns of one, B is N columns of the other.
template <class T, class Left, class Right, int K, int N>
DEVICE void gemm_down(Accumulator<N> &d, u32 left, u32 right) {
  const u32 a = DownColumns<Left>::low(left), b = DownColumns<Right>::low(right);
  d.each([](float &value, int, int) { ptx::undefined(value); });
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < K / Wgmma<T>::K; ++step)
    Wgmma<T>::template multiply<1, 1>(d.x, descriptor(a + DownColumns<Left>::advance(step)),
                                      descriptor(b + DownColumns<Right>::advance(step)), step > 0);
}

// D += A B, where K runs along the rows of A, 64 rows of a tile, and down those of B.
template <class T, class Left, class Right, int K, int N>
DEVICE void gemm_along_down(Accumulator<N> &d, u32 left, u32 right) {
  const u32 a = AlongRows<Left>::low(left), b = DownColumns<Right>::low(right);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < K / Wgmma<T>::K; ++step)
    Wgmma<T>::template multiply<0, 1>(d.x, descriptor(a + AlongRows<Left>::advance(step)),
                                      descriptor(b + DownColumns<Right>::advance(step)), true);
}
