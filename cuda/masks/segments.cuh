// Documents side by side in one sequence: query i sees key j iff both have the same id.
#pragma once
#include "masks/mask.cuh"
#include "tile/integers.cuh"
#include "tile/pairs.cuh"

struct Segments {
  struct Params {
    Integers q, k;         // [batch, len_q], [batch, len_k]
    i64 q_batch, k_batch;  // strides in elements; those of positions are the Integers'
    int rows, columns;     // extents of the positions, or 0
  };

  Integers q_ids, k_ids;  // of this batch entry
  int len_q, len_k;
  int last_q, last_k;

  DEVICE Segments(const Params &p, int batch, int, int len_q, int len_k)
      : q_ids(p.q.from(batch * p.q_batch)),
        k_ids(p.k.from(batch * p.k_batch)),
        len_q(len_q),
        len_k(len_k),
        last_q(last_position(len_q, p.rows)),
        last_k(last_position(len_k, p.columns)) {}

  DEVICE Range keys(int, int) const { return {0, len_k}; }
  DEVICE Range queries(int, int) const { return {0, len_q}; }
  DEVICE bool whole(int, int, int, int) const { return false; }

  DEVICE bool keep(int q, int k) const { return q_ids[q < last_q ? q : last_q] == k_ids[k < last_k ? k : last_k]; }
};
