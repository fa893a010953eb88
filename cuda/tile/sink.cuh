// A learnable sink: a logit for each head of queries that joins the denominator of the softmax, and nothing else.
#pragma once
#include "ptx/math.cuh"
#include "tile/types.cuh"

struct NoSink {
  static constexpr bool PRESENT = false;
  struct Params {
    u64 unused;
  };
  static constexpr float logit = -INFINITE;

  DEVICE NoSink(const Params &, int) {}
  DEVICE void join(float &, float &) const {}
};

template <class T>
struct Sink {
  static constexpr bool PRESENT = true;
  struct Params {
    const typename T::Storage *x;  // [heads_q]
    i64 head;                      // stride in elements
  };

  float logit;  // in the units of scores; -inf is none

  DEVICE Sink(const Params &p, int head) : logit(T::single(p.x[head * p.head])) {}

  // Takes a row's 1 / l and LSE from the sum of its weights to that sum and the sink; those of a row without keys are 0
  // and -inf.
  DEVICE void join(float &inverse, float &lse) const {
    const float greater = ptx::max_nan(lse, logit);
    if (greater == -INFINITE) return;
    const float lesser = ptx::ex2((ptx::min_nan(lse, logit) - greater) * LOG2_E), sum = 1.0f + lesser;
    inverse *= (lse < logit ? lesser : 1.0f) / sum;
    lse = greater + ptx::lg2(sum) * LN_2;
  }
};
