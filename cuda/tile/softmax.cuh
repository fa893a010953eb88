// The online softmax of FlashAttention (Dao et al. 2022, Algorithm 1) in base 2: P = 2^(c S - m), with c = scale *
// log2(e) > 0, a reference m near the running maximum of c S for each row, and l, the sum of the row of P. Four
// neighbouring lanes share a row.
#pragma once
#include "ptx/math.cuh"
#include "ptx/warp.cuh"
#include "tile/fragment.cuh"

// COMPENSATED is for fp32: over thousands of keys plain additions would cost l several ulps, and every element of O
// with it.
template <int M, bool COMPENSATED>
struct OnlineSoftmax {
  static constexpr int ROWS = M / 8;
  // O and l are rescaled only when a score exceeds the reference by more than this: 2^8 costs no precision in floating
  // point, leaves fp16 weights far from overflow, and makes rescaling rare (FlashAttention-4's conditional rescaling).
  static constexpr float SLACK = 8.0f;
  // c S - m in one fused operation differs by half an ulp of m from the difference of the rounded products. Up to here
  // that is 2^-15, and the weight of the greatest score still rounds to 1; beyond, the products are rounded first, so
  // that equal scores have weight 1 whatever their size.
  static constexpr float FUSED_LIMIT = 1024.0f;

  float m[ROWS], l[ROWS];  // l: this lane's share of the sum
  float lost[ROWS];        // what l's additions rounded away, with opposite sign

  DEVICE void reset() {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) m[r] = -INFINITE, l[r] = lost[r] = 0.0f;
  }

  // Sees the scores of a key block, before weigh() is asked for their weights: moves the reference, and O with it,
  // where a score is out of reach.
  template <int N, int DV>
  DEVICE void meet(Fragment<M, N> &s, Fragment<M, DV> &o, float c) {
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

    bool beyond = false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      beyond |= fabsf(base(r)) > FUSED_LIMIT;
    }
    factor = c;
    if (ptx::any(beyond)) {
      s.each([&](float &score, int, int) { score = ptx::mul(score, c); });
      factor = 1.0f;
    }
  }

  // P = 2^(c S - m) in columns [first, first + columns) of the block that was met. A NaN score is no maximum, but it is
  // in the sum.
  template <int N>
  DEVICE void weigh(Fragment<M, N> &s, int first, int columns) {
    float sum[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) sum[r] = 0.0f;
    s.each(
        [&](float &score, int r, int) {
          score = ptx::ex2(ptx::fma(score, factor, -base(r)));
          sum[r] += score;
        },
        first, columns);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if constexpr (COMPENSATED) {  // Kahan's summation
        const float addend = sum[r] - lost[r], total = l[r] + addend;
        lost[r] = (total - l[r]) - addend;
        l[r] = total;
      } else {
        l[r] += sum[r];
      }
    }
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
  float factor;  // of the block that was met: P = 2^(factor S - base)

  // The row's reference; 0 for a row without keys so far, since -inf minus -inf would be NaN.
  DEVICE float base(int r) const { return m[r] == -INFINITE ? 0.0f : m[r]; }

  // Moves the reference of the rows whose block maximum is out of reach; from m = -inf at the first finite score.
  template <int DV>
  DEVICE void rescale(const float (&block_max)[ROWS], Fragment<M, DV> &o) {
    float shrink[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const bool moves = block_max[r] > m[r] + SLACK;
      shrink[r] = moves ? ptx::ex2(m[r] - block_max[r]) : 1.0f;
      m[r] = moves ? block_max[r] : m[r];
      l[r] *= shrink[r];
      lost[r] *= shrink[r];
    }
    o.each([&](float &value, int r, int) { value *= shrink[r]; });
  }
};
