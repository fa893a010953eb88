// Causal attention in which every query also sees the first keys: query i sees key j iff j < prefix or j <= i + d, with
// d = len_k - len_q when the diagonal ends in the bottom-right corner, else 0.
#pragma once
#include "masks/mask.cuh"
#include "tile/integers.cuh"

struct PrefixLM {
  static constexpr bool INTERVALS = true;

  struct Params {
    Integers prefix;   // [batch]
    int bottom_right;  // 1: d = len_k - len_q, 0: d = 0
    int unused;
  };

  int prefix, diagonal;
  int len_q, len_k;

  DEVICE PrefixLM(const Params &p, int batch, int, int len_q, int len_k)
      : prefix(static_cast<int>(p.prefix.clipped(batch, 0, len_k))),
        diagonal(p.bottom_right ? len_k - len_q : 0),
        len_q(len_q),
        len_k(len_k) {}

  DEVICE Range keys(int, int q_end) const {
    const int end = q_end + diagonal > prefix ? q_end + diagonal : prefix;
    return {0, end < len_k ? end : len_k};
  }

  DEVICE Range queries(int k, int) const {
    const int begin = k < prefix ? 0 : k - diagonal;
    return {begin < 0 ? 0 : begin, len_q};
  }

  DEVICE bool whole(int q, int, int, int k_end) const { return keep(q, k_end - 1); }
  DEVICE bool keep(int q, int k) const { return (k < prefix) | (k <= q + diagonal); }
};

template <>
constexpr int BOUNDS<PrefixLM> = 2;
