// The band around the diagonal: query i sees key j iff i + d - left <= j <= i + d + right, with d = len_k - len_q when
// the diagonal ends in the bottom-right corner, else 0. Full, causal and sliding-window attention are bands; a side
// that HAS_LEFT or HAS_RIGHT switches off is unbounded.
#pragma once
#include "masks/mask.cuh"

template <bool HAS_LEFT, bool HAS_RIGHT>
struct Band {
  static constexpr bool INTERVALS = true;

  struct alignas(8) Params {
    int left, right;   // inclusive; may be negative
    int bottom_right;  // 1: d = len_k - len_q, 0: d = 0
    int unused;
  };

  int len_q, len_k;
  int lower, upper;  // query i sees the keys [i + lower, i + upper]

  DEVICE Band(const Params &p, int, int, int len_q, int len_k) : len_q(len_q), len_k(len_k) {
    const i64 diagonal = p.bottom_right ? static_cast<i64>(len_k) - len_q : 0;
    lower = within(diagonal - p.left);
    upper = within(diagonal + p.right);
  }

  DEVICE Range keys(int q, int q_end) const {
    const int begin = HAS_LEFT ? q + lower : 0;
    const int end = HAS_RIGHT ? q_end + upper : len_k;  // the last query sees up to (q_end - 1) + upper
    return {begin < 0 ? 0 : begin, end < len_k ? end : len_k};
  }

  DEVICE Range queries(int k, int k_end) const {
    const int begin = HAS_RIGHT ? k - upper : 0;
    const int end = HAS_LEFT ? k_end - lower : len_q;
    return {begin < 0 ? 0 : begin, end < len_q ? end : len_q};
  }

  DEVICE bool whole(int q, int q_end, int k, int k_end) const {
    return (!HAS_LEFT || k >= q_end - 1 + lower) && (!HAS_RIGHT || k_end - 1 <= q + upper);
  }

  DEVICE bool keep(int q, int k) const { return (!HAS_LEFT || k >= q + lower) & (!HAS_RIGHT || k <= q + upper); }

 private:
  // A shift beyond [-len_q, len_k] hides or shows the same keys as the nearest one within, and sums with it cannot
  // overflow.
  DEVICE int within(i64 shift) const {
    const i64 raised = shift < -len_q ? -len_q : shift;
    return static_cast<int>(raised > len_k ? len_k : raised);
  }
};

template <bool HAS_LEFT, bool HAS_RIGHT>
constexpr int BOUNDS<Band<HAS_LEFT, HAS_RIGHT>> = HAS_LEFT + HAS_RIGHT;
template <bool HAS_RIGHT>
constexpr bool LOWER_BOUND<Band<true, HAS_RIGHT>> = true;
