// A consumer warpgroup of attention_fwd_sm90: 64 rows of each tile, from the scores to the output.
#pragma once
#include "ptx/bulk.cuh"
#include "ptx/group.cuh"
#include "roles/forward_scores_sm90.cuh"
#include "tile/output.cuh"

namespace forward {

// A consumer warpgroup, as one of its four warps.
struct Consumer : Weigher {
  Cursor<Q_BUFFERS> q;
  Cursor<V_STAGES> v;
  Weights<T, BLOCK_K> weights;
  Accumulator<HEAD_DIM_V> o;
  Accumulator<PROMOTED ? HEAD_DIM_V : 8> product;  // of the last block of V, where it is not added by tensor cores
  float carry[2];                                  // what O is to be multiplied by before
  int v_owed = 0;                                  // blocks of V to pass over after that of the weights
  int q_owed = NONE;                               // buffer of Q that O is leaving through

  using Weigher::Weigher;

  DEVICE u32 v_tile() const { return ptx::smem_address(shared.v[0].data) + v.slot * Values::BYTES; }

  DEVICE void release_q(u32 slot) {
    if (ptx::lane() == 0) ptx::mbarrier_arrive(ptx::smem_address(&shared.q_ring[group].empty[slot]));
  }
  // 8 bits: a vote on the weights takes part for the compiler, which else takes them only when the next product has
  // ended.
  DEVICE void release_k(float sum = 0.0f) {
    const bool odd =
        FP8 && CONSUMERS == 2 && ptx::any(sum == -static_cast<float>(p.heads_q));  // never, and only we know
    if (ptx::lane() == 0 && !odd) ptx::mbarrier_arrive(k.empty(shared.k_ring));
    k.advance();
  }
  DEVICE void release_v() {
    if (ptx::lane() == 0) ptx::mbarrier_arrive(v.empty(shared.v_ring));
    v.advance();
  }

  // Each key block is issued by the groups in turn, so that one weighs while the other multiplies; 8 bits, which take
  // longer to weigh than to multiply, are weighed in turn. A turn is a barrier of the group whose turn it is and of the
  // one before, which arrives.
  DEVICE void await_turn() const {
    if constexpr (Config::TURNS) ptx::named_barrier_sync(FIRST_TURN + group, 256);
  }
  DEVICE void hand_over() const {
    if constexpr (Config::TURNS) ptx::named_barrier_arrive(FIRST_TURN + (group + 1) % CONSUMERS, 256);
  }

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
  DEVICE void pass_v() {
    for (; v_owed > 0; --v_owed) {
      v.wait_full(shared.v_ring);
      ptx::warp_barrier();
      release_v();
    }
  }

  // Clears the rows of Q from `rows` on, which are another sequence's or nobody's: those that share a warp with them
  // would else see by their votes what lies there.
  DEVICE void clear_q(u32 slot, int rows) {
    ptx::warp_barrier();  // lane 0 has seen the O that left through the buffer leave it
    clear_rows(shared.q[slot][group], max(rows, warp * 16), warp * 16 + 16, ptx::lane());
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(FIRST_CLEARED + group, 128);
  }

  // Gives the buffer that O was leaving through back, once it has left.
  DEVICE void settle_q() {
    if (q_owed == NONE) return;
    if (ptx::lane() == 0) ptx::bulk_wait_read<0>();
    release_q(q_owed);
    q_owed = NONE;
  }

  template <class Params>
  DEVICE static void rescale(const Params &dropout, float (&inverse)[2]) {
    if constexpr (Dropout::DROPS) inverse[0] *= dropout.rescale, inverse[1] *= dropout.rescale;
  }

  // What the tensor cores add to.
  DEVICE auto &target() {
    if constexpr (PROMOTED) {
      return product;
    } else {
      return o;
    }
  }

  // Issue S = Q K^T of the next block of K, and O += P V, or the product alone, of the next block of V.
  DEVICE void issue_qk(u32 slot) {
    k.wait_full(shared.k_ring);
    gemm_qk<T, Queries, Keys, HEAD_DIM>(s, q_tile(slot), k_tile());
  }
  DEVICE void issue_pv() {
    v.wait_full(shared.v_ring);
    gemm_pv<T, Values>(target(), weights, v_tile(), !PROMOTED);
  }

  // Issues both, each in a group of its own, as this group's turn.
  DEVICE void issue_both(u32 slot) {
    if constexpr (!FP8) await_turn();
    issue_qk(slot);
    ptx::wgmma_commit();
    issue_pv();
    ptx::wgmma_commit();
    if constexpr (!FP8) hand_over();
  }

  // Of 8 bits: columns whose weights are taken while the product of the block before goes on. The others' fill the time
  // in which O is made ready; those that may be dropped are all taken at once. In turns that product has ended before.
  static constexpr int EARLY = Dropout::DROPS ? BLOCK_K : Config::TURNS ? 0 : BLOCK_K * 3 / 4 / 16 * 16;
  static constexpr bool AT_ONCE = Score::IDENTITY && !Dropout::DROPS;  // else ptxas serialises the products

  // When the product of the block before has ended: O as the weights now are.
  DEVICE void follow() {
    if constexpr (FP8) {
      softmax.template weigh<EARLY, BLOCK_K>(s, c());
      softmax.join();
    }
    if constexpr (PROMOTED) {
      promote();
      carry[0] = softmax.shrink[0], carry[1] = softmax.shrink[1];
    } else if (softmax.moved) {
      o.each([&](float &value, int r, int) { value *= softmax.shrink[r]; });
    }
  }
  DEVICE void promote() {
    if constexpr (PROMOTED) {
#pragma unroll
      for (int i = 0; i < HEAD_DIM_V / 2; ++i) o.x[i] = o.x[i] * carry[i / 2 % 2] + product.x[i];
    }
  }

  // Between two tiles: the last product of the one before, whose O is stored, and the first key block of the next,
  // which runs from `row` of Q and begins at `key`; or one of the two alone.
  DEVICE void change(bool ends, const Tile &before, u32 slot_before, bool begins, const Tile &here,
                     const Modifiers &modifiers, int row, u32 slot, int key, bool only) {
    if (ends && begins) {
      issue_both(slot);
      ptx::wgmma_wait<1>();
    } else if (begins) {
      if constexpr (!FP8) await_turn();
      issue_qk(slot);
      ptx::wgmma_commit();
      if constexpr (!FP8) hand_over();
      ptx::wgmma_wait<0>();
    } else {
      issue_pv();
      ptx::wgmma_commit();
    }
    float inverse[2], lse[2];
    softmax.finish(c(), Sink(p.sink, (ends ? before : here).head), inverse, lse);
    rescale(p.dropout, inverse);
    softmax.reset();
    if (begins) {
      if constexpr (FP8) scale = here.scale;
      quickly = true;
      modify_all(modifiers.score, here, row, slot, key);
      release_k();
      if (!STAGED && only) release_q(slot);
      if (!whole(here, modifiers.mask, row, key)) hide(here, modifiers.mask, row, key);
      if constexpr (FP8) {
        await_turn();
        softmax.template raise<AT_ONCE>(s, c());
        softmax.template weigh<0, BLOCK_K>(s, c());
        softmax.join();
        hand_over();
      } else {
        softmax.meet(s, c());
      }
      drop(modifiers.dropout, here, row, key);
    }
    ptx::wgmma_wait<0>();
    weights.pack(s);
    if (ends) {
      promote();
      release_v();
      store(before, slot_before, inverse, lse);
    }
    pass_v();
    o.zero();
    carry[0] = carry[1] = 1.0f;
    float mark = 0.0f;
    ptx::pin(mark);  // else the compiler makes the zeros elsewhere, and moves registers to make up for it
  }

  // Another key block, while the weights of the one before are multiplied.
  template <bool MASKED>
  DEVICE void step(const Tile &here, const Modifiers &modifiers, int row, u32 slot, int key, bool final) {
    const Score &modifier = modifiers.score;
    bool dropped = false;
    issue_both(slot);
    if constexpr (FP8 || MASKED) {
      ptx::wgmma_wait<1>();
      modify_all(modifier, here, row, slot, key);
      if constexpr (MASKED) hide(here, modifiers.mask, row, key);
      if constexpr (FP8) {  // whose weights have no room for a guess
        await_turn();
        softmax.template raise<AT_ONCE>(s, c());
        softmax.template weigh<0, EARLY>(s, c());
        if constexpr (!PROMOTED) softmax.vote();
      } else {
        softmax.meet(s, c());
      }
    } else {
      Quick quick = foresee(modifier, row, key);
      Draws draws;
      draw_all(modifiers.dropout, row, key, draws);
      ptx::wgmma_wait<1>();
      const bool guessed = guess(quick, modifier, here, row, slot, key);
      if (!guessed) softmax.meet(s, c());
      if (DRAWN && guessed) drop_all(modifiers.dropout, draws), dropped = true;
    }
    if (!dropped) drop(modifiers.dropout, here, row, key);
    release_k(FP8 ? softmax.part[0] + softmax.part[1] : 0.0f);
    if (!STAGED && final) release_q(slot);
    ptx::wgmma_wait<0>();
    release_v();
    follow();
    weights.pack(s);
    if constexpr (FP8) hand_over();
  }

  // Normalises and writes this warp's rows of O, and of LSE.
  DEVICE void store(const Tile &at, u32 slot, const float (&inverse)[2], const float (&lse)[2]) {
    const u32 lane = ptx::lane();
    const int row = at.row + group * 64 + warp * 16;
    const float scale_v = FP8 ? at.scale_v : 1.0f;
    o.each([&](float &value, int r, int) { value = value * inverse[r] * scale_v; });
    if constexpr (VARIES) {
      o.each([&](float &value, int r, int) {
        if (row + o.row(r, lane) >= len_q(p, at)) value = 0.0f;  // whatever Q holds there
      });
    }
    if constexpr (STAGED) q_owed = slot;
    if (STAGED && (!PACKED || row + 16 <= extent(p, at))) {
      using Staged = Panels<Element, 64, HEAD_DIM_V>;
      const u32 tile = q_tile(slot);
      stage<Output, Staged>(o, tile, warp, lane);
      ptx::fence_proxy_async();
      ptx::warp_barrier();
      if (lane == 0) {
#pragma unroll
        for (int panel = 0; panel < Staged::COUNT; ++panel)
          ptx::tma_store_4d(p.o, tile + panel * Staged::PANEL + warp * 16 * 128, panel * Staged::WIDTH,
                            first_q(p, at) + row, at.head, batch_of(at));
        ptx::bulk_commit();
      }
    } else {
      store_rows<Output>(o, out_row(at, row), p.o_row, extent(p, at) - row, p.head_dim_v, lane);
    }
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

  // A tile of which this group sees no key: zeros, and the sink or -inf.
  DEVICE void see_nothing(const Tile &at, u32 slot, int blocks) {
    const int begin = at.row + group * 64 + warp * 16, end = min(begin + 16, extent(p, at));
    const Sink sink(p.sink, at.head);
    const u32 lane = ptx::lane();
    release_q(slot);
    if constexpr (PROMOTED && !PACKED) {  // whose registers do not suffice for the addresses of rows
      o.zero();
      store(at, slot, {0.0f, 0.0f}, {sink.logit, sink.logit});
    } else {
      const bool some_taken = taken(at, begin, end);
#pragma unroll 1
      for (int row = begin; row < end; ++row) {
        if (some_taken && taken(at, row, row + 1)) continue;
        const int column = 8 * static_cast<int>(lane);
        if (column < p.head_dim_v) *reinterpret_cast<Chunk *>(out_row(at, row) + column) = {};
        if (p.lse && lane == 0) store_lse(at, row, sink.logit);
      }
    }
    for (; blocks > 0; --blocks) {
      pass_k(1);
      v_owed = 1;
      pass_v();
    }
  }

  template <class S>
  DEVICE decltype(auto) modifiers_of(S &shared, const Tile &tile, u32 number) const {
    if constexpr (PLAIN) {
      return Modifiers(p, tile);
    } else {
      return (shared.kept.modifiers[number % TILES]);
    }
  }

  DEVICE void run() {
    if (group == CONSUMERS - 1) hand_over();  // the first turn
    bool pending = false;                     // weights and O of the tile before are in registers
    u32 slot_before = 0;
    for (u32 number = 0;; ++number) {
      settle_q();
      if constexpr (NUMBERED) q = Cursor<Q_BUFFERS>(number);
      q.wait_full(shared.q_ring[group]);
      const u32 slot = q.slot;
      q.advance();
      const Tile &before = shared.tile[(number + TILES - 1) % TILES], &here = shared.tile[number % TILES];
      const int row = ptx::uniform(here.row) + group * 64;
      const bool none = here.row == NONE;
      const auto &modifiers = modifiers_of(shared, here, number);
      const Mask &mask = modifiers.mask;
      int last = -1, first = 0;
      if (here.last >= here.first) walk_of(p, here, mask, row, 64, last, first);
      const bool nothing = last < first;
      if (VARIES && !nothing && row + 64 > len_q(p, here)) clear_q(slot, len_q(p, here) - row);
      const int late = (here.last - last) / BLOCK_K;  // blocks that only groups below see
      for (bool begun = false; !begun;) {
        // The V that ends must not be in the way of a K that is passed over.
        const bool begins = !nothing && !(pending && v_owed + late > V_STAGES);
        if (begins) pass_k(late), v_owed += late;
        if (pending || begins)
          change(pending, before, slot_before, begins, here, modifiers, row, slot, last, last == first);
        pending = false;
        begun = begins || nothing;
      }
      if (none) break;
      if (nothing) {
        settle_q();
        see_nothing(here, slot, (here.last - here.first) / BLOCK_K + 1);
        continue;
      }
      int key = last - BLOCK_K;
      while (key >= first) {
        for (; key >= first && !whole(here, mask, row, key); key -= BLOCK_K)
          step<true>(here, modifiers, row, slot, key, key == first);
        settle_q();
        for (; key >= first && whole(here, mask, row, key); key -= BLOCK_K)
          step<false>(here, modifiers, row, slot, key, key == first);
      }
      v_owed = (first - here.first) / BLOCK_K;  // blocks that only groups above see
      pass_k(v_owed);
      pending = true;
      slot_before = slot;
    }
    if (group == 0) await_turn();  // the last one, which nobody takes
    if (ptx::lane() == 0) ptx::bulk_wait_read<0>();
  }
};

}  // namespace forward
