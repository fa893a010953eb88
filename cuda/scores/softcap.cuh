// Scores that a cap bounds: cap tanh(score / cap).
#pragma once
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "scores/score.cuh"

struct Softcap {
  static constexpr bool IDENTITY = false, QUICK = true, SHIFTS = false;
  static constexpr int LOADED = 0;
  struct Params {
    float cap, inverse;  // inverse = 2 / cap, a normal number for every cap
    float near[4];       // see Quick
    float reach;         // squares of scores, before the scale, up to which it does; negative where it never does
    float unused;
  };

  float limit, inverse;

  DEVICE Softcap(const Params &p, int, int, int, int) : limit(fminf(END * p.cap, 3.40282347e38f)), inverse(p.inverse) {}

  DEVICE void apply(float &even, float &odd, int, int, int) const { even = capped(even), odd = capped(odd); }

  // The derivative of cap tanh(score / cap) is 1 - tanh^2.
  DEVICE float differentiate(float &score, int, int) const {
    score = capped(score);
    const float tanh = 0.5f * (score * inverse);
    return 1.0f - tanh * tanh;
  }

  // Scores in the middle of the cap's range, of the shape c0 s + c1 s^3 + c2 s^5 + c3 s^7, all of them in units of
  // log 2.
  template <int>
  struct Quick {
    const float (&c)[4];
    float reach, unit;
    int most = 0;  // of the squares of scores, which compare as integers do: the greatest of three is one instruction

    DEVICE Quick(const Softcap &, const Params &p, const BlockOfScores &block)
        : c(p.near), reach(p.reach), unit(block.unit) {}
    DEVICE bool applies() const { return reach >= 0.0f; }
    DEVICE void gains(float even, float odd, float (&gain)[2]) {
      const float squares[2] = {even * even, odd * odd};
      most = max(max(most, ptx::integer(squares[0])), ptx::integer(squares[1]));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float y = squares[i], log2 = ((c[3] * y + c[2]) * y + c[1]) * y + c[0];
        gain[i] = unit == LOG2_E ? log2 : log2 * (unit * LN_2);
      }
    }
    DEVICE float base(int) const { return 0.0f; }
    DEVICE void shift(float (&)[2], int, int) const {}
    DEVICE bool holds() const { return ptx::bits_float(most) <= reach; }
  };

 private:
  DEVICE float capped(float score) const {
    const float s = ptx::min_nan(ptx::max_nan(score, -limit), limit), x = s * inverse, y = x * x;
    const float p = polynomial(P, y), q = polynomial(Q, y);
    return s * (p * ptx::rcp(q));
  }

  // tanh(x) / x = P(4 x^2) / Q(4 x^2) up to END, off by 2^-25; beyond, tanh is 1 to 2^-24. One rcp and FMAs of positive
  // terms: 15 instructions, and a third of the time on the special-function unit that 1 - 2 / (e^2x + 1) takes.
  static constexpr float END = 9.01f;
  static constexpr float P[5] = {2308611.5f, 77225.2031f, 504.26004f, 0.742949784f, 0.000120271834f};
  static constexpr float Q[5] = {2308611.5f, 269609.406f, 3733.31714f, 11.8473721f, 0.00700634811f};

  DEVICE static float polynomial(const float (&c)[5], float y) {
    return (((c[4] * y + c[3]) * y + c[2]) * y + c[1]) * y + c[0];
  }
};
