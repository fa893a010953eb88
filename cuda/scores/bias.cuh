// An array that is added to the scores, in fp32.
#pragma once
#include "scores/score.cuh"
#include "tile/pairs.cuh"
#include "tile/types.cuh"

template <class T>
struct Bias {
  static constexpr bool IDENTITY = false;
  using Params = Pairs<typename T::Storage>::Params;

  Pairs<typename T::Storage> bias;

  DEVICE Bias(const Params &p, int batch, int head, int len_q, int len_k) : bias(p, batch, head, len_q, len_k) {}
  DEVICE float apply(float score, int q, int k) const { return score + T::single(bias.at(q, k)); }
};
