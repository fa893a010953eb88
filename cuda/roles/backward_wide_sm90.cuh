// A consumer warpgroup of attention_bwd_sm90 for head dims above 128. Both have the same 64 keys, each has half of the
// columns of dK and dV. The first one computes P and tells it to the second, which computes dS.
#pragma once
#include "roles/backward_consumer_sm90.cuh"

namespace backward {

struct WideConsumer : Consumer {
  static constexpr int HALF = HEAD_DIM / 2, PANELS = HALF / Keys::WIDTH;  // columns, and panels of them
  Accumulator<64> s[1];                                                   // S^T, or dP^T
  Accumulator<HALF> dk, dv;
  Accumulator<64> dq;

  using Consumer::Consumer;

  // S^T = K Q^T, or dP^T = V dO^T.
  template <class Tile>
  DEVICE void issue_scores(u32 base, const Keys &keys, const Tile &queries, u32 slot) {
    gemm_qk<T, Keys, Queries, HEAD_DIM>(s[0], at(base, &keys), at(base, &queries) + slot * Queries::BYTES);
    ptx::wgmma_commit();
  }

  // Where this group's columns of a tile begin.
  DEVICE u32 half_of(u32 base, const Queries &tile, u32 slot) const {
    return at(base, &tile) + slot * Queries::BYTES + group * PANELS * Queries::PANEL;
  }

  // 64 columns of this group's part of dQ = dS K.
  DEVICE void issue_dq(u32 base, u32 slot, int panel) {
    gemm_down<T, Scores, Keys, BLOCK_K>(dq, at(base, &shared.ds) + slot * Scores::BYTES,
                                        at(base, &shared.k) + (group * PANELS + panel) * Keys::PANEL);
    ptx::wgmma_commit();
  }
  DEVICE void drain(u32 number, int panel) {
    float *target = dq_of(number) + panel * 4096 + ptx::opaque(threadIdx.x) % 128 * 4;
#pragma unroll
    for (int chunk = 0; chunk < DQ_CHUNKS; ++chunk) ptx::reduce_add(target + chunk * 512, four(dq, chunk).x);
  }

  // The panels of dQ but the first, which is on its way, and what `follows` the last; dS is read then.
  template <class Follow>
  DEVICE void finish_dq(u32 base, const Cursor<2> &ds, Follow follow) {
    shared.leave.await(number, group);
    drain(number, 0);
    static_assert(PANELS == 2, "the first and the last");
    issue_dq(base, ds.slot, 1);
    follow();
    ptx::wgmma_wait<1>();
    arrive(ds.empty(shared.ds_ring));
    drain(number, 1);
    shared.leave.end(number, group);
    ptx::wgmma_wait<0>();
  }

  // Tells P of a query block to the second group.
  DEVICE void tell(u32 number) {
    const Cursor<1> told(number);
    const u32 thread = ptx::opaque(threadIdx.x) % 128;
    told.wait_empty(shared.passed.p_ring);
#pragma unroll
    for (int n = 0; n < 8; ++n) *reinterpret_cast<Four *>(shared.passed.p[n][thread]) = four(s[0], n);
    ptx::warp_barrier();
    arrive(told.full(shared.passed.p_ring));
  }

  // dS = P (dP - delta) with the P that is told, and both as operands.
  DEVICE void differentiate(Weights<T, 64> &weights, Weights<T, 64> &slopes, u32 slot) {
    const Cursor<1> told(number);
    const u32 thread = ptx::opaque(threadIdx.x) % 128, lane = thread % 32;
    told.wait_full(shared.passed.p_ring);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const Four weight = *reinterpret_cast<const Four *>(shared.passed.p[n][thread]);
      const Pair delta = *reinterpret_cast<const Pair *>(&shared.delta[slot][s[0].column(8 * n, lane)]);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const float even = s[0].x[4 * n + i] - delta.even, odd = s[0].x[4 * n + i + 1] - delta.odd;
        weights.a[n / 2][n % 2 * 2 + i / 2] = T::pair(weight.x[i], weight.x[i + 1]);
        slopes.a[n / 2][n % 2 * 2 + i / 2] = T::pair(weight.x[i] * even, weight.x[i + 1] * odd);
      }
    }
    ptx::warp_barrier();
    arrive(told.empty(shared.passed.p_ring));
  }

  // A query block in the first group, which has its P in registers.
  template <bool LAST>
  DEVICE void weigh_step() {
    const u32 base = ptx::opaque(ptx::smem_address(&shared));
    const Cursor<STAGES> here(number), next(number + 1);
    const Cursor<2> ds(number);
    Weights<T, 64> weights;
    weights.pack(s[0]);
    here.wait_full(shared.dout_ring);
    gemm_pv<T, Queries>(dv, weights, half_of(base, shared.dout[0], here.slot));
    ptx::wgmma_commit();
    if constexpr (!LAST) {
      next.wait_full(shared.q_ring);
      issue_scores(base, shared.k, shared.q[0], next.slot);
      ptx::wgmma_wait<1>();
    }
    ds.wait_full(shared.ds_ring);
    gemm_along_down<T, Scores, Queries, BLOCK_Q>(dk, at(base, &shared.ds) + ds.slot * Scores::BYTES,
                                                 half_of(base, shared.q[0], here.slot));
    ptx::wgmma_commit();
    issue_dq(base, ds.slot, 0);
    if constexpr (!LAST) {
      ptx::wgmma_wait<2>();
      weigh(s, number + 1, next.slot);
      tell(number + 1);
    }
    ptx::wgmma_wait<0>();
    arrive(here.empty(shared.dout_ring));
    arrive(here.empty(shared.q_ring));
    finish_dq(base, ds, [] { ptx::wgmma_commit(); });
  }

  // A query block in the second group, which has its dP in registers.
  template <bool LAST>
  DEVICE void slope_step() {
    const u32 base = ptx::opaque(ptx::smem_address(&shared));
    const Cursor<STAGES> here(number), next(number + 1);
    const Cursor<2> ds(number);
    Weights<T, 64> weights, slopes[1];
    differentiate(weights, slopes[0], here.slot);
    share(base, slopes);
    gemm_pv<T, Queries>(dv, weights, half_of(base, shared.dout[0], here.slot));
    ptx::wgmma_commit();
    here.wait_full(shared.q_ring);
    gemm_pv<T, Queries>(dk, slopes[0], half_of(base, shared.q[0], here.slot));
    ptx::wgmma_commit();
    ds.wait_full(shared.ds_ring);
    issue_dq(base, ds.slot, 0);
    ptx::wgmma_wait<0>();
    arrive(here.empty(shared.dout_ring));
    arrive(here.empty(shared.q_ring));
    finish_dq(base, ds, [&] {
      if constexpr (!LAST) {
        next.wait_full(shared.dout_ring);
        issue_scores(base, shared.v, shared.dout[0], next.slot);
      } else {
        ptx::wgmma_commit();
      }
    });
  }

  // Writes this group's columns of dK and dV, through K and V.
  DEVICE void finish() {
    const u32 lane = ptx::lane(), columns = group * PANELS * Keys::PANEL;
    const int key = shared.place.key;
    dk.each([&](float &value, int, int) { value *= p.scale; });
    if (!has_box(key)) {
      store(dv, p.dv_rows, p.dv_batch, p.dv_row, p.dv_head, key, group * HALF, p.head_dim_v);
      store(dk, p.dk_rows, p.dk_batch, p.dk_row, p.dk_head, key, group * HALF, p.head_dim);
      return;
    }
    ptx::named_barrier_sync(BOTH, 256);  // every product with K and V has ended
    stage<T, Keys>(dv, ptx::smem_address(shared.v.data) + columns, warp, lane);
    stage<T, Keys>(dk, ptx::smem_address(shared.k.data) + columns, warp, lane);
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(FIRST_EPILOGUE + group, 128);
    store(p.dv, ptx::smem_address(shared.v.data), key, group * PANELS, PANELS);
    store(p.dk, ptx::smem_address(shared.k.data), key, group * PANELS, PANELS);
    ptx::bulk_wait_read<0>();  // shared memory ends with the block
  }

  DEVICE void run() {
    dk.zero(), dv.zero();
    Cursor<1>().wait_full(shared.k_ring);
    Cursor<1>().wait_full(shared.v_ring);
    if (shared.blocks) {
      const u32 base = ptx::smem_address(&shared);
      const Cursor<STAGES> first;
      if (group == 0) {
        first.wait_full(shared.q_ring);
        issue_scores(base, shared.k, shared.q[0], first.slot);
        ptx::wgmma_wait<0>();
        weigh(s, 0, first.slot);
        tell(0);
        for (; !last(); ++number) weigh_step<false>();
        weigh_step<true>();
      } else {
        first.wait_full(shared.dout_ring);
        issue_scores(base, shared.v, shared.dout[0], first.slot);
        ptx::wgmma_wait<0>();
        for (; !last(); ++number) slope_step<false>();
        slope_step<true>();
      }
    }
    finish();
  }
};

}  // namespace backward
