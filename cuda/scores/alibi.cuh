// ALiBi (Press et al. 2022): score - slope |i + d - j|, with d = len_k - len_q when the diagonal ends in the
// bottom-right corner, else 0.
#pragma once
#include "ptx/math.cuh"
#include "scores/score.cuh"

struct Alibi {
  static constexpr bool IDENTITY = false, QUICK = true, SHIFTS = true;
  static constexpr int LOADED = 0;
  struct Params {
    const float *slopes;  // [batch, heads_q]
    i64 batch, head;      // strides in elements
    int bottom_right;     // 1: d = len_k - len_q, 0: d = 0
    int unused;
  };

  float slope;
  int diagonal;

  DEVICE Alibi(const Params &p, int batch, int head, int len_q, int len_k)
      : slope(p.slopes[batch * p.batch + head * p.head]), diagonal(p.bottom_right ? len_k - len_q : 0) {}

  DEVICE void apply(float &even, float &odd, int q, int k, int column) const {
    const float first = static_cast<float>(q + diagonal - k);  // of all columns; rounded from 2^24 on
    even -= penalty(first - static_cast<float>(column));
    odd -= penalty(first - static_cast<float>(column + 1));
  }

  DEVICE float differentiate(float &score, int q, int k) const {
    score -= penalty(static_cast<float>(q + diagonal - k));
    return 1.0f;
  }

  // On one side of the diagonal distances are differences.
  template <int>
  struct Quick {
    static constexpr float LARGEST_SLOPE = 1e28f;  // times any distance it is finite
    float factor, slope;
    int first;  // distance from the thread's first score
    bool aside;

    DEVICE Quick(const Alibi &alibi, const Params &, const BlockOfScores &block)
        : factor(block.factor), first(block.q + alibi.diagonal - block.k) {
      const bool before = block.row + alibi.diagonal >= block.key_end - 1;
      aside = (before || block.row_end - 1 + alibi.diagonal <= block.key) && fabsf(alibi.slope) <= LARGEST_SLOPE;
      slope = (before ? block.unit : -block.unit) * alibi.slope;
    }
    DEVICE bool applies() const { return aside; }
    DEVICE void gains(float, float, float (&gain)[2]) { gain[0] = gain[1] = factor; }
    DEVICE float base(int r) const { return -slope * static_cast<float>(first + 8 * r); }
    DEVICE void shift(float (&x)[2], int, int column) const {
      x[0] += slope * static_cast<float>(column), x[1] += slope * static_cast<float>(column + 1);
    }
    DEVICE bool holds() const { return true; }
  };

 private:
  // Rounded, so that the difference may be one instruction with what scales the score.
  DEVICE float penalty(float distance) const { return ptx::mul(slope, fabsf(distance)); }
};
