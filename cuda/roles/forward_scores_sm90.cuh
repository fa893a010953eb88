// The scores of a consumer of attention_fwd_sm90, and what acts on them until they are weights.
#pragma once
#include "ptx/warp.cuh"
#include "roles/forward_sm90.cuh"
#include "tile/lazy_softmax.cuh"
#include "tile/rescore.cuh"

namespace forward {

// Scores that a policy modifies quickly (scores/score.cuh) are modified with all columns at once. Of a bias there are
// registers for it in two consumers alone.
constexpr bool QUICK = Score::QUICK && !Score::IDENTITY && !FP8 && HEAD_DIM <= 128 && HEAD_DIM_V <= 128 &&
                       (CONSUMERS == 2 || Score::LOADED == 0);
template <bool>
struct QuickScore {
  using Type = Identity::Quick<BLOCK_K>;
};
template <>
struct QuickScore<true> {
  using Type = Score::Quick<BLOCK_K>;
};
using Quick = QuickScore<QUICK>::Type;

// What a mask's array holds for a block is read with all columns at once, and scores are guessed.
constexpr bool READS = ArrayOf<Mask>::EXISTS && Score::IDENTITY && !Dropout::DROPS && !FP8 && CONSUMERS == 2 &&
                       HEAD_DIM <= 128 && HEAD_DIM_V <= 128 && !PACKED;
template <int KEYS>
using ReadOf = ArrayOf<Mask>::template Read<KEYS>;
using Read = ReadOf<BLOCK_K>;
constexpr int READ = BLOCK_K % 64 ? BLOCK_K % 32 ? 16 : 32 : 64;  // columns of it that are hidden together elsewhere

// What is loaded of a block before its scores are there is loaded one block ahead: loads that follow the products of a
// block, whose issue waits for the first of them, are waited for, and ptxas moves those there that stand before.
template <class Quick>
constexpr bool KEPT = requires { Quick(); };
constexpr bool LOADS = QUICK && Score::LOADED > 0 && KEPT<Quick>;
template <bool LOADS, bool READS>
struct AheadOf {};
template <>
struct AheadOf<true, false> {
  Quick quick;
};
template <>
struct AheadOf<false, true> {
  Read read;
};
using Ahead = AheadOf<LOADS, READS>;

// Random bits of a block are drawn while its scores are multiplied, where registers hold them.
constexpr bool DRAWN = Dropout::DROPS && !FP8 && CONSUMERS == 2 && HEAD_DIM <= 128 && HEAD_DIM_V <= 128;
struct Draws {
  u32 dropped[DRAWN ? BLOCK_K / 16 : 1][4];  // ones where the pairs of Weights are
};

// Where ptxas else spills: a consumer reads its first row anew for each key block, and takes the place of Q from the
// tile's number.
constexpr bool READ_ANEW = Dropout::DROPS && !FP8 && BOUNDS<Mask> == 1 && (HEAD_DIM > 192 || HEAD_DIM < HEAD_DIM_V);
constexpr bool NUMBERED = READS || (Dropout::DROPS && HEAD_DIM < HEAD_DIM_V && BOUNDS<Mask> > 0);

// A consumer's 64 rows of scores, as one of its four warps.
struct Weigher {
  const Params &p;
  Shared &shared;
  const int group;  // of CONSUMERS
  const int warp;   // of the warpgroup
  Cursor<K_STAGES> k;
  Accumulator<BLOCK_K> s;
  LazySoftmax<T> softmax;
  float scale;          // of the scores of the tile, where tiles differ
  bool quickly = true;  // scores of the tile have been such that it holds

  DEVICE Weigher(const Params &p, Shared &shared, int group, int warp)
      : p(p), shared(shared), group(group), warp(warp) {}

  DEVICE u32 q_tile(u32 slot) const {
    return ptx::smem_address(shared.q[0][0].data) + (slot * CONSUMERS + group) * Queries::BYTES;
  }
  DEVICE u32 k_tile() const { return ptx::smem_address(shared.k[0].data) + k.slot * Keys::BYTES; }

  // This thread's first row and column in a block at `row` and `key`.
  DEVICE int first_row(int row) const { return row + warp * 16 + s.row(0, ptx::lane()); }
  DEVICE int first_column(int key) const { return key + s.column(0, ptx::lane()); }

  template <class Mask>
  DEVICE bool whole(const Tile &at, const Mask &mask, int row, int key) const {
    if constexpr (READ_ANEW) row = at.row + group * 64;
    if constexpr (READS) {
      return mask.array().in_pairs(key + BLOCK_K) &&
             mask.whole_but_array(row, min(row + 64, len_q(p, at)), key, key + BLOCK_K);
    } else {
      return key + BLOCK_K <= len_k(p, at) && mask.whole(row, min(row + 64, len_q(p, at)), key, key + BLOCK_K);
    }
  }

  // Hides what a mask's array hides: in columns from `first` on, or all, some at a time (see modify).
  template <int KEYS>
  DEVICE void hide(const ReadOf<KEYS> &read, int first = 0) {
    if constexpr (READS)
      s.each([&](float &score, int r, int c) { score = read.keeps(r, c - first) ? score : -INFINITE; }, first, KEYS);
  }
  template <class Mask>
  DEVICE void hide_all(const Tile &at, const Mask &mask, int row, int key) {
    if constexpr (READS) {
#pragma unroll
      for (int first = 0; first < BLOCK_K; first += READ)
        if (key + first < len_k(p, at)) hide<READ>({mask.array(), first_row(row), first_column(key) + first}, first);
    }
  }

  // Hides the pairs beyond the mask or the end of the keys: scores are replaced, whatever the hidden key holds.
  template <class Mask>
  DEVICE void hide(const Tile &at, const Mask mask, int row, int key) {
    const u32 lane = ptx::lane();
    const int q = row + warp * 16, column = key + s.column(0, lane);
    bool in_pairs = false;
    if constexpr (READS) in_pairs = mask.array().in_pairs(key + BLOCK_K);
    if (in_pairs) hide_all(at, mask, row, key);
    if (intervals(mask) || in_pairs) {
      int begin[2], end[2];  // of the columns that a row sees, counted from this lane's first
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Range seen = mask.keys(q + s.row(r, lane), q + s.row(r, lane) + 1);
        begin[r] = seen.begin > 0 ? seen.begin - column : 0;  // a mask without a lower bound: nothing to compare
        end[r] = seen.end - column;
      }
      s.each([&](float &score, int r, int c) { score = (c >= begin[r]) & (c < end[r]) ? score : -INFINITE; });
    } else {
#pragma unroll
      for (int first = 0; first < BLOCK_K; first += COLUMNS)  // see modify
        if (key + first < len_k(p, at))
          s.each([&](float &score, int r,
                     int c) { score = mask.keep(q + s.row(r, lane), column + c) ? score : -INFINITE; },
                 first, COLUMNS);
      s.each([&](float &score, int, int c) { score = column + c < len_k(p, at) ? score : -INFINITE; });
    }
  }

  // Weights are 2^(c (S - m)). A scale that is not positive is applied to the scores themselves, and c is 1; one of
  // scores that are modified is too, and c leads from e to 2.
  DEVICE float factor() const { return FP8 ? scale : p.scale; }
  DEVICE bool apart() const { return !(factor() >= SMALLEST_NORMAL); }
  DEVICE float c() const { return !Score::IDENTITY ? LOG2_E : apart() ? 1.0f : factor(); }
  // Tiles of few keys are those of several modifiers, which leave less registers to what is loaded.
  static constexpr int MODIFIED = FP8 || BLOCK_K % 128 || Score::LOADED > 2 ? COLUMNS : Score::LOADED == 2 ? 32 : 64;
  DEVICE void modify(const Score modifier, const Tile &at, int row, int key) {
    if constexpr (Score::IDENTITY) {
      if (apart()) s.each([&](float &score, int, int) { score *= factor(); });
    } else {
      // Some columns at a time, which a branch keeps apart: of all at once there are more than registers.
#pragma unroll
      for (int first = 0; first < BLOCK_K; first += MODIFIED)
        if (key + first < len_k(p, at))
          s.each_pair(
              [&](float &even, float &odd, int r, int c) {
                even *= factor(), odd *= factor();
                modifier.apply(even, odd, first_row(row) + 8 * r, first_column(key), c);
              },
              first, MODIFIED);
    }
  }

  // The same of scores that are met, quickly if that holds.
  DEVICE void modify_all(const Score &modifier, const Tile &at, int row, u32 slot, int key) {
    if constexpr (QUICK && !PACKED) {
      Quick quick(modifier, p.score, block_of(1.0f, row, key));
      if (quickly && quick.applies()) {
        const float base[2] = {quick.base(0), quick.base(1)};
        s.each_pair([&](float &even, float &odd, int r, int column) {
          float shift[2] = {base[r], base[r]};
          quick.shift(shift, r, column);
          float gain[2];
          quick.gains(even, odd, gain);
          even = ptx::fma(even, gain[0], shift[0]);
          odd = ptx::fma(odd, gain[1], shift[1]);
        });
        quickly = !ptx::any(!quick.holds());
        if (quickly) return;
        rescore(slot);
      }
    }
    modify(modifier, at, row, key);
  }
  DEVICE BlockOfScores block_of(float unit, int row, int key) const {
    return {row, row + 64, key, key + BLOCK_K, first_row(row), first_column(key), QUICK ? factor() * unit : c(), unit};
  }

  // What a guess needs to know of the scores before they are there.
  DEVICE Quick foresee(const Score &modifier, int row, int key) const {
    return Quick(modifier, p.score, block_of(LOG2_E, row, key));
  }
  template <class Ahead>
  DEVICE decltype(auto) known_of(Ahead &ahead, const Modifiers &modifiers, int row, int key) const {
    if constexpr (LOADS) {
      return (ahead.quick);
    } else {
      return foresee(modifiers.score, row, key);
    }
  }
  // Loads what is loaded ahead of the block at `key`, or of the first one.
  template <class Ahead, class Modifiers>
  DEVICE void look_ahead(Ahead &ahead, const Modifiers &modifiers, int row, int key) const {
    key = max(key, 0);
    if constexpr (LOADS) ahead.quick = foresee(modifiers.score, row, key);
    if constexpr (READS) ahead.read = {modifiers.mask.array(), first_row(row), first_column(key)};
  }

  // S becomes P by a guess; else false, for the whole warp, and S is modified.
  DEVICE bool guess(Quick &quick, const Modifiers &modifiers, const Tile &at, int row, u32 slot, int key) {
    if constexpr (!QUICK) modify(modifiers.score, at, row, key);
    const bool tried = softmax.settled && quickly && quick.applies();
    if (tried) {
      if (softmax.guess(s, c(), quick)) return true;
      if constexpr (QUICK) quickly = !ptx::any(!quick.holds());
      rescore(slot);
    }
    if (QUICK || tried) modify(modifiers.score, at, row, key);
    if (tried) hide_all(at, modifiers.mask, row, key);
    return false;
  }

  // The scores of this block of K once more, for one warp.
  DEVICE void rescore(u32 slot) { ::rescore<T, Queries, Keys, HEAD_DIM>(s, q_tile(slot), k_tile(), warp, ptx::lane()); }

  // The bits of 16 columns of a block, which are eight weights of a thread: n = 0, 1, ... are its first, even columns
  // of 32, its odd ones, those of the next 32, ...
  template <class D>
  DEVICE void draw(const D &dropout, int row, int key, int n, u32 (&bits)[4]) const {
    dropout.draw(first_row(row), first_column(key) + n / 2 * 32 + n % 2, bits);
  }
  template <class D>
  DEVICE void drop(const D &dropout, int n, const u32 (&bits)[4]) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      float &weight = s.x[(n / 2 * 4 + e % 4) * 4 + e / 4 * 2 + n % 2];
      weight = dropout.keep(bits, e / 4, e % 4) ? weight : 0.0f;
    }
  }

  // Drops weights of the block.
  template <class D>
  DEVICE void drop(const D dropout, const Tile &at, int row, int key) {
    if constexpr (D::DROPS) {
#pragma unroll
      for (int n = 0; n < BLOCK_K / 16; ++n) {
        if (key + n / 2 * 32 >= len_k(p, at)) continue;  // as in modify
        u32 bits[4];
        draw(dropout, row, key, n, bits);
        drop(dropout, n, bits);
      }
    }
  }

  // Whether `draw_all` does.
  template <class D>
  DEVICE static bool seldom(const D &dropout) {
    if constexpr (D::DROPS) return dropout.seldom();
    return false;
  }

  // The same in two steps: which of the packed weights of a block are dropped, before they are there, and then they.
  template <class D>
  DEVICE void draw_all(const D &dropout, int row, int key, Draws &draws) const {
    if constexpr (DRAWN) {
#pragma unroll
      for (int n = 0; n < BLOCK_K / 16; n += 2) {
        u32 even[4], odd[4];
        draw(dropout, row, key, n, even);
        draw(dropout, row, key, n + 1, odd);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 signs[2] = {dropout.signs(even[i]), dropout.signs(odd[i])};
          u32(&pairs)[4] = draws.dropped[n + i % 2];
          // Opaque, as the compiler would else wait for the scores.
          pairs[i / 2] = ptx::opaque(ptx::permute_bytes(signs[0], signs[1], 0xdd99));
          pairs[2 + i / 2] = ptx::opaque(ptx::permute_bytes(signs[0], signs[1], 0xffbb));
        }
      }
    }
  }
};

}  // namespace forward
