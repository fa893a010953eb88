// An array that says for each pair whether it is kept.
#pragma once
#include "masks/mask.cuh"

struct DenseMask {
  struct Params {
    const unsigned char *x;        // [batch, heads_q, len_q, len_k], 0 hides
    i64 batch, head, row, column;  // strides in elements; 0 along an axis of one element
    int rows, columns;             // of the array, which a sequence may exceed; 0: it does not
  };

  const unsigned char *x;  // this head's
  i64 row, column;
  int len_q, len_k;
  int last_q, last_k;

  DEVICE DenseMask(const Params &p, int batch, int head, int len_q, int len_k)
      : x(p.x + batch * p.batch + head * p.head),
        row(p.row),
        column(p.column),
        len_q(len_q),
        len_k(len_k),
        last_q((p.rows && p.rows < len_q ? p.rows : len_q) - 1),
        last_k((p.columns && p.columns < len_k ? p.columns : len_k) - 1) {}

  DEVICE Range keys(int, int) const { return {0, len_k}; }
  DEVICE Range queries(int, int) const { return {0, len_q}; }
  DEVICE bool whole(int, int, int, int) const { return false; }

  // Tiles reach beyond the lengths, the array does not.
  DEVICE bool keep(int q, int k) const {
    return x[(q < last_q ? q : last_q) * row + (k < last_k ? k : last_k) * column];
  }
};
