// The online softmax of FlashAttention (Dao et al. 2022, Algorithm 1) in base 2: P = 2^(c S - m), with c = scale *
// log2(e) > 0, a reference m near the running maximum of c S for each row, and l, the sum of the row of P. Four
// neighbouring lanes share a row.
#pragma once
#include "ptx/math.cuh"
#include "ptx/warp.cuh"
#include "tile/fragment.cuh"

constexpr float INFINITE = __builtin_bit_cast(float, 0x7f800000u);
constexpr float LN_2 = 0.6931471805599453f;

template <int M>
struct OnlineSoftmax {
  static constexpr int ROWS = M / 8;
  // O and l are rescaled only when a score exceeds the reference by more than this: 2^8 costs no precision in floating
  // point, leaves fp16 weights far from overflow, and makes rescaling rare (FlashAttention-4's conditional rescaling).
  static constexpr float SLACK = 8.0f;
  // c S - m in one fused operation differs by half an ulp of m from the difference of the rounded products: up to here
  // by no more than 2^-2. Beyond, that half ulp could be thousands, and the products are rounded first.
  static constexpr float FUSED_LIMIT = 4194304.0f;  // 2^22

  float m[ROWS], l[ROWS];  // l: this lane's share of the sum
  bool huge;               // some reference of the warp's rows is beyond FUSED_LIMIT

  DEVICE void reset() {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) m[r] = -INFINITE, l[r] = 0.0f;
    huge = false;
  }

  // Replaces the scores of a key block by their weights P, and rescales O where the reference moved.
  template <int N, int DV>
  DEVICE void update(Fragment<M, N> &s, Fragment<M, DV> &o, float c) {
    float block_max[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) block_max[r] = -INFINITE;
    s.each([&](float &score, int r, int) { block_max[r] = fmaxf(block_max[r], score); });
    bool moved = false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      block_max[r] = fmaxf(block_max[r], ptx::shfl_xor(block_max[r], 1));
      block_max[r] = ptx::mul(fmaxf(block_max[r], ptx::shfl_xor(block_max[r], 2)), c);
      moved |= block_max[r] > m[r] + SLACK;
    }
    if (ptx::any(moved)) rescale(block_max, o);

    float base[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) base[r] = m[r] == -INFINITE ? 0.0f : m[r];  // -inf minus -inf would be NaN
    if (huge) s.each([&](float &score, int, int) { score = ptx::mul(score, c); });
    const float factor = huge ? 1.0f : c;
    // P = 2^(c S - m). A NaN score is no maximum, but it is in the sum.
    s.each([&](float &score, int r, int) {
      score = ptx::ex2(ptx::fma(score, factor, -base[r]));
      l[r] += score;
    });
  }

  // Normalises O and gives the natural-log LSE of each row. A row that saw no key has l = 0: O stays 0 and LSE is -inf.
  template <int DV>
  DEVICE void finish(Fragment<M, DV> &o, float (&lse)[ROWS]) {
    float inverse[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      l[r] += ptx::shfl_xor(l[r], 1);
      l[r] += ptx::shfl_xor(l[r], 2);
      inverse[r] = l[r] == 0.0f ? 0.0f : 1.0f / l[r];
      lse[r] = (m[r] + ptx::lg2(l[r])) * LN_2;
    }
    o.each([&](float &value, int r, int) { value *= inverse[r]; });
  }

 private:
  // Moves the reference of the rows whose block maximum is out of reach; from m = -inf at the first finite score.
  template <int DV>
  DEVICE void rescale(const float (&block_max)[ROWS], Fragment<M, DV> &o) {
    float factor[ROWS];
    bool beyond = false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const bool moves = block_max[r] > m[r] + SLACK;
      factor[r] = moves ? ptx::ex2(m[r] - block_max[r]) : 1.0f;
      m[r] = moves ? block_max[r] : m[r];
      l[r] *= factor[r];
      beyond |= fabsf(m[r]) > FUSED_LIMIT && m[r] != -INFINITE;
    }
    huge = ptx::any(beyond);
    o.each([&](float &value, int r, int) { value *= factor[r]; });
  }
};
