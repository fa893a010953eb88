// Which weights dropout keeps: a function of (seed, offset, batch, head, query, key) alone, so that no tile, split or
// packing can be seen in it; cupyflash/_philox.py has the definition.
#pragma once
#include "ptx/halves.cuh"
#include "tile/philox.cuh"

struct KeepAll {
  static constexpr bool DROPS = false;
  struct Params {
    u64 unused;
  };

  DEVICE KeepAll(const Params &, int, int) {}
};

struct Dropout {
  static constexpr bool DROPS = true;
  struct Params {
    const void *state;  // the random state in device memory, or null: the two numbers are here
    u64 seed, offset;
    u32 threshold;  // 1 to 65536 of the 65536 draws drop a weight
    float rescale;  // 65536 / (65536 - threshold), or 0 where none is kept
    int words;      // of the state: 2 of 64 bits, or 2 (-2) or 4 (-4) of 32 bits; seed first, low words first
    int unused;
  };

  u32 key_low, key_high;
  int head, batch;
  u32 dropped;  // the greatest draw that is dropped, shifted to the high half, all below it included
  float factor;

  DEVICE Dropout(const Params &p, int batch, int head)
      : head(head), batch(batch), dropped((p.threshold << 16) - 1), factor(p.rescale) {
    u64 seed = p.seed, offset = p.offset;
    const auto *narrow = static_cast<const u32 *>(p.state);
    if (p.state && p.words == 2) {
      const auto *wide = static_cast<const u64 *>(p.state);
      seed = wide[0], offset = wide[1];
    } else if (p.state && p.words == -2) {
      seed = narrow[0], offset = narrow[1];
    } else if (p.state) {
      seed = narrow[0] | u64{narrow[1]} << 32, offset = narrow[2] | u64{narrow[3]} << 32;
    }
    const u64 key = seed + offset * 0x9e3779b97f4a7c15u;
    key_low = static_cast<u32>(key), key_high = static_cast<u32>(key >> 32);
  }

  // The draws of the eight weights of rows q and q + 8 (q % 16 < 8) and columns k, k + 8, k + 16 and k + 24
  // (k % 32 < 8), two in a word.
  DEVICE void draw(int q, int k, u32 (&x)[4]) const {
    x[0] = (static_cast<u32>(k) >> 5 << 3) + (k & 7);
    x[1] = (static_cast<u32>(q) >> 4 << 3) + (q & 7);
    x[2] = head;
    x[3] = batch;
    philox4x32(x, key_low, key_high);
  }

  // Whether the weight of row q + 8 * half and column k + 8 * group is kept.
  DEVICE bool keep(const u32 (&x)[4], int half, int group) const {
    const u32 word = x[2 * half + group / 2];
    return (group % 2 ? word : word << 16) > dropped;
  }

  // Which two draws of a word drop a weight, in its bits 15 and 31, where at most half of all do.
  DEVICE bool seldom() const { return static_cast<int>(dropped) >= 0; }
  DEVICE u32 signs(u32 word) const {
    const u32 greatest = dropped >> 16, pair = greatest | greatest << 16;
    return ptx::add_u16x2(ptx::min_u16x2(word, pair + 0x80008000u), ~pair);
  }

  DEVICE float rescale() const { return factor; }
};
