// What a score modifier is: it maps scores, in units of the natural logarithm, to other ones. Queries and keys are
// positions within their sequences; tiles reach beyond the lengths, and what is computed there is not used. A policy is
// built from (Params, batch, head, len_q, len_k), with the lengths in use. It takes two scores of a query at a time,
// those of the keys k + column, which is even, and k + column + 1: k is the same for all scores of a thread in a row of
// a tile, and column a constant when loops are unrolled. The backward pass takes one score at a time, for its tiles are
// transposed, and the derivative of what becomes of it.
//
// A policy that is QUICK says besides what becomes of the scores of a block of keys by one multiply-add, for a softmax
// that takes many scores at a time: gain(score) score + shift, in units that its user chooses. It may hold for some
// blocks only (`applies`, known before) and for some scores only (`holds`, known after all gains were asked for); the
// others are modified by `apply`.
#pragma once
#include "device.cuh"

// A thread's scores of a block of keys: its rows are q and q + 8, its columns k, k + 1, k + 8, k + 9 and so on.
struct BlockOfScores {
  int row, row_end, key, key_end;  // of all threads that decide together
  int q, k;
  float factor;  // softmax_scale, times unit
  float unit;    // of modified scores: 1 natural, log2(e) base 2
};

template <class Score>
concept ScorePolicy = requires(const Score &score, float &x, int i) {
  typename Score::Params;  // what the host passes: plain data of whole 8-byte words
  Score(typename Score::Params{}, i, i, i, i);
  bool(Score::IDENTITY);                // apply leaves scores as they are
  int(Score::LOADED);                   // registers that what it loads for two scores fills
  score.apply(x, x, i, i, i);           // apply(even, odd, q, k, column)
  float(score.differentiate(x, i, i));  // differentiate(score, q, k): applies, and returns the derivative
  bool(Score::QUICK);                   // there is a Quick<KEYS>
  bool(Score::SHIFTS);                  // what it adds depends on the place alone
};

struct Identity {
  static constexpr bool IDENTITY = true, QUICK = true, SHIFTS = true;
  static constexpr int LOADED = 0;
  struct Params {
    u64 unused;
  };

  DEVICE Identity(const Params &, int, int, int, int) {}
  DEVICE void apply(float &, float &, int, int, int) const {}
  DEVICE float differentiate(float &, int, int) const { return 1.0f; }

  template <int>
  struct Quick {
    float factor;

    template <class Score>
    DEVICE Quick(const Score &, const Score::Params &, const BlockOfScores &block) : factor(block.factor) {}
    DEVICE bool applies() const { return true; }
    DEVICE void gains(float, float, float (&gain)[2]) { gain[0] = gain[1] = factor; }
    DEVICE float base(int) const { return 0.0f; }
    DEVICE void shift(float (&)[2], int, int) const {}
    DEVICE bool holds() const { return true; }
  };
};

// One after the other, the first one first.
template <class First, class... Others>
struct Chain {
  static constexpr bool IDENTITY = First::IDENTITY && Chain<Others...>::IDENTITY;
  static constexpr bool QUICK = First::QUICK && Chain<Others...>::QUICK && Chain<Others...>::SHIFTS;
  static constexpr bool SHIFTS = First::SHIFTS && Chain<Others...>::SHIFTS;
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

  template <int KEYS>
  struct Quick {
    First::template Quick<KEYS> first;
    Chain<Others...>::template Quick<KEYS> others;

    DEVICE Quick(const Chain &score, const Params &p, const BlockOfScores &block)
        : first(score.first, p.first, block), others(score.others, p.others, block) {}
    DEVICE bool applies() const { return first.applies() && others.applies(); }
    DEVICE void gains(float even, float odd, float (&gain)[2]) { first.gains(even, odd, gain); }
    DEVICE float base(int r) const { return first.base(r) + others.base(r); }
    DEVICE void shift(float (&x)[2], int r, int column) const {
      first.shift(x, r, column);
      others.shift(x, r, column);
    }
    DEVICE bool holds() const { return first.holds() && others.holds(); }
  };
};

template <class Score>
struct Chain<Score> : Score {
  using Score::Score;
};
