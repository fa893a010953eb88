// A consumer warpgroup of attention_fwd_sm90 for 16-bit elements: 64 rows of each tile, from the scores to the output.
// The weights of a key block are multiplied while those of the next are taken.
#pragma once
#include "ptx/bulk.cuh"
#include "roles/forward_rows_sm90.cuh"

namespace forward {

struct Consumer : Rows {
  int v_owed = 0;     // blocks of V to pass over after that of the weights
  int q_owed = NONE;  // buffer of Q that O is leaving through

  using Rows::Rows;

  // Gives the buffer that O was leaving through back, once it has left.
  DEVICE void settle_q() {
    if (q_owed == NONE) return;
    if (ptx::lane() == 0) ptx::bulk_wait_read<0>();
    release_q(q_owed);
    q_owed = NONE;
  }

  // Issue S = Q K^T of the next block of K, and O += P V of the next block of V.
  DEVICE void issue_qk(u32 slot) {
    k.wait_full(shared.k_ring);
    gemm_qk<T, Queries, Keys, HEAD_DIM>(s, q_tile(slot), k_tile());
  }
  DEVICE void issue_pv() {
    v.wait_full(shared.v_ring);
    gemm_pv<T, Values>(o, weights, v_tile());
  }

  // Issues both, each in a group of its own, as this group's turn: one weighs while the other multiplies. The second
  // waits for the first to end: what there is to do `meanwhile` is done before it.
  template <class Meanwhile>
  DEVICE void issue_both(u32 slot, Meanwhile meanwhile) {
    await_turn();
    issue_qk(slot);
    ptx::wgmma_commit();
    meanwhile();
    issue_pv();
    ptx::wgmma_commit();
    hand_over();
  }
  DEVICE void issue_both(u32 slot) {
    issue_both(slot, [] {});
  }

  // Issues the scores of a block alone.
  DEVICE void issue_scores(u32 slot) {
    await_turn();
    issue_qk(slot);
    ptx::wgmma_commit();
    hand_over();
  }

  // Where two tiles' Q have room: the last product of one tile, whose O is stored, and the first key block of the next,
  // which runs from `row` of Q and begins at `key`; or one of the two alone.
  DEVICE void change(bool ends, const Tile &before, u32 slot_before, bool begins, const Tile &here,
                     const Modifiers &modifiers, int row, u32 slot, int key, bool only) {
    if (ends && begins) {
      issue_both(slot);
      ptx::wgmma_wait<1>();
    } else if (begins) {
      issue_scores(slot);
      ptx::wgmma_wait<0>();
    } else {
      issue_pv();
      ptx::wgmma_commit();
    }
    float inverse[2], lse[2];
    finish(ends ? before : here, inverse, lse);
    softmax.reset();
    if (begins) meet_first(here, modifiers, row, slot, key, only);
    ptx::wgmma_wait<0>();
    weights.pack(s);
    if (ends) {
      release_v();
      store(before, slot_before, inverse, lse);
    }
    empty();
  }

  // Where one has, the two follow each other: the next Q comes while the last product is made and O is stored.
  DEVICE void begin(const Tile &here, const Modifiers &modifiers, int row, u32 slot, int key, bool only) {
    issue_scores(slot);
    ptx::wgmma_wait<0>();
    softmax.reset();
    meet_first(here, modifiers, row, slot, key, only);
    weights.pack(s);
    empty();
  }
  DEVICE void end(const Tile &at, u32 slot) {
    issue_pv();
    ptx::wgmma_commit();
    float inverse[2], lse[2];
    finish(at, inverse, lse);
    ptx::wgmma_wait<0>();
    release_v();
    store(at, slot, inverse, lse);
    for (; v_owed > 0; --v_owed) pass_v(1);
  }

  // What O is multiplied by as it leaves, and the LSE.
  DEVICE void finish(const Tile &at, float (&inverse)[2], float (&lse)[2]) {
    softmax.finish(c(), Sink(p.sink, at.head), inverse, lse);
    rescale(p.dropout, inverse);
  }

  // The weights of a tile's first key block, of a softmax that begins anew.
  DEVICE void meet_first(const Tile &here, const Modifiers &modifiers, int row, u32 slot, int key, bool only) {
    quickly = true;
    modify_all(modifiers.score, here, row, slot, key);
    release_k();
    if (!STAGED && only) release_q(slot);
    if (READS || !whole(here, modifiers.mask, row, key)) hide(here, modifiers.mask, row, key);
    softmax.meet(s, c());
    drop(modifiers.dropout, here, row, key);
  }

  // O begins at zero, after the blocks of V that are to be passed over.
  DEVICE void empty() {
    for (; v_owed > 0; --v_owed) pass_v(1);
    o.zero();
    float mark = 0.0f;
    ptx::pin(mark);  // else the compiler makes the zeros elsewhere, and moves registers to make up for it
  }

  // Another key block, while the weights of the one before are multiplied.
  template <bool MASKED, class Ahead>
  DEVICE void step(const Tile &here, const Modifiers &modifiers, Ahead &ahead, int row, u32 slot, int key, bool final) {
    bool drawn = false;  // which weights are dropped
    Draws draws;
    if constexpr (MASKED) {
      issue_both(slot);
      ptx::wgmma_wait<1>();
      modify_all(modifiers.score, here, row, slot, key);
      hide(here, modifiers.mask, row, key);
      softmax.meet(s, c());
    } else {
      auto &&quick = known_of(ahead, modifiers, row, key);
      issue_both(slot, [&] { draw_all(modifiers.dropout, row, key, draws); });
      ptx::wgmma_wait<1>();
      if constexpr (READS) hide<BLOCK_K>(ahead.read);
      const bool guessed = guess(quick, modifiers, here, row, slot, key);
      if (!guessed) softmax.meet(s, c());
      drawn = DRAWN && guessed && seldom(modifiers.dropout);
    }
    if (!drawn) drop(modifiers.dropout, here, row, key);
    release_k();
    if (!STAGED && final) release_q(slot);
    ptx::wgmma_wait<0>();
    release_v();
    if (softmax.moved) o.each([&](float &value, int r, int) { value *= softmax.shrink[r]; });
    weights.pack(s);
    if (drawn) drop_pairs(draws);
    if constexpr (!MASKED) look_ahead(ahead, modifiers, row, key - BLOCK_K);
  }

  DEVICE void drop_pairs(const Draws &draws) {
#pragma unroll
    for (int i = 0; i < (DRAWN ? BLOCK_K / 4 : 0); ++i) weights.a[i / 4][i % 4] &= ~draws.dropped[i / 4][i % 4];
  }

  // Normalises and writes this warp's rows of O, and of LSE.
  DEVICE void store(const Tile &at, u32 slot, const float (&inverse)[2], const float (&lse)[2]) {
    const u32 lane = ptx::lane();
    const int row = at.row + group * 64 + warp * 16;
    normalise(at, row, inverse);
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
      store_o(at, row);
    }
    store_lses(at, row, lse);
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
      const auto pass_late = [&] { pass_k(late), v_owed += late; };
      if constexpr (Q_BUFFERS > 1) {
        for (bool begun = false; !begun;) {
          // The V that ends must not be in the way of a K that is passed over.
          const bool begins = !nothing && !(pending && v_owed + late > V_STAGES);
          if (begins) pass_late();
          if (pending || begins)
            change(pending, before, slot_before, begins, here, modifiers, row, slot, last, last == first);
          pending = false;
          begun = begins || nothing;
        }
      } else if (!nothing) {
        pass_late();
        begin(here, modifiers, row, slot, last, last == first);
      }
      if (none) break;
      if (nothing) {
        settle_q();
        see_nothing(here, slot);
        continue;
      }
      Ahead ahead;
      int key = last - BLOCK_K;
      while (key >= first) {
        for (; key >= first && !whole(here, mask, row, key); key -= BLOCK_K)
          step<true>(here, modifiers, ahead, row, slot, key, key == first);
        settle_q();
        if (!READS || key >= first) look_ahead(ahead, modifiers, row, key);  // a bias's rows are there for any key
        for (; key >= first && whole(here, mask, row, key); key -= BLOCK_K)
          step<false>(here, modifiers, ahead, row, slot, key, key == first);
      }
      v_owed = (first - here.first) / BLOCK_K;  // blocks that only groups above see
      pass_k(v_owed);
      if constexpr (Q_BUFFERS > 1) {
        pending = true;
        slot_before = slot;
      } else {
        end(here, slot);
      }
    }
    if (group == 0) await_turn();  // the last one, which nobody takes
    if (ptx::lane() == 0) ptx::bulk_wait_read<0>();
  }
};

}  // namespace forward
