// O = softmax(scale Q K^T) V and LSE for Hopper: TMA, wgmma and warp specialisation. The schedule, its barriers and the
// measurements are in docs/kernels/attention_fwd_sm90.md. A persistent block takes tiles of the output one after the
// other. One thread of the producer warpgroup copies tiles of Q, K and V into rings; each consumer warpgroup owns 64
// rows of the tile, from the scores to the output. Key blocks are walked from the last to the first. While a consumer
// weighs the scores of one key block, the tensor cores multiply the weights of the block before with V, and its last
// block's with the first block of its next tile.
//
// Reads Config: T, Mask, HEAD_DIM, HEAD_DIM_V, BLOCK_K, CONSUMERS, K_STAGES, V_STAGES, Q_BUFFERS, TURNS (consumers
// issue their products in turn), PARAMS_BYTES, SMEM_BYTES.
#include "masks/mask.cuh"
#include "ptx/atomic.cuh"
#include "ptx/bulk.cuh"
#include "ptx/group.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/fp8.cuh"
#include "tile/lazy_softmax.cuh"
#include "tile/output.cuh"
#include "tile/rescore.cuh"
#include "tile/ring.cuh"
#include "tile/warpgroup.cuh"
#include "tile/work.cuh"

namespace forward {

using T = Config::T;
using Mask = Config::Mask;
using Element = T::Storage;
using Output = T::Output;
constexpr bool FP8 = sizeof(Element) == 1;
constexpr int HEAD_DIM = Config::HEAD_DIM, HEAD_DIM_V = Config::HEAD_DIM_V, BLOCK_K = Config::BLOCK_K;
constexpr int CONSUMERS = Config::CONSUMERS, BLOCK_Q = 64 * CONSUMERS, THREADS = 128 * (1 + CONSUMERS);
constexpr int K_STAGES = Config::K_STAGES, V_STAGES = Config::V_STAGES, Q_BUFFERS = Config::Q_BUFFERS;
constexpr bool STAGED = Q_BUFFERS > 1 && HEAD_DIM_V <= HEAD_DIM && !FP8;  // O leaves through the Q that it came from
constexpr int PARKING =
    Config::PARKING;  // key blocks between two additions to O in shared memory; 0: O stays in registers

// What elements are multiplied by: a number for each batch entry and kv head.
struct Descale {
  const float *x;
  i64 batch, head;  // strides
};

struct Params {
  ptx::TensorMap q, k, v, o;   // (columns, rows, heads, batch); boxes of 128 bytes and 64, BLOCK_K, BLOCK_K, 16 rows
  Output::Storage *out;        // [batch, len_q, heads_q, head_dim_v]
  float *lse;                  // [batch, heads_q, len_q], contiguous; may be null
  u32 *tickets;                // two zeros, which the last block leaves as zeros; null: tiles in turn
  i64 o_batch, o_row, o_head;  // strides in elements; the last dimension's is 1
  Descale q_descale, k_descale, v_descale;  // of 8-bit elements
  int batch, len_q, len_k, heads_q, heads_k;
  int head_dim_v;  // the array's own, at most HEAD_DIM_V
  int group;       // heads that share the L2 cache, see Work
  float scale;     // softmax_scale * log2(e): the softmax is in base 2
  Mask::Params mask;
};

using Queries = Panels<Element, 64, HEAD_DIM>;  // of one consumer
using Keys = Panels<Element, BLOCK_K, HEAD_DIM>;
using Values = Wgmma<T>::template Values<BLOCK_K, HEAD_DIM_V>;
constexpr int TRANSPOSERS = 3;  // warps of the producer that transpose V of 8-bit elements

// A tile of the output, as the producer announces it: its first row, and the key blocks that some rows of it see, from
// the one at key `last` down to the one at key `first`.
struct alignas(16) Tile {
  int row, head, batch;  // row is NONE after the last tile
  int last, first;       // no blocks when last < first
  float scale, scale_v;  // of scores, in base 2, and of O
};
constexpr int NONE = -1;
constexpr u32 FIRST_TURN = 1;  // of the named barriers
constexpr float SMALLEST_NORMAL = 1.17549435e-38f;
constexpr int TILES = 4;  // those of the Q in buffers, the one before, whose O is stored, and the next

struct Shared {
  Queries q[Q_BUFFERS][CONSUMERS];
  Keys k[K_STAGES];
  Values v[V_STAGES];
  Landing<Element, BLOCK_K, HEAD_DIM_V, Config::LANDINGS> landing;
  Parked<HEAD_DIM_V, PARKING ? 128 * CONSUMERS : 0> parked;
  Ring<Q_BUFFERS> q_ring[CONSUMERS];
  Ring<K_STAGES> k_ring;
  Ring<V_STAGES> v_ring;
  Tile tile[TILES];  // the i-th tile of this block is at i % TILES
};

static_assert(sizeof(Shared) == Config::SMEM_BYTES, "the host computes the same size");
static_assert(sizeof(Params) == Config::PARAMS_BYTES, "the host packs the same struct");
static_assert(MaskPolicy<Mask>, "a mask answers the four questions of masks/mask.cuh");

DEVICE void walk_of(const Params &p, const Mask &mask, int q, int rows, int &last, int &first) {
  const Range keys = mask.keys(q, min(q + rows, p.len_q));
  first = keys.begin / BLOCK_K * BLOCK_K;
  last = keys.end > keys.begin && q < p.len_q ? (keys.end - 1) / BLOCK_K * BLOCK_K : first - BLOCK_K;
}

DEVICE int tiles_of_head(const Params &p) { return (p.len_q + BLOCK_Q - 1) / BLOCK_Q; }

// The producer: for each tile Q, then K and V of its blocks, V one block behind K as the consumers take them.
struct Producer {
  const Params &p;
  Shared &shared;
  Cursor<Q_BUFFERS> q;
  Cursor<K_STAGES> k;
  Cursor<FP8 ? Config::LANDINGS : V_STAGES> v;
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

  // What the scores and O of a tile are multiplied by.
  DEVICE void describe(Tile &tile, int head_k) const {
    if constexpr (FP8) {
      const auto factor = [&](const Descale &d) { return d.x ? d.x[tile.batch * d.batch + head_k * d.head] : 1.0f; };
      tile.scale = p.scale * factor(p.q_descale) * factor(p.k_descale);
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
    Cursor<Config::LANDINGS> landed;
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

// A consumer warpgroup, as one of its four warps.
struct Consumer {
  const Params &p;
  Shared &shared;
  const int group;  // of CONSUMERS
  const int warp;   // of the warpgroup
  Cursor<Q_BUFFERS> q;
  Cursor<K_STAGES> k;
  Cursor<V_STAGES> v;
  Accumulator<BLOCK_K> s;
  Weights<T, BLOCK_K> weights;
  Accumulator<HEAD_DIM_V> o;
  LazySoftmax<T> softmax;
  int since = 0;      // key blocks since O was parked
  float parked[2];    // what has become of the weights since then; 0: nothing is parked
  float scale;        // of the scores of the tile, where tiles differ
  int v_owed = 0;     // blocks of V to pass over after that of the weights
  int q_owed = NONE;  // buffer of Q that O is leaving through

  DEVICE Consumer(const Params &p, Shared &shared, int group, int warp)
      : p(p), shared(shared), group(group), warp(warp) {}

  DEVICE u32 q_tile(u32 slot) const {
    return ptx::smem_address(shared.q[0][0].data) + (slot * CONSUMERS + group) * Queries::BYTES;
  }
  DEVICE u32 k_tile() const { return ptx::smem_address(shared.k[0].data) + k.slot * Keys::BYTES; }
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

  // Each key block is issued by the groups in turn, so that one weighs while the other multiplies. A turn is a barrier
  // of the group whose turn it is and of the one before, which arrives.
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

  // Gives the buffer that O was leaving through back, once it has left.
  DEVICE void settle_q() {
    if (q_owed == NONE) return;
    if (ptx::lane() == 0) ptx::bulk_wait_read<0>();
    release_q(q_owed);
    q_owed = NONE;
  }

  DEVICE bool whole(const Mask &mask, int row, int key) const {
    return key + BLOCK_K <= p.len_k && mask.whole(row, min(row + 64, p.len_q), key, key + BLOCK_K);
  }

  // Hides the pairs beyond the mask or the end of the keys: scores are replaced, whatever the hidden key holds.
  DEVICE void hide(const Mask &mask, int row, int key) {
    const u32 lane = ptx::lane();
    s.each([&](float &score, int r, int c) {
      const int column = key + s.column(c, lane);
      if (column >= p.len_k || !mask.keep(row + warp * 16 + s.row(r, lane), column)) score = -INFINITE;
    });
  }

  // Weights are 2^(c (S - m)). A scale that is not positive is applied to the scores themselves, and c is 1.
  DEVICE float factor() const { return FP8 ? scale : p.scale; }
  DEVICE bool apart() const { return !(factor() >= SMALLEST_NORMAL); }
  DEVICE float c() const { return apart() ? 1.0f : factor(); }
  DEVICE void scale_scores() {
    if (apart()) s.each([&](float &score, int, int) { score *= factor(); });
  }

  // The scores of this block of K once more, for one warp.
  DEVICE void rescore(u32 slot) {
    ::rescore<T, Queries, Keys, HEAD_DIM>(s, q_tile(slot), k_tile(), warp, ptx::lane());
    scale_scores();
  }

  // Issue S = Q K^T of the next block of K, and O += P V of the next block of V.
  DEVICE void issue_qk(u32 slot) {
    k.wait_full(shared.k_ring);
    gemm_qk<T, Queries, Keys, HEAD_DIM>(s, q_tile(slot), k_tile());
  }
  DEVICE void issue_pv() {
    v.wait_full(shared.v_ring);
    gemm_pv<T, Values>(o, weights, v_tile(), true);
  }

  // When a product has ended: O as the weights now are, parked now and then.
  DEVICE void follow() {
    if (softmax.moved) {
      o.each([&](float &value, int r, int) { value *= softmax.shrink[r]; });
      if constexpr (PARKING) parked[0] *= softmax.shrink[0], parked[1] *= softmax.shrink[1];
    }
    if constexpr (PARKING) {
      if (++since == PARKING) {
        shared.parked.add(o, parked, place());
        since = 0;
        parked[0] = parked[1] = 1.0f;
      }
    }
  }
  DEVICE u32 place() const { return group * 128 + warp * 32 + ptx::lane(); }

  // Between two tiles: the last product of the one before, whose O is stored, and the first key block of the next,
  // which runs from `row` of Q and begins at `key`; or one of the two alone.
  DEVICE void change(bool ends, const Tile &before, u32 slot_before, bool begins, const Tile &here, const Mask &mask,
                     int row, u32 slot, int key, bool only) {
    if (ends && begins) {
      await_turn();
      issue_qk(slot);
      ptx::wgmma_commit();
      issue_pv();
      ptx::wgmma_commit();
      hand_over();
      ptx::wgmma_wait<1>();
    } else if (begins) {
      await_turn();
      issue_qk(slot);
      ptx::wgmma_commit();
      hand_over();
      ptx::wgmma_wait<0>();
    } else {
      issue_pv();
      ptx::wgmma_commit();
    }
    float inverse[2], lse[2];
    softmax.finish(c(), inverse, lse);
    softmax.reset();
    if (begins) {
      release_k();
      if (!STAGED && only) release_q(slot);
      if constexpr (FP8) scale = here.scale;
      scale_scores();
      if (!whole(mask, row, key)) hide(mask, row, key);
      softmax.meet(s, c());
    }
    ptx::wgmma_wait<0>();
    weights.pack(s);
    if (ends) {
      if constexpr (PARKING) {
        if (parked[0] != 0.0f || parked[1] != 0.0f) shared.parked.take(o, parked, place());
      }
      release_v();
      store(before, slot_before, inverse, lse);
    }
    pass_v();
    o.zero();
    since = 0;
    parked[0] = parked[1] = 0.0f;
  }

  // Another key block, while the weights of the one before are multiplied.
  template <bool MASKED>
  DEVICE void step(const Mask &mask, int row, u32 slot, int key, bool final) {
    await_turn();
    issue_qk(slot);
    ptx::wgmma_commit();
    issue_pv();
    ptx::wgmma_commit();
    hand_over();
    ptx::wgmma_wait<1>();
    scale_scores();
    if constexpr (MASKED || FP8) {
      if constexpr (MASKED) hide(mask, row, key);
      softmax.meet(s, c());
    } else if (!softmax.settled || !softmax.guess(s, c())) {
      if (softmax.settled) rescore(slot);
      softmax.meet(s, c());
    }
    release_k();
    if (!STAGED && final) release_q(slot);
    ptx::wgmma_wait<0>();
    release_v();
    follow();
    weights.pack(s);
  }

  // Normalises and writes this warp's rows of O, and of LSE.
  DEVICE void store(const Tile &at, u32 slot, const float (&inverse)[2], const float (&lse)[2]) {
    const u32 lane = ptx::lane();
    const int row = at.row + group * 64 + warp * 16;
    const float scale_v = FP8 ? at.scale_v : 1.0f;
    o.each([&](float &value, int r, int) { value *= inverse[r] * scale_v; });
    if constexpr (STAGED) {
      using Staged = Panels<Element, 64, HEAD_DIM_V>;
      const u32 tile = q_tile(slot);
      stage<Output, Staged>(o, tile, warp, lane);
      ptx::fence_proxy_async();
      ptx::warp_barrier();
      if (lane == 0) {
#pragma unroll
        for (int panel = 0; panel < Staged::COUNT; ++panel)
          ptx::tma_store_4d(p.o, tile + panel * Staged::PANEL + warp * 16 * 128, panel * Staged::WIDTH, row, at.head,
                            at.batch);
        ptx::bulk_commit();
      }
      q_owed = slot;
    } else {
      Output::Storage *rows = p.out + at.batch * p.o_batch + at.head * p.o_head + row * p.o_row;
      store_rows<Output>(o, rows, p.o_row, p.len_q - row, p.head_dim_v, lane);
    }
    if (p.lse && lane % 4 == 0) {
      float *rows = p.lse + (static_cast<i64>(at.batch) * p.heads_q + at.head) * p.len_q;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int q = row + o.row(r, lane);
        if (q < p.len_q) rows[q] = lse[r];
      }
    }
  }

  // A tile of which this group sees no key: zeros, and -inf.
  DEVICE void see_nothing(const Tile &at, u32 slot, int blocks) {
    const int begin = at.row + group * 64 + warp * 16, end = min(begin + 16, p.len_q);
    const u32 lane = ptx::lane();
    release_q(slot);
#pragma unroll 1
    for (int row = begin; row < end; ++row) {
      const i64 first = at.batch * p.o_batch + at.head * p.o_head + row * p.o_row;
      const int column = 8 * static_cast<int>(lane);
      if (column < p.head_dim_v) *reinterpret_cast<Chunk *>(p.out + first + column) = {};
      if (p.lse && lane == 0) p.lse[(static_cast<i64>(at.batch) * p.heads_q + at.head) * p.len_q + row] = -INFINITE;
    }
    for (; blocks > 0; --blocks) {
      pass_k(1);
      v_owed = 1;
      pass_v();
    }
  }

  DEVICE void run() {
    if (group == CONSUMERS - 1) hand_over();  // the first turn
    bool pending = false;                     // weights and O of the tile before are in registers
    u32 slot_before = 0;
    for (u32 number = 0;; ++number) {
      settle_q();
      q.wait_full(shared.q_ring[group]);
      const u32 slot = q.slot;
      q.advance();
      const Tile &before = shared.tile[(number + TILES - 1) % TILES], &here = shared.tile[number % TILES];
      const int row = ptx::uniform(here.row) + group * 64;
      const bool none = here.row == NONE;
      const Mask mask(p.mask, here.batch, here.head, p.len_q, p.len_k);
      int last, first;
      walk_of(p, mask, row, 64, last, first);
      const bool nothing = none || last < first;
      const int late = (here.last - last) / BLOCK_K;  // blocks that only groups below see
      for (bool begun = false; !begun;) {
        // The V that ends must not be in the way of a K that is passed over.
        const bool begins = !nothing && !(pending && v_owed + late > V_STAGES);
        if (begins) pass_k(late), v_owed += late;
        if (pending || begins) change(pending, before, slot_before, begins, here, mask, row, slot, last, last == first);
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
        for (; key >= first && !whole(mask, row, key); key -= BLOCK_K) step<true>(mask, row, slot, key, key == first);
        settle_q();
        for (; key >= first && whole(mask, row, key); key -= BLOCK_K) step<false>(mask, row, slot, key, key == first);
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

// The warpgroups share the registers of an SM as their roles need them.
constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : CONSUMERS == 2 ? (FP8 ? 40 : 24) : 64;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : CONSUMERS == 2 ? (FP8 ? 232 : 240) : 240;

DEVICE void attend(const Params &p, Shared &shared) {
  const int group = ptx::uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    for (auto &ring : shared.q_ring) ring.init(4);
    shared.k_ring.init(4 * CONSUMERS);
    shared.v_ring.init(4 * CONSUMERS, FP8 ? TRANSPOSERS : 1);
    shared.landing.init(TRANSPOSERS);
    ptx::fence_mbarrier_init();
  }
  ptx::barrier();  // the barriers are made
  if (group == CONSUMERS) {
    ptx::registers_decrease<PRODUCER_REGISTERS>();
    const int tiles = tiles_of_head(p) * p.heads_q * p.batch;
    const int warp = ptx::uniform(threadIdx.x / 32 % 4);
    if (warp == 0) {
      if (ptx::elect()) Producer(p, shared).run(tiles);
    } else {
      transpose_v(shared, warp - 1);
    }
  } else {
    ptx::registers_increase<CONSUMER_REGISTERS>();
    Consumer(p, shared, group, ptx::uniform(threadIdx.x / 32 % 4)).run();
  }
}

}  // namespace forward

// Counters of tiles, one for each launch that may be under way; see Params::tickets.
extern "C" __device__ u32 tickets[1024][2] = {};

extern "C" __global__ void __launch_bounds__(forward::THREADS, 1)
    attention_fwd_sm90(const __grid_constant__ forward::Params p) {
  forward::attend(p, ptx::shared<forward::Shared>());
}
