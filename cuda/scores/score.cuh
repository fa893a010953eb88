// What a score modifier is: it maps scores, in units of the natural logarithm, to other ones. Queries and keys are
// positions within their sequences; tiles reach beyond the lengths, and what is computed there is not used. A policy is
// built from (Params, batch, head, len_q, len_k), with the lengths in use. It takes two scores of a query at a time,
// those of the keys k + column, which is even, and k + column + 1: k is the same for all scores of a thread in a row of
// a tile, and column a constant when loops are unrolled. The backward pass takes one score at a time, for its tiles are
// transposed, and the derivative of what becomes of it.
#pragma once
#include "device.cuh"

template <class Score>
concept ScorePolicy = requires(const Score &score, float &x, int i) {
  typename Score::Params;  // what the host passes: plain data of whole 8-byte words
  Score(typename Score::Params{}, i, i, i, i);
  bool(Score::IDENTITY);                // apply leaves scores as they are
  int(Score::LOADED);                   // registers that what it loads for two scores fills
  score.apply(x, x, i, i, i);           // apply(even, odd, q, k, column)
  float(score.differentiate(x, i, i));  // differentiate(score, q, k): applies, and returns the derivative
};

struct Identity {
  static constexpr bool IDENTITY = true;
  static constexpr int LOADED = 0;
  struct Params {
    u64 unused;
  };

  DEVICE Identity(const Params &, int, int, int, int) {}
  DEVICE void apply(float &, float &, int, int, int) const {}
  DEVICE float differentiate(float &, int, int) const { return 1.0f; }
};

// One after the other, the first one first.
template <class First, class... Others>
struct Chain {
  static constexpr bool IDENTITY = First::IDENTITY && Chain<Others...>::IDENTITY;
  static constexpr int LOADED = First::LOADED + Chain<Others...>::LOADED;
  struct Params {
    First::Params first;
    Chain<Others...>::Params others;
  };

  First first;
  Chain<Others...> others;

  DEVICE Chain(const Params &p, int batch, int head, int len_q, int len_k)
      : first(p.first, batch, head, len_q, len_k), others(p.others, batch, head, len_q, len_k) {}

  DEVICE void apply(float &even, float &odd, int q, int k, int column) const {
    first.apply(even, odd, q, k, column);
    others.apply(even, odd, q, k, column);
  }

  DEVICE float differentiate(float &score, int q, int k) const {
    const float inner = first.differentiate(score, q, k);
    return others.differentiate(score, q, k) * inner;
  }
};

template <class Score>
struct Chain<Score> : Score {
  using Score::Score;
};
