// The producer warpgroup of attention_bwd_sm90: one warp copies Q, dO and what belongs to their rows into rings, two
// warps add what the consumers leave of dQ to global memory.
#pragma once
#include "ptx/atomic.cuh"
#include "ptx/bulk.cuh"
#include "ptx/group.cuh"
#include "roles/backward_sm90.cuh"

namespace backward {

// One thread, which copies K and V once, then each query block of the walk.
template <class S>
struct Loader {
  const Params &p;
  S &shared;
  const Place &place;
  Walk walk;
  u32 number = 0;  // of the walk's block
  Cursor<1> tail;

  DEVICE Loader(const Params &p, S &shared) : p(p), shared(shared), place(shared.place), walk(p, shared.place) {}

  // Starts the copies of a tile of Q or dO, and of the numbers of its rows.
  DEVICE void load(Ring<STAGES> &ring, Queries *tiles, const ptx::TensorMap &map, float (*numbers)[BLOCK_Q],
                   const float *from) {
    const Block &block = walk.block;
    const Cursor<STAGES> at(number);
    at.wait_empty(ring);
    const u32 full = full_of(tiles[at.slot], at.full(ring), place.q.length - block.q);
    ptx::mbarrier_arrive_expect_tx(full, Queries::BYTES + BLOCK_Q * sizeof(float));
    Queries::load(ptx::smem_address(tiles[at.slot].data), map, full, row_of(place.q, block.q), block.head,
                  batch_of(place));
    ptx::bulk_load(ptx::smem_address(numbers[at.slot]), from + stat_of(p, place, block), BLOCK_Q * sizeof(float), full);
  }

  // Q of a block, and which it is.
  DEVICE void load_q() {
    shared.block[number % BLOCKS] = walk.block;
    load(shared.q_ring, shared.q, p.q, shared.lse_log2, p.lse_log2);
  }
  DEVICE void load_dout() { load(shared.dout_ring, shared.dout, p.dout, shared.delta, p.delta); }

  // K or V of the block.
  DEVICE void load(const Ring<1> &ring, Keys &tile, const ptx::TensorMap &map) {
    const u32 full = full_of(tile, Cursor<1>().full(ring), place.k.length - place.key);
    ptx::mbarrier_arrive_expect_tx(full, Keys::BYTES);
    Keys::load(ptx::smem_address(tile.data), map, full, row_of(place.k, place.key), place.head_k, batch_of(place));
  }

  // The barrier that a tile's bytes count towards: that of the warp that clears it, where rows are not the sequence's.
  template <class Tile>
  DEVICE u32 full_of(Tile &tile, u32 full, int rows) {
    if constexpr (VARIES) {
      if (rows < Tile::ROWS) return announce(tile.data, Tile::COUNT, rows > 0 ? rows : 0, Tile::ROWS, full);
    }
    return full;
  }
  DEVICE u32 announce(unsigned char *data, int panels, int rows, int end, u32 full) {
    auto &next = shared.tail;
    tail.wait_empty(next.ring);
    next.data = data, next.panels = panels, next.rows = rows, next.end = end, next.full = full;
    const u32 barrier = tail.full(next.ring);
    tail.advance();
    return barrier;
  }

  // The first copies, which wait for nobody.
  DEVICE void begin() {
    load(shared.k_ring, shared.k, p.k);
    if (!walk.done()) load_q();
    load(shared.v_ring, shared.v, p.v);
    if (!walk.done()) load_dout();
  }

  DEVICE void run() {
    if (!walk.done()) {
      for (advance(); !walk.done(); advance()) {
        load_q();
        load_dout();
      }
    }
    if constexpr (VARIES) ptx::mbarrier_arrive(announce(nullptr, 0, 0, 0, 0));  // there are no more
  }
  DEVICE void advance() { walk.advance(), ++number; }
};

// A warp that clears the rows of tiles beyond their sequence: 0 x NaN would reach gradients.
template <class S>
DEVICE void clear_tails(S &shared) {
  if constexpr (VARIES) {
    const auto &next = shared.tail;
    for (Cursor<1> tail;; tail.advance()) {
      tail.wait_full(next.ring);
      if (!next.data) return;
      for (int panel = 0; panel < next.panels; ++panel) {
        auto *words = reinterpret_cast<u64 *>(next.data + panel * next.end * 128);
        for (int i = next.rows * 16 + static_cast<int>(ptx::lane()); i < next.end * 16; i += 32) words[i] = 0;
      }
      ptx::fence_proxy_async();  // wgmma reads through the asynchronous proxy
      ptx::warp_barrier();
      if (ptx::lane() == 0) {
        ptx::mbarrier_arrive(next.full);
        ptx::mbarrier_arrive(tail.empty(next.ring));
      }
    }
  }
}

// When a consumer's part of dQ may be added, at any time or in the order of the keys, and whether it is the first: that
// one is stored, so that nobody has to make zeros. In any order, the parts of a query block have a counter of those who
// came to add and, behind it, one of whether the first is there.
template <bool ORDERED>
struct Turns {
  const Params &p;
  const Place &place;
  const int group;
  u32 *counter = nullptr;  // of the query block
  bool first = false;

  DEVICE Turns(const Params &p, const Place &place, int group, bool) : p(p), place(place), group(group) {}

  DEVICE void choose(const Block &block) { counter = p.added + stat_of(p, place, block) / ADDED_ROWS + group; }
  DEVICE void await(const Block &block) { choose(block); }

  // Whether this part is to be stored. Else the one that was has been, by a copy of the bulk engine, as ours are.
  DEVICE bool begin() {
    first = ptx::atomic_add(counter, 1) == 0;
    if (!first) {
      ptx::acquire_when(counter + CONSUMERS, 1);
      ptx::fence_proxy_async_global();
    }
    return first;
  }

  DEVICE void pass_on() {
    if (!first) return;
    ptx::bulk_wait<0>();  // it is there
    ptx::release_add(counter + CONSUMERS, 1);
  }
};
// In order, the counter is 0 at first, and i + 1 when the i-th block of keys of the sequence has added.
template <>
struct Turns<true> : Turns<false> {
  u32 own, before = 0;  // what it is when this block of keys, and when those before it, have added
  int until = 0;        // the block of keys before this one sees queries up to here
  int following;        // and the one after it from here on
  const bool waits;

  DEVICE Turns(const Params &p, const Place &place, int group, bool waits)
      : Turns<false>(p, place, group, waits), own(place.key / BLOCK_K + 1), following(place.q.length), waits(waits) {
    const int head = place.head_k * p.sharers;
    if (own > 1) until = queries_of(p, place, head, place.key - BLOCK_K).end;
    if (FINISHES && place.key + BLOCK_K < place.k.length)
      following = queries_of(p, place, head, place.key + BLOCK_K).begin;
  }

  // Whether no block of later keys adds to a query block.
  DEVICE bool ends(const Block &block) const { return block.q < following; }

  // Goes to a query block. If the block of keys before this one does not walk it, none does: see queries_of.
  DEVICE void choose(const Block &block) {
    Turns<false>::choose(block);
    before = block.q < until ? own - 1 : 0;
  }

  // Waits until all earlier keys that see the query block have been added.
  DEVICE void await(const Block &block) {
    choose(block);
    if (waits) ptx::acquire_when(counter, before);
    if constexpr (!WIDE) ptx::fence_proxy_async_global();  // they came by copies of the bulk engine, as ours do
  }

  DEVICE bool begin() { return waits ? before == 0 : Turns<false>::begin(); }

  DEVICE void pass_on() {
    if (!waits) return Turns<false>::pass_on();
    if constexpr (!WIDE) ptx::bulk_wait<0>();  // the sums are there
    ptx::release_add(counter, own - before);
  }
};

// Where a query block's parts of a group are summed.
DEVICE float *sums_of(const Params &p, const Place &place, const Block &block, int group) {
  return p.dq + stat_of(p, place, block) * HEAD_DIM + group * PART;
}

// Adds a part that lies in shared memory to the sums, or makes them of it, until it has been read.
DEVICE void add_part(float *sums, u32 part, bool first) {
  if (first) {
    ptx::bulk_store(sums, part, PART * sizeof(float));
  } else {
    ptx::bulk_reduce_add_f32(sums, part, PART * sizeof(float));
  }
  ptx::bulk_commit();
  ptx::bulk_wait_read<0>();
}

// One thread: adds a consumer's part of dQ, block after block, but leaves the sum of all earlier keys to the consumer
// where there are no later ones: it makes dQ then. So the consumer has the room for its part when it knows which it is.
template <class S>
DEVICE void drain_and_return(const Params &p, S &shared, const Place &place, int group, Turns<true> &turns) {
  Walk walk(p, place);
  if (walk.done()) return;
  Cursor<1> at;
  auto &ring = shared.passed.dq_ring[group];
  const u32 part = ptx::smem_address(shared.passed.dq[group]);
  const auto give = [&](Fate fate) {
    shared.passed.fate[group] = fate;
    if (fate == Fate::LAST) {
      ptx::mbarrier_arrive_expect_tx(at.empty(ring), PART * sizeof(float));
    } else {
      ptx::mbarrier_arrive(at.empty(ring));
    }
  };
  bool last = turns.ends(walk.block);
  if (!last) give(Fate::ADDED);
  for (bool more = true; more;) {
    turns.await(walk.block);
    const bool first = turns.begin();
    float *sums = sums_of(p, place, walk.block, group);
    if (last) {
      const int row = walk.block.q + (HALVES > 1 ? group * 64 : 0);
      shared.passed.rows[group] = p.dq_rows + batch_of(place) * p.dq_batch + walk.block.head * p.dq_head +
                                  row_of(place.q, row) * p.dq_row + (HALVES > 1 ? 0 : group * 64);
      shared.passed.count[group] = place.q.length - row;
      give(first ? Fate::ALONE : Fate::LAST);
      if (!first) ptx::bulk_load(part, sums, PART * sizeof(float), at.empty(ring));
    }
    const bool added = !last;
    walk.advance();
    more = !walk.done();
    last = more && turns.ends(walk.block);
    at.wait_full(ring);
    at.advance();
    if (added) add_part(sums, part, first);
    if (more && !last) give(Fate::ADDED);
    if (added) turns.pass_on();
  }
}

// One thread: adds a consumer's part of dQ, block after block, or tells the consumer when to.
template <class S>
DEVICE void drain(const Params &p, S &shared, const Place &place, int group, bool waits) {
  Turns<DETERMINISTIC> turns(p, place, group, waits);
  Cursor<1> at;
  if constexpr (FINISHES) {
    drain_and_return(p, shared, place, group, turns);
  } else if constexpr (!WIDE) {
    auto &ring = shared.passed.dq_ring[group];
    for (Walk walk(p, place); !walk.done(); walk.advance()) {
      turns.await(walk.block);
      at.wait_full(ring);
      float *sums = sums_of(p, place, walk.block, group);
      add_part(sums, ptx::smem_address(shared.passed.dq[group]), turns.begin());
      ptx::mbarrier_arrive(at.empty(ring));
      at.advance();
      turns.pass_on();
    }
  } else if constexpr (DETERMINISTIC) {
    auto &ring = shared.leave.ring[group];
    for (Walk walk(p, place); !walk.done(); walk.advance()) {
      turns.await(walk.block);
      ptx::mbarrier_arrive(at.full(ring));
      at.advance();
      at.wait_empty(ring);  // the consumer has added
      turns.pass_on();
    }
  }
}

}  // namespace backward
