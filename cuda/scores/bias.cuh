// An array that is added to the scores, in fp32.
#pragma once
#include "scores/score.cuh"
#include "tile/types.cuh"

template <class T>
struct Bias {
  static constexpr bool IDENTITY = false;
  using Element = T::Storage;
  struct Params {
    const Element *x;              // [batch, heads_q, len_q, len_k]
    i64 batch, head, row, column;  // strides in elements; 0 along an axis of one element
    int rows, columns;             // of the array, which a sequence may exceed; 0: it does not
  };

  const Element *x;  // this head's
  i64 row, column;
  int last_q, last_k;

  DEVICE Bias(const Params &p, int batch, int head, int len_q, int len_k)
      : x(p.x + batch * p.batch + head * p.head),
        row(p.row),
        column(p.column),
        last_q((p.rows && p.rows < len_q ? p.rows : len_q) - 1),
        last_k((p.columns && p.columns < len_k ? p.columns : len_k) - 1) {}

  // Tiles reach beyond the lengths, the array does not.
  DEVICE float apply(float score, int q, int k) const {
    return score + T::single(x[(q < last_q ? q : last_q) * row + (k < last_k ? k : last_k) * column]);
  }
};
