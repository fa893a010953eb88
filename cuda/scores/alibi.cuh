// ALiBi (Press et al. 2022): score - slope |i + d - j|, with d = len_k - len_q when the diagonal ends in the
// bottom-right corner, else 0.
#pragma once
#include "scores/score.cuh"

struct Alibi {
  static constexpr bool IDENTITY = false;
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

  DEVICE float apply(float score, int q, int k) const {
    const int distance = q + diagonal - k;
    return score - slope * static_cast<float>(distance < 0 ? -distance : distance);
  }
};
