// The mask policies of cuda/masks on the host: reads problems from standard input, answers all questions of each.
// A line is "has_left has_right left right bottom_right len_q len_k"; the answer is a line of integers: keep for every
// pair, then for every block of BLOCK x BLOCK its keys, its queries and whether it is whole.
#define DEVICE inline
#include <algorithm>
#include <cstdio>

#include "masks/band.cuh"

constexpr int BLOCK = 3;

template <class Mask>
void answer(const Mask &mask, int len_q, int len_k) {
  for (int q = 0; q < len_q; ++q)
    for (int k = 0; k < len_k; ++k) std::printf("%d ", mask.keep(q, k));
  for (int q = 0; q < len_q; q += BLOCK) {
    for (int k = 0; k < len_k; k += BLOCK) {
      const int q_end = std::min(q + BLOCK, len_q), k_end = std::min(k + BLOCK, len_k);
      const Range keys = mask.keys(q, q_end), queries = mask.queries(k, k_end);
      std::printf("%d %d %d %d ", keys.begin, keys.end, queries.begin, queries.end);
      std::printf("%d ", mask.whole(q, q_end, k, k_end));
    }
  }
  std::printf("\n");
}

template <bool HAS_LEFT, bool HAS_RIGHT>
void band(int left, int right, int bottom_right, int len_q, int len_k) {
  using Mask = Band<HAS_LEFT, HAS_RIGHT>;
  static_assert(MaskPolicy<Mask>);
  answer(Mask(typename Mask::Params{left, right, bottom_right, 0}, 0, 0, len_q, len_k), len_q, len_k);
}

int main() {
  int has_left, has_right, left, right, bottom_right, len_q, len_k;
  while (std::scanf("%d%d%d%d%d%d%d", &has_left, &has_right, &left, &right, &bottom_right, &len_q, &len_k) == 7) {
    if (has_left && has_right) band<true, true>(left, right, bottom_right, len_q, len_k);
    if (has_left && !has_right) band<true, false>(left, right, bottom_right, len_q, len_k);
    if (!has_left && has_right) band<false, true>(left, right, bottom_right, len_q, len_k);
    if (!has_left && !has_right) band<false, false>(left, right, bottom_right, len_q, len_k);
  }
}
