// What a score modifier is: it maps a score, in units of the natural logarithm, to another one. Queries and keys are
// positions within their sequences; tiles reach beyond the lengths, and what is computed there is not used. A policy is
// built from (Params, batch, head, len_q, len_k), with the lengths in use.
#pragma once
#include "device.cuh"

template <class Score>
concept ScorePolicy = requires(const Score &score, float x, int i) {
  typename Score::Params;  // what the host passes: plain data of whole 8-byte words
  Score(typename Score::Params{}, i, i, i, i);
  bool(Score::IDENTITY);        // apply returns the score as it is
  float(score.apply(x, i, i));  // apply(score, q, k)
};

struct Identity {
  static constexpr bool IDENTITY = true;
  struct Params {
    u64 unused;
  };

  DEVICE Identity(const Params &, int, int, int, int) {}
  DEVICE float apply(float score, int, int) const { return score; }
};

// One after the other, the first one first.
template <class First, class... Others>
struct Chain {
  static constexpr bool IDENTITY = First::IDENTITY && Chain<Others...>::IDENTITY;
  struct Params {
    First::Params first;
    Chain<Others...>::Params others;
  };

  First first;
  Chain<Others...> others;

  DEVICE Chain(const Params &p, int batch, int head, int len_q, int len_k)
      : first(p.first, batch, head, len_q, len_k), others(p.others, batch, head, len_q, len_k) {}

  DEVICE float apply(float score, int q, int k) const { return others.apply(first.apply(score, q, k), q, k); }
};

template <class Score>
struct Chain<Score> : Score {
  using Score::Score;
};
