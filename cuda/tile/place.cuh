// Where a block's tile of the output is, and the rows of Q, K and V that it needs.
#pragma once
#include "tile/sequences.cuh"
#include "tile/work.cuh"

struct Place {
  int batch, head;  // the batch entry, or the sequence
  int q_begin;      // the tile's first row in the sequence
  Span q, k;        // of the sequence
};

// Sequences that are packed have more blocks than tiles: the first row of some is beyond their rows. Before the first
// and after the last sequence there may be rows of none. Each has as many slots for tiles as its rows may need wherever
// they begin, so that no lengths are summed. The first slot is that of the rows before the first sequence.
template <int BLOCK>
DEVICE Work packed_slot(u32 block, int batch, int total, int heads, int group) {
  return {block, total / BLOCK + batch + 2, heads, 1, group};
}

// The sequence that a slot is one of, and the row of it at which the slot's tile begins. By a full warp.
struct Slot {
  int b, begin;
};
template <int BLOCK>
DEVICE Slot packed_tile(int at, const Integers &cu, int batch, int total) {
  const auto first = [&](int i) { return static_cast<int>(i == 0 ? 0 : cu.clipped(i - 1, 0, total) / BLOCK) + i; };
  const int i = last_at_most(at, batch + 2, first, ptx::lane());
  return {i == 0 ? batch : i <= batch ? i - 1 : i, (at - first(i)) * BLOCK};
}

// Where bounds fall some tiles are in no block's place.
template <class Sequences, int BLOCK_Q>
DEVICE Place place_of(u32 block, const typename Sequences::Params &p, int batch, int len_q, int len_k, int heads,
                      int group) {
  if constexpr (Sequences::PACKED) {
    const Work work = packed_slot<BLOCK_Q>(block, batch, len_q, heads, group);
    const auto [b, begin] = packed_tile<BLOCK_Q>(work.tile, p.cu_q, batch, len_q);
    const Span keys = b < batch ? Sequences::keys(p, b, len_k) : Span{0, 0, 0};
    return {b, work.head, begin, Sequences::queries(p, b, batch, len_q), keys};
  } else {
    const Work work(block, (len_q + BLOCK_Q - 1) / BLOCK_Q, heads, batch, group);
    const int b = work.batch;
    return {b, work.head, work.tile * BLOCK_Q, Sequences::queries(p, b, batch, len_q), Sequences::keys(p, b, len_k)};
  }
}

// Where a block's tile of dK and dV is, likewise; the first tiles come first, which under a causal mask are the
// longest.
struct KeyPlace {
  int batch, head;  // of keys
  int k_begin;      // the tile's first row in the sequence
  Span q, k;
};

template <class Sequences, int BLOCK_K>
DEVICE KeyPlace key_place_of(u32 block, const typename Sequences::Params &p, int batch, int len_q, int len_k, int heads,
                             int group) {
  if constexpr (Sequences::PACKED) {
    const Work work = packed_slot<BLOCK_K>(block, batch, len_k, heads, group);
    const auto [b, begin] = packed_tile<BLOCK_K>(len_k / BLOCK_K + batch + 1 - work.tile, p.cu_k, batch, len_k);
    const Span queries = b < batch ? Sequences::queries(p, b, batch, len_q) : Span{0, 0, 0};
    return {b, work.head, begin, queries, Sequences::every_keys(p, b, batch, len_k)};
  } else {
    const int tiles = (len_k + BLOCK_K - 1) / BLOCK_K;
    const Work work(block, tiles, heads, batch, group);
    const int b = work.batch, begin = (tiles - 1 - work.tile) * BLOCK_K;
    return {b, work.head, begin, Sequences::queries(p, b, batch, len_q), Sequences::every_keys(p, b, batch, len_k)};
  }
}

// The element at which a span begins in an array of such strides.
template <class Sequences>
DEVICE i64 start_of(const Span &span, int batch, i64 batch_stride, i64 row_stride) {
  return (Sequences::PACKED ? 0 : batch * batch_stride) + span.first * row_stride;
}
