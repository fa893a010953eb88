// A consumer warpgroup of attention_fwd_sm90 for 8-bit elements: 64 rows of each tile, from the scores to the output.
// Its products and weights follow one another: while it weighs, the tensor cores multiply for other consumers.
#pragma once
#include "roles/forward_rows_sm90.cuh"

namespace forward {

// Tensor cores sum 8-bit products in few bits. So the product P V of a key block stands alone, some columns of it at a
// time, and is added to O in fp32; of two consumers each multiplies a part while it adds the one before.
constexpr int PART = HEAD_DIM_V / Config::PARTS;
constexpr bool PAIRED = CONSUMERS == 2 && Config::PARTS > 1;

struct Fp8Consumer : Rows {
  Accumulator<PART> product[PAIRED ? 2 : 1];

  using Rows::Rows;

  // S = Q K^T.
  DEVICE void multiply_qk(u32 slot) {
    k.wait_full(shared.k_ring);
    gemm_qk<T, Queries, Keys, HEAD_DIM>(s, q_tile(slot), k_tile());
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    release_k();
  }

  // S becomes P, with m moved to the maximum.
  DEVICE void weigh() {
    if constexpr (Config::TURNS) {
      weigh_in_turn();
    } else {
      softmax.raise(s, c());
      softmax.template weigh<0, BLOCK_K>(s, c());
    }
    softmax.join();
  }
  // Exponentials of several groups at once slow each other down. The turn of the next begins while the last are under
  // way. Of two groups the maximum is part of the turn, of three it is not: each as it is faster.
  DEVICE void weigh_in_turn() {
    constexpr int LAST = 16;
    if constexpr (CONSUMERS == 2) await_turn();
    softmax.raise(s, c());
    if constexpr (CONSUMERS > 2) await_turn();
    softmax.template weigh<0, BLOCK_K - LAST>(s, c());
    hand_over(zero_of_sums());
    softmax.template weigh<BLOCK_K - LAST, BLOCK_K>(s, c());
  }
  // Zero, as only we know, that is there when the weights so far are: a barrier whose number it is added to has to wait
  // for them. ptxas would else come to it before it takes them.
  DEVICE int zero_of_sums() const {
    return (ptx::integer(softmax.part[0]) | ptx::integer(softmax.part[1])) & p.heads_q >> 31;
  }

  // O = shrink O + P V, part by part.
  DEVICE void multiply_pv() {
    v.wait_full(shared.v_ring);
    if (PAIRED) issue_pv(0);
#pragma unroll
    for (int part = 0; part < Config::PARTS; ++part) {
      const bool last = part + 1 == Config::PARTS;
      if (!(PAIRED && last)) issue_pv(part + PAIRED);
      if (PAIRED && !last) {
        ptx::wgmma_wait<1>();
      } else {
        ptx::wgmma_wait<0>();
      }
      if (last) release_v();
      add(part);
    }
  }
  DEVICE Accumulator<PART> &product_of(int part) { return product[PAIRED ? part % 2 : 0]; }
  DEVICE void issue_pv(int part) {
    gemm_pv<T, Values>(product_of(part), weights, v_tile() + Values::offset(part * PART, 0), false);
    ptx::wgmma_commit();
  }
  DEVICE void add(int part) {
    const float (&term)[PART / 2] = product_of(part).x;
    int i = 0;
    o.each([&](float &value, int r, int) { value = value * softmax.shrink[r] + term[i++]; }, part * PART, PART);
  }

  // A key block: its scores, their weights, and what they make of O.
  template <bool MASKED>
  DEVICE void step(const Tile &here, const Modifiers &modifiers, int row, u32 slot, int key, bool final) {
    multiply_qk(slot);
    if (final) release_q(slot);
    modify_all(modifiers.score, here, row, slot, key);
    if constexpr (MASKED) hide(here, modifiers.mask, row, key);
    weigh();
    drop(modifiers.dropout, here, row, key);
    weights.pack(s);
    multiply_pv();
  }

  DEVICE void run() {
    if (group == CONSUMERS - 1) hand_over();  // the first turn
    for (u32 number = 0;; ++number) {
      q.wait_full(shared.q_ring[group]);
      const u32 slot = q.slot;
      q.advance();
      const Tile &here = shared.tile[number % TILES];
      const int row = ptx::uniform(here.row) + group * 64;
      if (here.row == NONE) break;
      const auto &modifiers = modifiers_of(shared, here, number);
      const Mask &mask = modifiers.mask;
      int last = -1, first = 0;
      if (here.last >= here.first) walk_of(p, here, mask, row, 64, last, first);
      if (last < first) {
        see_nothing(here, slot);
        continue;
      }
      if (VARIES && row + 64 > len_q(p, here)) clear_q(slot, len_q(p, here) - row);
      pass((here.last - last) / BLOCK_K);  // blocks that only groups below see
      scale = here.scale;
      softmax.reset();
      o.zero();
      int key = last;
      while (key >= first) {
        for (; key >= first && !whole(here, mask, row, key); key -= BLOCK_K)
          step<true>(here, modifiers, row, slot, key, key == first);
        for (; key >= first && whole(here, mask, row, key); key -= BLOCK_K)
          step<false>(here, modifiers, row, slot, key, key == first);
      }
      store(here);
      pass((first - here.first) / BLOCK_K);  // blocks that only groups above see
    }
    if (group == 0) await_turn();  // the last one, which nobody takes
  }

  // Normalises and writes this warp's rows of O, and of LSE.
  DEVICE void store(const Tile &at) {
    float inverse[2], lse[2];
    softmax.finish(c(), Sink(p.sink, at.head), inverse, lse);
    rescale(p.dropout, inverse);
    const int row = at.row + group * 64 + warp * 16;
    normalise(at, row, inverse);
    store_o(at, row);
    store_lses(at, row, lse);
  }
};

}  // namespace forward
