// An array that is added to the scores, in fp32.
#pragma once
#include "ptx/global.cuh"
#include "scores/score.cuh"
#include "tile/pairs.cuh"
#include "tile/types.cuh"

template <int BYTES>
struct WordOf;
template <>
struct WordOf<2> {
  using Type = u16;
};
template <>
struct WordOf<4> {
  using Type = u32;
};
template <>
struct WordOf<8> {
  using Type = u64;
};

// READ elements of a row are read at a time, 1 or 2: rows are contiguous, and of pairs, so that all may be read. 0: the
// elements of a row are anywhere.
template <class T, int READ>
struct Bias {
  using Element = T::Storage;
  static constexpr int WORDS = (sizeof(Element) + 3) / 4;  // registers of one
  static constexpr bool IDENTITY = false, QUICK = READ == 2 && sizeof(Element) == 2, SHIFTS = true;
  static constexpr int LOADED = READ == 2 ? sizeof(Element) / 2 : 2 * (READ == 1 ? WORDS : WORDS + 2);
  using Params = Pairs<Element>::Params;

  Pairs<Element> bias;

  DEVICE Bias(const Params &p, int batch, int head, int len_q, int len_k) : bias(p, batch, head, len_q, len_k) {}

  DEVICE void apply(float &even, float &odd, int q, int k, int column) const {
    if constexpr (READ == 0) {
      even += T::single(bias.at(q, k + column));
      odd += T::single(bias.at(q, k + column + 1));
    } else {
      const int room = bias.last_k - k;
      const Element *from = bias.of(q) + k + column;
      if constexpr (READ == 1) {
        even += single(read<Bits>(from, column <= room));
        odd += single(read<Bits>(from + 1, column < room));
      } else {
        const auto both = read<Both>(from, column <= room);
        even += single(both);
        odd += single(both >> 8 * sizeof(Bits));
      }
    }
  }

  DEVICE float differentiate(float &score, int q, int k) const {
    score += T::single(bias.at(q, k));
    return 1.0f;
  }

  // Read before the scores are there.
  template <int KEYS>
  struct Quick {
    u32 pairs[KEYS / 4];
    float factor, unit;

    Quick() = default;
    DEVICE Quick(const Bias &bias, const Params &, const BlockOfScores &block)
        : factor(block.factor), unit(block.unit) {
      const int room = bias.bias.last_k - block.k;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Element *from = bias.bias.of(block.q + 8 * r) + block.k;
#pragma unroll
        for (int column = 0; column < KEYS; column += 8)
          pairs[column / 4 + r] = read<Both>(from + column, column <= room);
      }
    }
    DEVICE bool applies() const { return true; }
    DEVICE void gains(float, float, float (&gain)[2]) { gain[0] = gain[1] = factor; }
    DEVICE float base(int) const { return 0.0f; }
    DEVICE void shift(float (&x)[2], int r, int column) const {
      const u32 pair = pairs[column / 4 + r];
      x[0] += unit * single(pair), x[1] += unit * single(pair >> 16);
    }
    DEVICE bool holds() const { return true; }
  };

 private:
  using Bits = WordOf<sizeof(Element)>::Type;
  using Both = WordOf<(READ == 2 ? 2 : 1) * sizeof(Element)>::Type;

  template <class Word>
  DEVICE static Word read(const Element *from, bool there) {
    return ptx::load_if(there, reinterpret_cast<const Word *>(from));
  }
  DEVICE static float single(u64 low) { return T::single(__builtin_bit_cast(Element, static_cast<Bits>(low))); }
};
