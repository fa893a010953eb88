// The online softmax of FlashAttention (Dao et al. 2022, Algorithm 1) in base 2: P = 2^(c (S - m)), with c the scale of
// the scores times log2(e), which is > 0, a reference m near the running maximum of S for each row, and l, the sum of
// the row of P. The reference is a score, so that it is finite for every finite score. Four neighbouring lanes share a
// row.
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
  // c S - c m in one fused operation is off by half an ulp of c m. Up to here that is 2^-15, and the weight of the
  // greatest score still rounds to 1; beyond, S - m is subtracted first, so that equal scores have weight 1 whatever
  // their size, and no product overflows.
  static constexpr float FUSED_LIMIT = 1024.0f;

  float m[ROWS], l[ROWS];  // l: this lane's share of the sum
  float lost[ROWS];        // what l's additions rounded away, with opposite sign

  // Any reference is right from which no weight overflows: rows start with one that is below every finite score.
  DEVICE OnlineSoftmax(float scale, float c) : scale(scale), c(c) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) m[r] = -LARGEST, l[r] = lost[r] = 0.0f;
  }

  // Sees the scores of a key block, before weigh() is asked for their weights: moves the reference, and O with it,
  // where a score is out of reach.
  template <int N, int DV>
  DEVICE void meet(Fragment<M, N> &s, Fragment<M, DV> &o) {
    float block_max[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) block_max[r] = -INFINITE;
    s.each([&](float &score, int r, int) { block_max[r] = fmaxf(block_max[r], score); });
    bool moved = false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      block_max[r] = fmaxf(block_max[r], ptx::shfl_xor(block_max[r], 1));
      block_max[r] = fmaxf(block_max[r], ptx::shfl_xor(block_max[r], 2));
      moved |= above(block_max[r], r);
    }
    if (ptx::any(moved)) rescale(block_max, o);

    bool beyond = false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) beyond |= fabsf(ptx::mul(c, m[r])) > FUSED_LIMIT;
    unit = c;
    if (ptx::any(beyond)) {
      s.each([&](float &score, int r, int) { score -= m[r]; });
      unit = 0.0f;
    }
  }

  // P = 2^(c (S - m)) in columns [first, first + columns) of the block that was met. A NaN score is no maximum, but it
  // is in the sum.
  template <int N>
  DEVICE void weigh(Fragment<M, N> &s, int first, int columns) {
    // Computed anew for each call: the products of P and V leave no registers for it.
    const float factor = ptx::bits_float(ptx::opaque(ptx::float_bits(unit)));
    float sum[ROWS], subtrahend[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) sum[r] = 0.0f, subtrahend[r] = ptx::mul(factor, m[r]);
    s.each(
        [&](float &score, int r, int) {
          score = ptx::ex2(ptx::fma(score, c, -subtrahend[r]));
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

  // Normalises O, times a factor, and gives the natural-log LSE of each row. The sink joins the sum here, against the
  // greater of the reference and its logit. A row that saw no key has l = 0: O stays 0 and LSE is the sink's logit, or
  // -inf.
  template <class Sink, int DV>
  DEVICE void finish(Fragment<M, DV> &o, float (&lse)[ROWS], const Sink &sink, float factor) {
    float inverse[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      l[r] += ptx::shfl_xor(l[r], 1);
      l[r] += ptx::shfl_xor(l[r], 2);
      float reference = m[r] * scale, shrink = 1.0f, total = l[r];
      if constexpr (Sink::PRESENT) {
        const float above = fmaxf(reference, sink.logit);
        shrink = ptx::ex2((reference - above) * LOG2_E);
        total = total * shrink + ptx::ex2((sink.logit - above) * LOG2_E);
        reference = above;
      }
      inverse[r] = l[r] == 0.0f ? 0.0f : shrink / total * factor;
      lse[r] = reference + ptx::lg2(total) * LN_2;
      if constexpr (Sink::PRESENT) lse[r] = l[r] == 0.0f ? sink.logit : lse[r];
    }
    o.each([&](float &value, int r, int) { value *= inverse[r]; });
  }

 private:
  float scale, c;  // of the scores, and times log2(e)
  float unit;      // of the block that was met: P = 2^(c S - unit m), where unit is c, or 0 after m was subtracted

  // Whether a score is out of the reference's reach.
  DEVICE bool above(float score, int r) const { return (score - m[r]) * c > SLACK; }

  // Moves the reference of the rows whose block maximum is out of reach.
  template <int DV>
  DEVICE void rescale(const float (&block_max)[ROWS], Fragment<M, DV> &o) {
    float shrink[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const bool moves = above(block_max[r], r);
      const float before = ptx::mul(c, m[r]), after = ptx::mul(c, block_max[r]);
      const bool fused = fmaxf(fabsf(before), fabsf(after)) <= FUSED_LIMIT;
      shrink[r] = moves ? ptx::ex2(fused ? before - after : (m[r] - block_max[r]) * c) : 1.0f;
      m[r] = moves ? block_max[r] : m[r];
      l[r] *= shrink[r];
      lost[r] *= shrink[r];
    }
    o.each([&](float &value, int r, int) { value *= shrink[r]; });
  }
};
