// The rows of a consumer of attention_fwd_sm90, and what every consumer does with them beside its products: it gives
// back what the producer has loaded, takes turns, and stores O and the LSE.
#pragma once
#include "ptx/group.cuh"
#include "roles/forward_scores_sm90.cuh"
#include "tile/output.cuh"

namespace forward {

// A consumer warpgroup's 64 rows, as one of its four warps.
struct Rows : Weigher {
  Cursor<Q_BUFFERS> q;
  Cursor<V_STAGES> v;
  Weights<T, BLOCK_K> weights;
  Accumulator<HEAD_DIM_V> o;

  using Weigher::Weigher;

  DEVICE u32 v_tile() const { return ptx::smem_address(shared.v[0].data) + v.slot * Values::BYTES; }

  DEVICE void release_q(u32 slot) {
    if (ptx::lane() == 0) ptx::mbarrier_arrive(ptx::smem_address(&shared.q_ring[group].empty[slot]));
  }
  DEVICE void release_k() {
    if (ptx::lane() == 0) ptx::mbarrier_arrive(k.empty(shared.k_ring));
    k.advance();
  }
  DEVICE void release_v() {
    if (ptx::lane() == 0) ptx::mbarrier_arrive(v.empty(shared.v_ring));
    v.advance();
  }

  // Where groups take turns, one at each key block, a turn is a barrier of the group, or warp, whose turn it is and of
  // the one before, which arrives, but not before `zero` is known.
  DEVICE void await_turn() const {
    if constexpr (Config::TURNS) ptx::named_barrier_sync(turn_of(group), TURN_THREADS);
  }
  DEVICE void hand_over(int zero = 0) const {
    if constexpr (Config::TURNS) ptx::named_barrier_arrive(turn_of((group + 1) % CONSUMERS) + zero, TURN_THREADS);
  }
  DEVICE u32 turn_of(int group) const { return FIRST_TURN + (WARPWISE ? group * 4 + warp : group); }

  // Pass over blocks that none of this group's rows sees.
  DEVICE void pass_k(int blocks) {
    for (; blocks > 0; --blocks) {
      await_turn();
      hand_over();
      k.wait_full(shared.k_ring);
      ptx::warp_barrier();  // every lane has seen the slot full, before its next phase may begin
      release_k();
    }
  }
  DEVICE void pass_v(int blocks) {
    for (; blocks > 0; --blocks) {
      v.wait_full(shared.v_ring);
      ptx::warp_barrier();
      release_v();
    }
  }
  // Of both, where neither is in the way of the other.
  DEVICE void pass(int blocks) {
    for (; blocks > 0; --blocks) pass_k(1), pass_v(1);
  }

  // Clears the rows of Q from `rows` on, which are another sequence's or nobody's: those that share a warp with them
  // would else see by their votes what lies there.
  DEVICE void clear_q(u32 slot, int rows) {
    ptx::warp_barrier();  // lane 0 has seen the O that left through the buffer leave it
    clear_rows(shared.q[slot][group], max(rows, warp * 16), warp * 16 + 16, ptx::lane());
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(FIRST_CLEARED + group, 128);
  }

  template <class Params>
  DEVICE static void rescale(const Params &dropout, float (&inverse)[2]) {
    if constexpr (Dropout::DROPS) inverse[0] *= dropout.rescale, inverse[1] *= dropout.rescale;
  }

  // Of this warp's rows, from `row` of the tile's sequence on: O as it leaves, where it goes, and the LSE. Rows that
  // are not in use are zeros, whatever Q holds there.
  DEVICE void normalise(const Tile &at, int row, const float (&inverse)[2]) {
    const u32 lane = ptx::lane();
    const float scale_v = FP8 ? at.scale_v : 1.0f;
    o.each([&](float &value, int r, int) { value = value * inverse[r] * scale_v; });
    if constexpr (VARIES) {
      o.each([&](float &value, int r, int) {
        if (row + o.row(r, lane) >= len_q(p, at)) value = 0.0f;
      });
    }
  }
  DEVICE void store_o(const Tile &at, int row) {
    store_rows<Output>(o, out_row(at, row), p.o_row, extent(p, at) - row, p.head_dim_v, ptx::lane());
  }
  DEVICE void store_lses(const Tile &at, int row, const float (&lse)[2]) {
    const u32 lane = ptx::lane();
    if (p.lse && lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) store_lse(at, row + o.row(r, lane), lse[r]);
    }
  }

  // Where a row of the output goes, and its LSE; rows beyond the length in use have no keys and no sink.
  DEVICE Output::Storage *out_row(const Tile &at, int row) const {
    return p.out + batch_of(at) * p.o_batch + at.head * p.o_head + (first_q(p, at) + row) * p.o_row;
  }
  DEVICE void store_lse(const Tile &at, int row, float lse) const {
    if (row >= extent(p, at)) return;
    float *rows = p.lse + (static_cast<i64>(batch_of(at)) * p.heads_q + at.head) * p.len_q + first_q(p, at);
    rows[row] = !VARIES || row < len_q(p, at) ? lse : -INFINITE;
  }

  // Whether rows of a tile that is no sequence's are some sequence's after all.
  DEVICE bool taken(const Tile &at, int begin, int end) const {
    const i64 first = first_q(p, at);
    return PACKED && of_none(at) && ::taken<Sequences>(p.sequences, p.batch, p.len_q, first + begin, first + end);
  }

  // The output of a tile of which this group sees no key: zeros, and the sink or -inf.
  DEVICE void store_nothing(const Tile &at) {
    const int begin = at.row + group * 64 + warp * 16, end = min(begin + 16, extent(p, at));
    const Sink sink(p.sink, at.head);
    const u32 lane = ptx::lane();
    const bool some_taken = taken(at, begin, end);
#pragma unroll 1
    for (int row = begin; row < end; ++row) {
      if (some_taken && taken(at, row, row + 1)) continue;
      const int column = 8 * static_cast<int>(lane);
      if (column < p.head_dim_v) *reinterpret_cast<Chunk *>(out_row(at, row) + column) = {};
      if (p.lse && lane == 0) store_lse(at, row, sink.logit);
    }
  }
  // A tile of which this group sees no key.
  DEVICE void see_nothing(const Tile &at, u32 slot) {
    release_q(slot);
    store_nothing(at);
    pass((at.last - at.first) / BLOCK_K + 1);
  }

  template <class S>
  DEVICE decltype(auto) modifiers_of(S &shared, const Tile &tile, u32 number) const {
    if constexpr (PLAIN) {
      return Modifiers(p, tile);
    } else {
      return (shared.kept.modifiers[number % TILES]);
    }
  }
};

}  // namespace forward
