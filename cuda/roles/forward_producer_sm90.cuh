// The producer warpgroup of attention_fwd_sm90: one thread loads, and for 8-bit elements three warps transpose V.
#pragma once
#include "ptx/atomic.cuh"
#include "roles/forward_sm90.cuh"
#include "tile/work.cuh"

namespace forward {

// The producer: for each tile Q, then K and V of its blocks, V one block behind K as the consumers take them.
struct Producer {
  const Params &p;
  Shared &shared;
  Cursor<Q_BUFFERS> q;
  Cursor<K_STAGES> k;
  Cursor<FP8 ? LANDINGS : V_STAGES> v;
  u32 announced = 0;

  DEVICE Producer(const Params &p, Shared &shared) : p(p), shared(shared) {}

  // Tells the consumers which tile comes next, and starts its Q if it has keys.
  DEVICE void announce(const Tile &tile) {
#pragma unroll
    for (int i = 0; i < CONSUMERS; ++i) q.wait_empty(shared.q_ring[i]);
    shared.tile[announced++ % TILES] = tile;
#pragma unroll
    for (int i = 0; i < CONSUMERS; ++i) {
      const u32 full = q.full(shared.q_ring[i]);
      if (tile.last >= tile.first) {
        ptx::mbarrier_arrive_expect_tx(full, Queries::BYTES);
        Queries::load(ptx::smem_address(shared.q[0][i].data) + q.slot * (CONSUMERS * Queries::BYTES), p.q, full,
                      tile.row + 64 * i, tile.head, tile.batch);
      } else {
        ptx::mbarrier_arrive(full);
      }
    }
    q.advance();
  }

  DEVICE void load_k(int key, int head, int batch) {
    k.wait_empty(shared.k_ring);
    const u32 full = k.full(shared.k_ring);
    ptx::mbarrier_arrive_expect_tx(full, Keys::BYTES);
    Keys::load(ptx::smem_address(shared.k[0].data) + k.slot * Keys::BYTES, p.k, full, key, head, batch);
    k.advance();
  }

  // V of 8-bit elements lands elsewhere first.
  template <class S>
  DEVICE void load_v(S &shared, int key, int head, int batch) {
    if constexpr (FP8) {
      load_v(shared.landing.ring, shared.landing.v[0], key, head, batch);
    } else {
      load_v(shared.v_ring, shared.v[0], key, head, batch);
    }
  }
  template <class Ring, class To>
  DEVICE void load_v(const Ring &ring, To &first, int key, int head, int batch) {
    v.wait_empty(ring);
    const u32 full = v.full(ring);
    ptx::mbarrier_arrive_expect_tx(full, To::BYTES);
    To::load(ptx::smem_address(first.data) + v.slot * To::BYTES, p.v, full, key, head, batch);
    v.advance();
  }

  // Tells the transposers that no V comes any more.
  template <class S>
  DEVICE void end_v(S &shared) {
    if constexpr (FP8) {
      v.wait_empty(shared.landing.ring);
      shared.landing.last[v.slot] = true;
      ptx::mbarrier_arrive(v.full(shared.landing.ring));
    }
  }

  // What the scores and O of a tile are multiplied by. A product of finite numbers stays finite, so that scores of 0
  // do.
  DEVICE void describe(Tile &tile, int head_k) const {
    if constexpr (FP8) {
      const auto factor = [&](const Descale &d) { return d.x ? d.x[tile.batch * d.batch + head_k * d.head] : 1.0f; };
      const float q = factor(p.q_descale), k = factor(p.k_descale);
      const double product = static_cast<double>(p.scale) * q * k;
      const bool finite = fabsf(q) <= LARGEST && fabsf(k) <= LARGEST;
      tile.scale = finite && product > LARGEST    ? LARGEST
                   : finite && product < -LARGEST ? -LARGEST
                                                  : static_cast<float>(product);
      tile.scale_v = factor(p.v_descale);
    }
  }

  DEVICE void run(int tiles) {
    int late = NONE, late_head = 0, late_batch = 0;  // the V that follows the next K
    const auto catch_up = [&] {
      if (late != NONE) load_v(shared, late, late_head, late_batch);
      late = NONE;
    };
    for (int number = blockIdx.x; number < tiles;) {
      const int next = p.tickets ? gridDim.x + ptx::atomic_add(p.tickets, 1) : number + gridDim.x;
      const Work work(number, tiles_of_head(p), p.heads_q, p.batch, p.group);
      const Mask mask(p.mask, work.batch, work.head, p.len_q, p.len_k);
      const int head = work.head / (p.heads_q / p.heads_k);
      Tile tile = {work.tile * BLOCK_Q, work.head, work.batch};
      describe(tile, head);
      walk_of(p, mask, tile.row, BLOCK_Q, tile.last, tile.first);
      const bool empty = tile.last < tile.first;
      if (Q_BUFFERS > 1 || empty) announce(tile);
      if (empty) catch_up();
      for (int key = tile.last; key >= tile.first; key -= BLOCK_K) {
        load_k(key, head, tile.batch);
        catch_up();
        if (Q_BUFFERS == 1 && key == tile.last) announce(tile);  // its Q waits longest for its room
        late = key, late_head = head, late_batch = tile.batch;
      }
      number = next;
    }
    announce({NONE, 0, 0, -1, 0});
    catch_up();
    end_v(shared);
    if (p.tickets && ptx::atomic_inc(p.tickets + 1, gridDim.x - 1) == gridDim.x - 1) p.tickets[0] = 0;
  }
};

// A warp that transposes V of 8-bit elements on its way to the consumers.
template <class S>
DEVICE void transpose_v(S &shared, int warp) {
  if constexpr (FP8) {
    Cursor<LANDINGS> landed;
    Cursor<V_STAGES> v;
    for (;;) {
      landed.wait_full(shared.landing.ring);
      if (shared.landing.last[landed.slot]) return;
      v.wait_empty(shared.v_ring);
      transpose<BLOCK_K, HEAD_DIM_V>(ptx::smem_address(shared.landing.v[landed.slot].data),
                                     ptx::smem_address(shared.v[0].data) + v.slot * Values::BYTES, warp, TRANSPOSERS,
                                     ptx::lane());
      ptx::fence_proxy_async();  // wgmma reads through the asynchronous proxy what stmatrix has written
      ptx::warp_barrier();
      if (ptx::lane() == 0) {
        ptx::mbarrier_arrive(v.full(shared.v_ring));
        ptx::mbarrier_arrive(landed.empty(shared.landing.ring));
      }
      landed.advance();
      v.advance();
    }
  }
}

}  // namespace forward
