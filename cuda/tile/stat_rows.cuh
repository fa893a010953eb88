// Rows of the scratch arrays of the backward pass: statistics of the rows of O, and the accumulator of dQ. Every
// sequence begins at a multiple of 128, so that tiles of queries are aligned and what lies beyond the last query is
// padding of the sequence's own.
#pragma once
#include "tile/sequences.cuh"
#include "tile/work.cuh"

constexpr int STAT_ROWS = 128;
constexpr int ADDED_ROWS = 16;  // share a counter of what was added to their dQ

// The LSE among the statistics is in units of log 2, P = 2^(S log2(e) - LSE), or NATURAL: as it was given, P = 2^((S -
// LSE) log2(e)). Then the weight of a key that is alone in its row is 1 whatever the LSE.
template <bool NATURAL>
constexpr float LSE_SCALE = NATURAL ? 1.0f : LOG2_E;

// The first row of packed sequence b, which begins at row `begin` of the arrays, among those of a head. Padding of a
// whole block for each sequence keeps them apart wherever they begin.
DEVICE i64 packed_stat_row(int b, i64 begin) { return (begin + i64{STAT_ROWS} * b) / STAT_ROWS * STAT_ROWS; }

// The first row of a head of a sequence; each head has `rows`.
template <class Sequences>
DEVICE i64 stat_row(const Span &q, int batch, int head, int heads, int rows) {
  if constexpr (Sequences::PACKED) return static_cast<i64>(head) * rows + packed_stat_row(batch, q.first);
  return (static_cast<i64>(batch) * heads + head) * rows;
}

// One of the blocks of STAT_ROWS that all heads have.
struct StatBlock {
  Span q;  // of the sequence
  int batch, head;
  i64 first;     // the block's first row in the sequence; rows of none may be before or beyond it
  i64 stat_row;  // and among those of all heads
};

template <class Sequences>
DEVICE StatBlock stat_block_of(u32 block, const typename Sequences::Params &p, int batch, int len_q, int heads,
                               int rows) {
  const int blocks = rows / STAT_ROWS, head = static_cast<int>(block / blocks);
  const int at = static_cast<int>(block % blocks);
  const i64 row = static_cast<i64>(at) * STAT_ROWS, stat_row = static_cast<i64>(block) * STAT_ROWS;
  if constexpr (Sequences::PACKED) {
    if (batch == 0) return {{0, 0, 0}, 0, head, row, stat_row};
    const auto first = [&](int b) { return packed_stat_row(b, p.cu_q.clipped(b, 0, len_q)); };
    const auto first_block = [&](int b) { return static_cast<int>(first(b) / STAT_ROWS); };
    const int b = last_at_most(at, batch, first_block, ptx::lane());
    return {Sequences::queries(p, b, batch, len_q), b, head, row - first(b), stat_row};
  } else {
    const int b = head / heads;
    return {Sequences::queries(p, b, batch, len_q), b, head % heads, row, stat_row};
  }
}
