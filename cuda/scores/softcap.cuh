// Scores that a cap bounds: cap tanh(score / cap).
#pragma once
#include "ptx/math.cuh"
#include "scores/score.cuh"

struct Softcap {
  static constexpr bool IDENTITY = false;
  struct Params {
    float cap, inverse;
  };

  float cap, inverse;

  DEVICE Softcap(const Params &p, int, int, int, int) : cap(p.cap), inverse(p.inverse) {}

  DEVICE float apply(float score, int, int) const {
    const float x = score * inverse;
    return cap * (1.0f - 2.0f * ptx::rcp(1.0f + ptx::ex2(x * 2.885390081777927f)));
  }
};
