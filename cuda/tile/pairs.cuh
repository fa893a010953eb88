// An array with an element for every pair of a query and a key.
#pragma once
#include "ptx/global.cuh"

// The last position that may be read along an axis: tiles reach beyond the length in use, and a sequence may be longer
// than the axis of an array, `extent`, is (0: it is not).
DEVICE int last_position(int length, int extent) { return (extent && extent < length ? extent : length) - 1; }

template <class Element>
struct Pairs {
  struct Params {
    const Element *x;              // [batch, heads_q, len_q, len_k]
    i64 batch, head, row, column;  // strides in elements; 0 along an axis of one element
    int rows, columns;             // extents of the last two axes, or 0
  };

  const Element *x;  // this head's
  i64 row, column;
  int last_q, last_k;

  DEVICE Pairs(const Params &p, int batch, int head, int len_q, int len_k)
      : x(p.x + batch * p.batch + head * p.head),
        row(p.row),
        column(p.column),
        last_q(last_position(len_q, p.rows)),
        last_k(last_position(len_k, p.columns)) {}

  DEVICE const Element *of(int q) const { return x + (q < last_q ? q : last_q) * row; }
  DEVICE Element at(int q, int k) const { return of(q)[(k < last_k ? k : last_k) * column]; }
};

// Two neighbours of an array of bytes, in the low half of a word; the first is at an even address.
DEVICE u32 two_bytes(const unsigned char *from) { return ptx::load_u16(from); }
