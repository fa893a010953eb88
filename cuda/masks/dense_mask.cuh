// An array that says for each pair whether it is kept; 0 hides.
#pragma once
#include "masks/mask.cuh"
#include "tile/pairs.cuh"

struct DenseMask {
  static constexpr bool INTERVALS = false;
  using Params = Pairs<unsigned char>::Params;

  Pairs<unsigned char> kept;
  int len_q, len_k;

  DEVICE DenseMask(const Params &p, int batch, int head, int len_q, int len_k)
      : kept(p, batch, head, len_q, len_k), len_q(len_q), len_k(len_k) {}

  DEVICE Range keys(int, int) const { return {0, len_k}; }
  DEVICE Range queries(int, int) const { return {0, len_q}; }
  DEVICE bool whole(int, int, int, int) const { return false; }
  DEVICE bool keep(int q, int k) const { return kept.at(q, k); }
};
