// Where the sequences lie in the arrays, and how much of each is in use. What the arrays of lengths hold is clipped, so
// that no value of theirs leads out of the arrays of rows.
#pragma once
#include "tile/integers.cuh"

// Rows [first, first + length) are a sequence's rows in use. Those up to first + extent are its own too: their outputs
// are written, as those of rows that see no key.
struct Span {
  i64 first;
  int length, extent;
};

// Every entry of a batch has all rows of the arrays.
struct Dense {
  static constexpr bool PACKED = false;  // all sequences lie in one entry of the arrays
  static constexpr bool VARIES = false;  // lengths are read from memory
  struct Params {
    u64 unused;
  };

  DEVICE static Span queries(const Params &, int, int, int len_q) { return {0, len_q, len_q}; }
  DEVICE static Span keys(const Params &, int, int len_k) { return {0, len_k, len_k}; }
};

// An entry of a batch has the first rows of the arrays.
struct Used {
  static constexpr bool PACKED = false;
  static constexpr bool VARIES = true;
  struct Params {
    Integers q, k;  // [batch] each; all rows where null
  };

  DEVICE static Span queries(const Params &p, int b, int, int len_q) { return {0, used(p.q, b, len_q), len_q}; }
  DEVICE static Span keys(const Params &p, int b, int len_k) { return {0, used(p.k, b, len_k), len_k}; }

  DEVICE static int used(const Integers &lengths, int b, int length) {
    return lengths.x ? static_cast<int>(lengths.clipped(b, 0, length)) : length;
  }
};

// Sequences lie one after the other in arrays of `total` rows: sequence b from row cu[b] on, up to row cu[b + 1].
struct Packed {
  static constexpr bool PACKED = true;
  static constexpr bool VARIES = true;
  struct Params {
    Integers cu_q, cu_k;      // [batch + 1]
    Integers used_q, used_k;  // [batch] each; all rows where null
  };

  // Sequence `batch` are the rows before the first sequence, batch + 1 those after the last: none is in use.
  DEVICE static Span queries(const Params &p, int b, int batch, int total_q) {
    if (b < batch) return span(p.cu_q, p.used_q, b, total_q);
    const i64 first = p.cu_q.clipped(0, 0, total_q);
    if (b == batch) return {0, 0, static_cast<int>(first)};
    const i64 end = batch ? p.cu_q.clipped(batch, p.cu_q.clipped(batch - 1, 0, total_q), total_q) : first;
    return {end, 0, static_cast<int>(total_q - end)};
  }

  DEVICE static Span keys(const Params &p, int b, int total_k) { return span(p.cu_k, p.used_k, b, total_k); }

  // The same with the rows before the first sequence and after the last.
  DEVICE static Span every_keys(const Params &p, int b, int batch, int total_k) {
    if (b < batch) return keys(p, b, total_k);
    const i64 first = p.cu_k.clipped(0, 0, total_k);
    if (b == batch) return {0, 0, static_cast<int>(first)};
    const i64 end = batch ? p.cu_k.clipped(batch, p.cu_k.clipped(batch - 1, 0, total_k), total_k) : first;
    return {end, 0, static_cast<int>(total_k - end)};
  }

  DEVICE static Span span(const Integers &cu, const Integers &used, int b, int total) {
    const i64 first = cu.clipped(b, 0, total);
    const int extent = static_cast<int>(cu.clipped(b + 1, first, total) - first);
    return {first, Used::used(used, b, extent), extent};
  }
};
