// A consumer warpgroup of attention_bwd_sm90 for head dims up to 128: dK and dV of 64 keys.
#pragma once
#include "roles/backward_consumer_sm90.cuh"

namespace backward {

struct NarrowConsumer : Consumer {
  Accumulator<64> s[HALVES];
  Accumulator<BLOCK_Q> dp;
  Accumulator<HEAD_DIM> dk, dv;
  Accumulator<64> dq;

  using Consumer::Consumer;

  // Query blocks are issued by the groups in turn, so that one does arithmetic while the other multiplies.
  DEVICE void await_turn() const { ptx::named_barrier_sync(FIRST_TURN + opaque_group(), 256); }
  // The same after the loop. Where dQ is made here ptxas would keep the barrier's number for it, in a register that is
  // not there.
  DEVICE void await_last_turn() const {
    if constexpr (FINISHES) {
      ptx::named_barrier_sync(FIRST_TURN + group, 256);
    } else {
      await_turn();
    }
  }
  DEVICE void hand_over() const { ptx::named_barrier_arrive(FIRST_TURN + 1 - opaque_group(), 256); }

  // S^T = K Q^T and dP^T = V dO^T, of this group's keys.
  DEVICE void issue_s(u32 base, u32 slot) {
    const u32 k = at(base, &shared.k) + group * 64 * 128, q = at(base, &shared.q) + slot * Queries::BYTES;
#pragma unroll
    for (int h = 0; h < HALVES; ++h) gemm_qk<T, Keys, Queries, HEAD_DIM>(s[h], k, q + h * 64 * 128);
    ptx::wgmma_commit();
  }
  DEVICE void issue_dp(u32 base, u32 slot) {
    const u32 v = at(base, &shared.v) + group * 64 * 128, dout = at(base, &shared.dout) + slot * Queries::BYTES;
    gemm_qk<T, Keys, Queries, HEAD_DIM>(dp, v, dout);
    ptx::wgmma_commit();
  }

  // dV += P^T dO, and dK += dS^T Q.
  DEVICE void issue_sum(Accumulator<HEAD_DIM> &sum, const Weights<T, 64> (&weights)[HALVES], u32 rows) {
#pragma unroll
    for (int h = 0; h < HALVES; ++h) gemm_pv<T, Queries>(sum, weights[h], rows + h * 64 * 128);
    ptx::wgmma_commit();
  }

  // This group's part of dQ = dS K: 64 of its columns, or, where there are no more, 64 of its rows.
  DEVICE void issue_dq(u32 base, u32 slot) {
    const u32 ds = at(base, &shared.ds) + slot * Scores::BYTES + (HALVES > 1 ? group * Scores::PANEL : 0);
    const u32 k = at(base, &shared.k) + (HALVES > 1 ? 0 : group * Keys::PANEL);
    gemm_down<T, Scores, Keys, BLOCK_K>(dq, ds, k);
    ptx::wgmma_commit();
  }

  // dS = P (dP - delta), and both as operands.
  DEVICE void differentiate(Weights<T, 64> (&weights)[HALVES], Weights<T, 64> (&slopes)[HALVES], u32 slot) {
    const u32 lane = ptx::lane();
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      weights[h].pack(s[h]);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int column = h * 64 + Accumulator<64>::column(8 * n, lane);
        const Pair delta = *reinterpret_cast<const Pair *>(&shared.delta[slot][column]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float &slope = dp.x[32 * h + 4 * n + i];
          slope = s[h].x[4 * n + i] * (slope - (i % 2 ? delta.odd : delta.even));
        }
      }
      slopes[h].pack(dp, 64 * h);
    }
  }

  // Leaves this group's part of dQ to a warp of the producer, which adds it to global memory; or, if it is the last,
  // makes dQ.
  DEVICE void drain(u32 number) {
    auto &ring = shared.passed.dq_ring[group];
    const u32 thread = ptx::opaque(threadIdx.x) % 128;
    const Cursor<1> dq_slot(number), given(number + FINISHES);  // then also the first slot is given
    given.wait_empty(ring);
    const Fate fate = FINISHES ? shared.passed.fate[opaque_group()] : Fate::ADDED;
    if (fate != Fate::ADDED) {
      finish_dq(thread, fate == Fate::LAST);
    } else {
#pragma unroll
      for (int chunk = 0; chunk < DQ_CHUNKS; ++chunk)
        *reinterpret_cast<Four *>(shared.passed.dq[group][chunk][thread]) = four(dq, chunk);
      ptx::fence_proxy_async();
    }
    ptx::warp_barrier();
    arrive(dq_slot.full(ring));
  }

  // dQ of a block, of this group's part and the sum of all others, if there are any.
  DEVICE void finish_dq(u32 thread, bool others) {
    if (others) {
#pragma unroll
      for (int chunk = 0; chunk < DQ_CHUNKS; ++chunk) {
        const Four sum = *reinterpret_cast<const Four *>(shared.passed.dq[group][chunk][thread]);
#pragma unroll
        for (int i = 0; i < 4; ++i) dq.x[4 * chunk + i] += sum.x[i];
      }
    }
    dq.each([&](float &value, int, int) { value *= p.scale; });
    const u32 lane = ptx::lane();
    const int columns = p.head_dim - (HALVES > 1 ? 0 : static_cast<int>(opaque_group()) * 64) - dq.column(0, lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = static_cast<int>(thread / 32 * 16) + dq.row(r, lane);
      auto *target = reinterpret_cast<u32 *>(shared.passed.rows[opaque_group()] + row * p.dq_row + dq.column(0, lane));
      if (row < shared.passed.count[opaque_group()]) {
#pragma unroll
        for (int chunk = 0; chunk < DQ_CHUNKS; ++chunk)
          if (8 * chunk < columns) target[4 * chunk] = T::pair(dq.x[4 * chunk + 2 * r], dq.x[4 * chunk + 2 * r + 1]);
      }
    }
  }

  // One query block, whose P and dP are in registers; its dQ is computed in the next step. Meanwhile the scores of the
  // next one are begun.
  template <bool FIRST, bool LAST>
  DEVICE void step() {
    const u32 base = ptx::opaque(ptx::smem_address(&shared));
    const Cursor<STAGES> here(number), next(number + 1);
    const Cursor<2> ds(number), ds_before(number - 1);
    Weights<T, 64> weights[HALVES], slopes[HALVES];
    differentiate(weights, slopes, here.slot);
    if constexpr (LAST) {
      await_last_turn();
    } else {
      await_turn();
    }
    issue_sum(dv, weights, at(base, &shared.dout) + here.slot * Queries::BYTES);
    share(base, slopes);
    issue_sum(dk, slopes, at(base, &shared.q) + here.slot * Queries::BYTES);
    ptx::wgmma_wait<1>();
    arrive(here.empty(shared.dout_ring));
    if constexpr (!FIRST) {
      ds_before.wait_full(shared.ds_ring);
      issue_dq(base, ds_before.slot);
    }
    if constexpr (!LAST) {
      next.wait_full(shared.q_ring);
      issue_s(base, next.slot);
      ptx::wgmma_wait<1>();
    } else {
      ptx::wgmma_wait<0>();
    }
    hand_over();
    arrive(here.empty(shared.q_ring));
    if constexpr (!FIRST) {
      arrive(ds_before.empty(shared.ds_ring));
      drain(number - 1);
    }
    if constexpr (!LAST) {
      next.wait_full(shared.dout_ring);
      issue_dp(base, next.slot);
      ptx::wgmma_wait<1>();
      weigh(s, number + 1, next.slot);
      ptx::wgmma_wait<0>();
    } else {
      if (!SPLITS || shared.place.split < 0) finish_dv();  // else it is not the whole
      ds.wait_full(shared.ds_ring);
      issue_dq(base, ds.slot);
      ptx::wgmma_wait<0>();
      drain(number);
    }
  }

  // Leaves dV and dK of a share of the walk in global memory. Who comes last gets the sums of all shares, in their
  // order, so that nobody waits and the bits are always the same. Whether this is that one.
  DEVICE bool sum_shares() {
    constexpr int CHUNKS = HEAD_DIM / 8;  // of dV; those of dK follow
    const Place &place = shared.place;
    const u32 thread = threadIdx.x % 128;
    const auto chunk_of = [&](int share, int n) {
      const i64 sums = (static_cast<i64>(place.split) * p.shares + share) * CONSUMERS + group;
      return reinterpret_cast<Four *>(p.partial + sums * (2 * 64 * HEAD_DIM)) + n * 128 + thread;
    };
#pragma unroll
    for (int n = 0; n < CHUNKS; ++n) {
      *chunk_of(place.share, n) = four(dv, n);
      *chunk_of(place.share, CHUNKS + n) = four(dk, n);
    }
    ptx::named_barrier_sync(FIRST_EPILOGUE + group, 128);  // all are stored
    if (thread == 0) shared.came[group] = ptx::atomic_inc(p.came + place.split * CONSUMERS + group, p.shares - 1);
    ptx::named_barrier_sync(FIRST_EPILOGUE + group, 128);
    if (static_cast<int>(shared.came[group]) < p.shares - 1) return false;
    dk.zero(), dv.zero();
    for (int share = 0; share < p.shares; ++share)
#pragma unroll
      for (int n = 0; n < CHUNKS; ++n) {
        add(dv, n, *chunk_of(share, n));
        add(dk, n, *chunk_of(share, CHUNKS + n));
      }
    return true;
  }

  // Writes dV through rows of V that this group alone reads, and has read.
  DEVICE void finish_dv() {
    const u32 group = opaque_group();
    const int key = shared.place.key + group * 64;
    if (!has_box(key)) return store(dv, p.dv_rows, p.dv_batch, p.dv_row, p.dv_head, key, 0, p.head_dim_v);
    const u32 v = at(ptx::opaque(ptx::smem_address(&shared)), &shared.v) + group * 64 * 128;
    stage<T, Keys>(dv, v, warp, ptx::lane());
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(FIRST_EPILOGUE + group, 128);
    store(p.dv, v, key, 0, Keys::COUNT);
  }

  // Writes dK through rows of K, when both groups have read them.
  DEVICE void finish_dk() {
    const int key = shared.place.key + group * 64;
    dk.each([&](float &value, int, int) { value *= p.scale; });
    if (!has_box(key)) {
      store(dk, p.dk_rows, p.dk_batch, p.dk_row, p.dk_head, key, 0, p.head_dim);
      ptx::named_barrier_arrive(BOTH, 256);  // this group's products with K have ended
      return;
    }
    const u32 k = ptx::smem_address(shared.k.data) + group * 64 * 128;
    ptx::named_barrier_sync(BOTH, 256);  // every product with K has ended
    stage<T, Keys>(dk, k, warp, ptx::lane());
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(FIRST_EPILOGUE + group, 128);
    store(p.dk, k, key, 0, Keys::COUNT);
    ptx::bulk_wait_read<0>();  // shared memory ends with the block
  }

  DEVICE void run() {
    Cursor<1>().wait_full(shared.k_ring);
    dk.zero(), dv.zero();
    if (shared.blocks) {
      if (group == 1) hand_over();  // the first turn
      const u32 base = ptx::smem_address(&shared);
      const Cursor<STAGES> first;
      first.wait_full(shared.q_ring);
      issue_s(base, first.slot);
      Cursor<1>().wait_full(shared.v_ring);
      first.wait_full(shared.dout_ring);
      issue_dp(base, first.slot);
      ptx::wgmma_wait<1>();
      weigh(s, 0, first.slot);
      ptx::wgmma_wait<0>();
      if (last()) {
        step<true, true>();
      } else {
        step<true, false>();
        for (++number; !last(); ++number) step<false, false>();
        step<false, true>();
      }
      if (group == 0) await_last_turn();
    } else {
      Cursor<1>().wait_full(shared.v_ring);
      finish_dv();
    }
    if constexpr (SPLITS) {
      if (shared.place.split >= 0) {
        if (!sum_shares()) return ptx::named_barrier_arrive(BOTH, 256);  // this group's products with K have ended
        finish_dv();
      }
    }
    finish_dk();
  }
};

}  // namespace backward
