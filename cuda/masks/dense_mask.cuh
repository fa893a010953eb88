// An array that says for each pair whether it is kept; 0 hides.
#pragma once
#include "masks/mask.cuh"
#include "tile/pairs.cuh"

struct DenseMask {
  static constexpr bool INTERVALS = false;
  using Params = Pairs<unsigned char>::Params;

  Pairs<unsigned char> kept;
  int len_q, len_k;

  DEVICE DenseMask(const Params &p, int batch, int head, int len_q, int len_k)
      : kept(p, batch, head, len_q, len_k), len_q(len_q), len_k(len_k) {}

  DEVICE Range keys(int, int) const { return {0, len_k}; }
  DEVICE Range queries(int, int) const { return {0, len_q}; }
  DEVICE bool whole(int, int, int, int) const { return false; }
  DEVICE bool keep(int q, int k) const { return kept.at(q, k); }

  DEVICE bool whole_but_array(int, int, int, int) const { return true; }
  DEVICE const DenseMask &array() const { return *this; }

  // Whether the elements of the keys [k, k_end), which are even, may be read two at a time.
  DEVICE bool in_pairs(int k_end) const {
    const u64 steps = static_cast<u64>(kept.row) | reinterpret_cast<u64>(kept.x);
    return kept.column == 1 && steps % 2 == 0 && k_end <= kept.last_k + 1;
  }

  // The elements of a thread's pairs in a block of keys, read all at once: rows q and q + 8, columns k, k + 1, k + 8
  // and so on.
  template <int KEYS>
  struct Read {
    u32 pairs[KEYS / 4];

    Read() = default;
    DEVICE Read(const DenseMask &mask, int q, int k) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const unsigned char *from = mask.kept.of(q + 8 * r) + k;
#pragma unroll
        for (int column = 0; column < KEYS; column += 8) pairs[column / 4 + r] = two_bytes(from + column);
      }
    }
    DEVICE bool keeps(int r, int column) const {
      return (pairs[column / 8 * 2 + r] & (column % 2 ? 0xff00u : 0x00ffu)) != 0;
    }
  };
};

template <>
struct ArrayOf<DenseMask> {
  static constexpr bool EXISTS = true;
  template <int KEYS>
  using Read = DenseMask::Read<KEYS>;
};
