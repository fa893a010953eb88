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
  using Storage = T::Storage;
  struct Params {
    const typename T::Storage *x;  // [heads_q]
    i64 head;                      // stride in elements
  };

  float logit;  // in the units of scores; -inf is none

  DEVICE Sink(const Params &p, int head) : logit(T::single(p.x[head * p.head])) {}

  // A gradient of the logits, in their type.
  DEVICE static Storage narrow(float x) { return T::narrow(x); }

  // Takes a row's 1 / l and LSE from the sum of its weights to that sum and the sink. Those of a row that sees no key
  // are 0 and -inf, and whatever the sink is, it is all of that row's sum. Else a sink of NaN or +inf gives NaN.
  DEVICE void join(float &inverse, float &lse) const {
    if (inverse == 0.0f) {
      lse = logit;
      return;
    }
    const float greater = ptx::max_nan(lse, logit);
    if (greater == -INFINITE) return;
    const float own = lse < logit ? ptx::ex2((lse - logit) * LOG2_E) : 1.0f;
    const float sum = own + ptx::ex2((logit - greater) * LOG2_E);
    inverse *= own / sum;
    lse = greater + ptx::lg2(sum) * LN_2;
  }
};
