// Where a block's tile of the output is, and the rows of Q, K and V that it needs.
#pragma once
#include "tile/sequences.cuh"
#include "tile/work.cuh"

struct Place {
  int batch, head;  // the batch entry, or the sequence
  int q_begin;      // the tile's first row in the sequence
  Span q, k;        // of the sequence
};

// Sequences that are packed have more blocks than tiles: the q_begin of some is beyond their rows. Before the first and
// after the last sequence there may be rows of none. Each has as many slots for tiles as its rows may need wherever
// they begin, so that no lengths are summed. The first slot is that of the rows before the first sequence.
template <int BLOCK_Q>
DEVICE Work packed_slot(u32 block, int batch, int len_q, int heads, int group) {
  return {block, len_q / BLOCK_Q + batch + 2, heads, 1, group};
}

// Where bounds fall some tiles are in no block's place.
template <class Sequences, int BLOCK_Q>
DEVICE Place place_of(u32 block, const typename Sequences::Params &p, int batch, int len_q, int len_k, int heads,
                      int group) {
  if constexpr (Sequences::PACKED) {
    const Work work = packed_slot<BLOCK_Q>(block, batch, len_q, heads, group);
    const auto slot = [&](int i) {
      return static_cast<int>(i == 0 ? 0 : p.cu_q.clipped(i - 1, 0, len_q) / BLOCK_Q) + i;
    };
    const int i = last_at_most(work.tile, batch + 2, slot, ptx::lane());
    const int b = i == 0 ? batch : i <= batch ? i - 1 : i;
    const Span keys = b < batch ? Sequences::keys(p, b, len_k) : Span{0, 0, 0};
    return {b, work.head, (work.tile - slot(i)) * BLOCK_Q, Sequences::queries(p, b, batch, len_q), keys};
  } else {
    const Work work(block, (len_q + BLOCK_Q - 1) / BLOCK_Q, heads, batch, group);
    const int b = work.batch;
    return {b, work.head, work.tile * BLOCK_Q, Sequences::queries(p, b, batch, len_q), Sequences::keys(p, b, len_k)};
  }
}

// The element at which a span begins in an array of such strides.
template <class Sequences>
DEVICE i64 start_of(const Span &span, int batch, i64 batch_stride, i64 row_stride) {
  return (Sequences::PACKED ? 0 : batch * batch_stride) + span.first * row_stride;
}
