// Where the sequences lie in the arrays, and how much of each is in use. What the arrays of lengths hold is clipped, so
// that no value of theirs leads out of the arrays of rows.
#pragma once
#include "ptx/warp.cuh"
#include "tile/integers.cuh"

// Rows [first, first + length) are a sequence's rows in use. Those up to first + extent are its own too: their outputs
// are written, as those of rows that see no key.
struct Span {
  i64 first;
  int length, extent;
};

// Every entry of a batch has all rows of the arrays. every_keys also knows of the rows that are no sequence's.
struct Dense {
  static constexpr bool PACKED = false;  // all sequences lie in one entry of the arrays
  static constexpr bool VARIES = false;  // lengths are read from memory
  struct Params {
    u64 unused;
  };

  DEVICE static Span queries(const Params &, int, int, int len_q) { return {0, len_q, len_q}; }
  DEVICE static Span keys(const Params &, int, int len_k) { return {0, len_k, len_k}; }
  DEVICE static Span every_keys(const Params &p, int b, int, int len_k) { return keys(p, b, len_k); }
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
  DEVICE static Span every_keys(const Params &p, int b, int, int len_k) { return keys(p, b, len_k); }

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

  // Sequence `batch` are the rows before the first bound, batch + 1 those after it and the last: none is in use. All
  // rows between the two are some sequence's, those of these two only where bounds fall.
  DEVICE static Span queries(const Params &p, int b, int batch, int total_q) {
    return b < batch ? span(p.cu_q, p.used_q, b, total_q) : around(p.cu_q, b, batch, total_q);
  }
  DEVICE static Span every_keys(const Params &p, int b, int batch, int total_k) {
    return b < batch ? keys(p, b, total_k) : around(p.cu_k, b, batch, total_k);
  }

  // Whether some sequence has a query from row `begin` up to `end`: one lane's share of the answer.
  DEVICE static bool meets(const Params &p, int batch, int total_q, i64 begin, i64 end, u32 lane) {
    bool met = false;
    for (int b = static_cast<int>(lane); b < batch; b += 32) {
      const i64 first = p.cu_q.clipped(b, 0, total_q), last = p.cu_q.clipped(b + 1, first, total_q);
      met = met || (first < last && first < end && last > begin);
    }
    return met;
  }

  // Whether a bound is below the one before, so that sequences may begin within or before others: one lane's share of
  // the answer.
  DEVICE static bool fall(const Integers &cu, int batch, int total, u32 lane) {
    bool falls = false;
    for (int b = static_cast<int>(lane); b < batch; b += 32)
      falls = falls || cu.clipped(b + 1, 0, total) < cu.clipped(b, 0, total);
    return falls;
  }

  DEVICE static Span keys(const Params &p, int b, int total_k) { return span(p.cu_k, p.used_k, b, total_k); }

  DEVICE static Span span(const Integers &cu, const Integers &used, int b, int total) {
    const i64 first = cu.clipped(b, 0, total);
    const int extent = static_cast<int>(cu.clipped(b + 1, first, total) - first);
    return {first, Used::used(used, b, extent), extent};
  }

  DEVICE static Span around(const Integers &cu, int b, int batch, int total) {
    const i64 first = cu.clipped(0, 0, total);
    if (b == batch) return {0, 0, static_cast<int>(first)};
    const i64 end = cu.clipped(batch, first, total);
    return {end, 0, static_cast<int>(total - end)};
  }
};

// Whether bounds of queries fall, or those of queries or keys, and whether some packed sequence has a query from row
// `begin` up to `end`: by a warp.
template <class Sequences>
DEVICE bool falls(const typename Sequences::Params &p, int batch, int total_q) {
  if constexpr (Sequences::PACKED) return ptx::any(Sequences::fall(p.cu_q, batch, total_q, ptx::lane()));
  return false;
}
template <class Sequences>
DEVICE bool falls(const typename Sequences::Params &p, int batch, int total_q, int total_k) {
  if constexpr (Sequences::PACKED) {
    if (ptx::any(Sequences::fall(p.cu_k, batch, total_k, ptx::lane()))) return true;
  }
  return falls<Sequences>(p, batch, total_q);
}
template <class Sequences>
DEVICE bool taken(const typename Sequences::Params &p, int batch, int total_q, i64 begin, i64 end) {
  if constexpr (Sequences::PACKED) return ptx::any(Sequences::meets(p, batch, total_q, begin, end, ptx::lane()));
  return false;
}
