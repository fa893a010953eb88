// The online softmax in base 2 of the rows of a warpgroup's scores, with a reference that lags behind the maximum.
//
// Any reference m gives the same softmax as the maximum does, as long as no weight 2^(c s - m) overflows. So the
// maximum is looked for in some key blocks only (`meet`), and in the others (`guess`) the weights are taken against the
// reference that is there: if a sum of them is out of LIMIT, the block has to be met after all, from its scores. After
// "Online normalizer calculation for softmax" (Milakov and Gimelshein 2018), with the lazy rescaling of
// FlashAttention-4.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/warp.cuh"
#include "tile/warpgroup.cuh"

// What the sums of a guess may reach: of fp32's range O needs the rest for its values, fp16 weights have less.
template <class T>
constexpr float LIMIT = 65536.0f;
template <>
constexpr float LIMIT<Float16> = 8192.0f;

// The weight of a score at the reference is 2^OFFSET: 8-bit floats have room above 1, and less below than they need.
// They have none for a guess, and a reference that is the maximum gives the largest weights exactly.
template <class T>
constexpr float OFFSET = sizeof(typename T::Storage) == 1 ? 8.0f : 0.0f;

template <class T>
struct LazySoftmax {
  static constexpr float FUSED_LIMIT = 1024.0f;  // a larger reference loses bits of 1 in one fused multiply-add

  float m[2], l[2];  // m: the reference as a score; l: this lane's share of the sum
  float shrink[2];   // what the last key block made of the weights before it
  bool moved;        // some shrink of the warp is not 1: O has to be multiplied by it
  bool settled;      // every row of the warp has a reference that guesses may use
  float part[2];     // 8 bits: sums of this block's weights, as far as they are taken
  bool apart;        // 8 bits: of this block S - m is taken first
  bool positive;     // 8 bits: no m of the warp is negative

  DEVICE void reset() {
    m[0] = m[1] = -INFINITE;
    l[0] = l[1] = 0.0f;
    positive = false;
  }

  // S becomes P = 2^(c (S - m)), with m moved to the maximum.
  template <int N>
  DEVICE void meet(Accumulator<N> &s, float c) {
    float top[2] = {-INFINITE, -INFINITE};
    s.each([&](float &score, int r, int) { top[r] = fmaxf(top[r], score); });
    float base[2];
    bool fused = true, sound = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(top[r], ptx::shfl_xor(top[r], 1));
      top[r] = fmaxf(top[r], ptx::shfl_xor(top[r], 2));
      const float before = m[r];
      m[r] = before == -INFINITE || (top[r] - before) * c > 0.0f ? top[r] : before;
      base[r] = m[r] == -INFINITE ? 0.0f : m[r];  // -inf minus -inf would be NaN
      shrink[r] = before == m[r] ? 1.0f : ptx::ex2((before - m[r]) * c);
      l[r] *= shrink[r];
      fused = fused && fabsf(base[r] * c) <= FUSED_LIMIT;
      sound = sound && m[r] != -INFINITE;
    }
    float mc[2] = {base[0] * c - OFFSET<T>, base[1] * c - OFFSET<T>}, factor = c;
    if (ptx::any(!fused)) {
      s.each([&](float &score, int r, int) { score = (score - base[r]) * c; });
      mc[0] = mc[1] = -OFFSET<T>, factor = 1.0f;
    }
    float sum[2];
    weigh(s, factor, mc, sum);
    l[0] += sum[0], l[1] += sum[1];
    settled = !ptx::any(!fused || !sound);
    // The sums take part for the compiler, which else takes the weights only when the next product has ended.
    moved = ptx::any(shrink[0] != 1.0f || shrink[1] != 1.0f || !(sum[0] + sum[1] < INFINITE));
  }

  // S becomes P against the reference that is there; false, for the whole warp, when the weights are of no use.
  template <class Quick, int N>
  DEVICE bool guess(Accumulator<N> &s, float c, Quick &quick) {
    const float base[2] = {quick.base(0) - m[0] * c, quick.base(1) - m[1] * c};
    float chain[2][2] = {};
    moved = false;
    s.each_pair([&](float &even, float &odd, int r, int column) {
      float shift[2] = {base[r], base[r]};
      quick.shift(shift, r, column);
      float gain[2];
      quick.gains(even, odd, gain);
      float &sum = chain[r][column / 8 % 2];
      sum += even = ptx::ex2(ptx::fma(even, gain[0], shift[0]));
      sum += odd = ptx::ex2(ptx::fma(odd, gain[1], shift[1]));
    });
    const float sum[2] = {chain[0][0] + chain[0][1], chain[1][0] + chain[1][1]};
    if (ptx::any(!(sum[0] < LIMIT<T>) || !(sum[1] < LIMIT<T>) || !quick.holds())) return false;
    l[0] += sum[0], l[1] += sum[1];
    return true;
  }

  // For weights of 8 bits a block is met in parts: `raise`, `weigh` for all columns, `join`. This moves m to the
  // maximum. The exponent is one multiply-add while m is small: its rounding would else show in the largest weights,
  // which are exact, and their sum. Where it is not, S - m is taken first.
  template <int N>
  DEVICE void raise(Accumulator<N> &s, float c) {
    float top[2];
    if (positive) {
      // Of 0 and other numbers the greatest has the greatest bits, read as an integer, and the greatest of three
      // integers is one instruction.
      int chain[2][2] = {};
      s.each_pair([&](float &even, float &odd, int r, int column) {
        int &most = chain[r][column / 8 % 2];
        most = max(max(most, ptx::integer(even)), ptx::integer(odd));
      });
#pragma unroll
      for (int r = 0; r < 2; ++r) top[r] = fmaxf(m[r], ptx::bits_float(max(chain[r][0], chain[r][1])));
    } else {
      float chain[2][2];  // in two chains, as sums are
      s.each([&](float &score, int r, int column) {
        float &most = chain[r][column / 8 % 2];
        most = column < 16 && column % 2 == 0 ? score : fmaxf(most, score);
      });
#pragma unroll
      for (int r = 0; r < 2; ++r) top[r] = fmaxf(m[r], fmaxf(chain[r][0], chain[r][1]));
      positive = !ptx::any((ptx::integer(top[0]) | ptx::integer(top[1])) < 0);  // m only grows
    }
    // Where it holds for each lane, it does for the row: a vote need not wait for the row's maximum.
    apart = ptx::any(!(fabsf(top[0] * c) <= FUSED_LIMIT) || !(fabsf(top[1] * c) <= FUSED_LIMIT));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(top[r], ptx::shfl_xor(top[r], 1));
      const float most = fmaxf(top[r], ptx::shfl_xor(top[r], 2)), before = m[r];
      m[r] = fmaxf(most, -LARGEST);  // -inf minus -inf would be NaN
      shrink[r] = ptx::ex2((before - m[r]) * c);
      part[r] = 0.0f;
    }
    if (apart) s.each([&](float &score, int r, int) { score -= m[r]; });
  }

  // P = 2^(c (S - m)) in columns [FIRST, END).
  template <int FIRST, int END, int N>
  DEVICE void weigh(Accumulator<N> &s, float c) {
    float lift[2], chain[2][2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) lift[r] = apart ? OFFSET<T> : ptx::fma(-m[r], c, OFFSET<T>);
    s.each(
        [&](float &score, int r, int column) {
          score = ptx::ex2(ptx::fma(score, c, lift[r]));
          float &sum = chain[r][column / 8 % 2];
          sum = column < FIRST + 16 && column % 2 == 0 ? score : sum + score;
        },
        FIRST, END - FIRST);
    part[0] += chain[0][0] + chain[0][1], part[1] += chain[1][0] + chain[1][1];
  }

  DEVICE void join() {
#pragma unroll
    for (int r = 0; r < 2; ++r) l[r] = l[r] * shrink[r] + part[r];
  }

  // What O is to be multiplied by, 1 / l, or 0 for a row without keys, and the natural-log LSE, -inf for it. A sink
  // joins l and the LSE.
  template <class Sink>
  DEVICE void finish(float c, const Sink &sink, float (&inverse)[2], float (&lse)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l[r] += ptx::shfl_xor(l[r], 1);
      l[r] += ptx::shfl_xor(l[r], 2);
      inverse[r] = l[r] == 0.0f ? 0.0f : 1.0f / l[r];
      lse[r] = l[r] == 0.0f ? -INFINITE : m[r] * LN_2 * c + LN_2 * (ptx::lg2(l[r]) - OFFSET<T>);
      if constexpr (Sink::PRESENT) sink.join(inverse[r], lse[r]);
    }
  }

 private:
  // P = 2^(c S - mc), and this lane's sums of it, each in two chains.
  template <int N>
  DEVICE static void weigh(Accumulator<N> &s, float c, const float (&mc)[2], float (&sum)[2]) {
    float chain[2][2] = {};
    s.each([&](float &score, int r, int column) {
      chain[r][column / 8 % 2] += score = ptx::ex2(ptx::fma(score, c, -mc[r]));
    });
    sum[0] = chain[0][0] + chain[0][1], sum[1] = chain[1][0] + chain[1][1];
  }
};
