// Documents side by side in one sequence: query i sees key j iff both have the same id. Ids have BYTES bytes each, of
// whatever sign: equal ones have equal bits.
#pragma once
#include "masks/mask.cuh"
#include "tile/pairs.cuh"

template <int BYTES>
struct IdOf;
template <>
struct IdOf<1> {
  using Type = unsigned char;
};
template <>
struct IdOf<2> {
  using Type = u16;
};
template <>
struct IdOf<4> {
  using Type = u32;
};
template <>
struct IdOf<8> {
  using Type = u64;
};

template <int BYTES>
struct Segments {
  static constexpr bool INTERVALS = false;
  using Id = IdOf<BYTES>::Type;

  struct Params {
    const Id *q;            // [batch, len_q]
    i64 q_batch, q_stride;  // strides in elements
    const Id *k;            // [batch, len_k]
    i64 k_batch, k_stride;
    int rows, columns;  // extents of the positions, or 0
  };

  const Id *q_ids, *k_ids;  // of this batch entry
  i64 q_stride, k_stride;
  int len_q, len_k;
  int last_q, last_k;

  DEVICE Segments(const Params &p, int batch, int, int len_q, int len_k)
      : q_ids(p.q + batch * p.q_batch),
        k_ids(p.k + batch * p.k_batch),
        q_stride(p.q_stride),
        k_stride(p.k_stride),
        len_q(len_q),
        len_k(len_k),
        last_q(last_position(len_q, p.rows)),
        last_k(last_position(len_k, p.columns)) {}

  DEVICE Range keys(int, int) const { return {0, len_k}; }
  DEVICE Range queries(int, int) const { return {0, len_q}; }
  DEVICE bool whole(int, int, int, int) const { return false; }

  DEVICE bool keep(int q, int k) const {
    return q_ids[(q < last_q ? q : last_q) * q_stride] == k_ids[(k < last_k ? k : last_k) * k_stride];
  }
};
