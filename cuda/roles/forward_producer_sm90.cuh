// The producer warpgroup of attention_fwd_sm90: one thread loads; for 8-bit elements warps transpose V, where sequences
// vary one clears what V holds beyond them, and one looks at the ids that a mask goes by.
#pragma once
#include "ptx/atomic.cuh"
#include "roles/forward_sm90.cuh"
#include "tile/team.cuh"
#include "tile/work.cuh"

namespace forward {

// A key block: its first row in K and V, and how many rows from there are the sequence's.
struct Block {
  int row, head, batch, rows;
};

// Finds the tiles of a block.
struct Finder {
  const Params &p;
  int sequence = -1, tiles_begin = 0, tiles_end = 0;  // the packed sequence of the last tile, and its tiles
  Span span;

  DEVICE explicit Finder(const Params &p) : p(p) {}

  // The number of the tile after one.
  DEVICE int after(int number) const {
    return p.tickets ? gridDim.x + ptx::atomic_add(p.tickets, 1) : number + gridDim.x;
  }

  // Finds the tile of a number, of those that only grow; false after the last. Tiles of packed sequences are numbered
  // sequence after sequence, the rows of none at the end.
  template <class Tile>
  DEVICE bool find(int number, Tile &tile) {
    if constexpr (PACKED) {
      while (number >= tiles_end) {
        if (++sequence > p.batch + 1) return false;
        span = Sequences::queries(p.sequences, sequence, p.batch, p.len_q);
        tiles_begin = tiles_end;
        tiles_end += tiles_of(span.extent) * p.heads_q;
      }
      const Work work(number - tiles_begin, tiles_of(span.extent), p.heads_q, 1, p.group);
      tile.row = work.tile * BLOCK_Q, tile.head = work.head, tile.batch = min(sequence, p.batch - 1);
      tile.q = span;
      tile.of_none = sequence >= p.batch;
      tile.k = tile.of_none ? Span{} : Sequences::keys(p.sequences, sequence, p.len_k);
    } else {
      const int tiles = tiles_of(p.len_q);
      if (number >= tiles * p.heads_q * p.batch) return false;
      const Work work(number, tiles, p.heads_q, p.batch, p.group);
      tile.row = work.tile * BLOCK_Q, tile.head = work.head, tile.batch = work.batch;
      if constexpr (VARIES) {
        tile.q = Sequences::queries(p.sequences, work.batch, p.batch, p.len_q);
        tile.k = Sequences::keys(p.sequences, work.batch, p.len_k);
      }
    }
    return true;
  }
};

// The producer: for each tile Q, then K and V of its blocks as the consumers take them: 16-bit V one block behind K.
struct Producer : Finder {
  Shared &shared;
  Cursor<Q_BUFFERS> q;
  Cursor<K_STAGES> k;
  Cursor<FP8 ? LANDINGS : V_STAGES> v;
  Cursor<1> tail, sight;
  u32 announced = 0;

  DEVICE Producer(const Params &p, Shared &shared) : Finder(p), shared(shared) {}

  // Leaves a tile's modifiers to the consumers; where there is a scout it has, and may go on to the next tile.
  template <class S>
  DEVICE void keep(S &shared, const Tile &tile) {
    if constexpr (LOOKS<Mask>) {
      ptx::mbarrier_arrive(sight.empty(shared.sight.ring));
      sight.advance();
    } else if constexpr (!PLAIN) {
      if (tile.last >= tile.first) shared.kept.modifiers[announced % TILES] = Modifiers(p, tile);
    }
  }

  // The tile of a number, or the one that the scout has found; false after the last.
  template <class S>
  DEVICE bool next(S &shared, int number, Tile &tile) {
    if constexpr (LOOKS<Mask>) {
      sight.wait_full(shared.sight.ring);
      tile = shared.sight.tile;
      return tile.row != NONE;
    } else {
      return find(number, tile);
    }
  }
  template <class S>
  DEVICE Mask mask_of(S &shared, const Tile &tile) const {
    if constexpr (LOOKS<Mask>) {
      return shared.kept.modifiers[announced % TILES].mask;
    } else {
      return Modifiers(p, tile).mask;
    }
  }

  // Tells the consumers which tile comes next, and starts its Q if it has keys.
  DEVICE void announce(const Tile &tile) {
#pragma unroll
    for (int i = 0; i < CONSUMERS; ++i) q.wait_empty(shared.q_ring[i]);
    keep(shared, tile);
    shared.tile[announced++ % TILES] = tile;
#pragma unroll
    for (int i = 0; i < CONSUMERS; ++i) {
      const u32 full = q.full(shared.q_ring[i]);
      if (tile.last >= tile.first) {
        ptx::mbarrier_arrive_expect_tx(full, Queries::BYTES);
        Queries::load(ptx::smem_address(shared.q[0][i].data) + q.slot * (CONSUMERS * Queries::BYTES), p.q, full,
                      first_q(p, tile) + tile.row + 64 * i, tile.head, batch_of(tile));
      } else {
        ptx::mbarrier_arrive(full);
      }
    }
    q.advance();
  }

  DEVICE void load_k(const Block &block) {
    k.wait_empty(shared.k_ring);
    const u32 full = k.full(shared.k_ring);
    ptx::mbarrier_arrive_expect_tx(full, Keys::BYTES);
    Keys::load(ptx::smem_address(shared.k[0].data) + k.slot * Keys::BYTES, p.k, full, block.row, block.head,
               block.batch);
    k.advance();
  }

  // V of 8-bit elements lands elsewhere first; V with rows beyond its sequence is full when they are cleared.
  template <class S>
  DEVICE void load_v(S &shared, const Block &block) {
    if constexpr (FP8) {
      v.wait_empty(shared.landing.ring);
      shared.landing.rows[v.slot] = block.rows;
      load_v(shared.landing.v[0], block, v.full(shared.landing.ring));
    } else {
      v.wait_empty(shared.v_ring);
      load_v(shared.v[0], block, full_v(shared, block.rows));
    }
  }
  template <class To>
  DEVICE void load_v(To &first, const Block &block, u32 full) {
    ptx::mbarrier_arrive_expect_tx(full, To::BYTES);
    To::load(ptx::smem_address(first.data) + v.slot * To::BYTES, p.v, full, block.row, block.head, block.batch);
    v.advance();
  }

  // The barrier that the bytes of V count towards.
  template <class S>
  DEVICE u32 full_v(S &shared, int rows) {
    if constexpr (VARIES) {
      if (rows < BLOCK_K) return announce_tail(shared, v.slot, rows);
    }
    return v.full(shared.v_ring);
  }

  // Tells which slot of V is to be cleared beyond some rows, when it has landed.
  template <class S>
  DEVICE u32 announce_tail(S &shared, int slot, int rows) {
    tail.wait_empty(shared.tail.ring);
    const u32 full = tail.full(shared.tail.ring);
    shared.tail.slot = slot, shared.tail.rows = rows;
    tail.advance();
    return full;
  }

  // Tells the warps that work on V that none comes any more.
  template <class S>
  DEVICE void end_v(S &shared) {
    if constexpr (FP8) {
      v.wait_empty(shared.landing.ring);
      shared.landing.rows[v.slot] = 0;
      ptx::mbarrier_arrive(v.full(shared.landing.ring));
    } else if constexpr (VARIES) {
      ptx::mbarrier_arrive(announce_tail(shared, NONE, 0));
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

  DEVICE void run() {
    Block late = {NONE};  // the V that follows the next K
    const auto catch_up = [&] {
      if (late.row != NONE) load_v(shared, late);
      late.row = NONE;
    };
    Tile tile;
    for (int number = blockIdx.x, following; next(shared, number, tile); number = following) {
      following = LOOKS<Mask> ? 0 : after(number);
      const int head = tile.head / (p.heads_q / p.heads_k);
      describe(tile, head);
      walk_of(p, tile, mask_of(shared, tile), tile.row, BLOCK_Q, tile.last, tile.first);
      const bool empty = tile.last < tile.first;
      if (Q_BUFFERS > 1 || empty) announce(tile);
      if (empty) catch_up();
      for (int key = tile.last; key >= tile.first; key -= BLOCK_K) {
        const Block block = {first_k(p, tile) + key, head, batch_of(tile), len_k(p, tile) - key};
        load_k(block);
        catch_up();
        if (Q_BUFFERS == 1 && key == tile.last) announce(tile);  // its Q waits longest for its room
        late = block;
        if constexpr (FP8) catch_up();
      }
      if (LOOKS<Mask>) catch_up();  // the scout may still look
    }
    tile = {};
    tile.row = NONE, tile.last = -1;
    announce(tile);
    catch_up();
    end_v(shared);
    if (p.tickets && ptx::atomic_inc(p.tickets + 1, gridDim.x - 1) == gridDim.x - 1) p.tickets[0] = 0;
  }
};

// A warp that draws tiles and makes the modifiers of each, whose mask looks at ids, while the producer loads for the
// one before. When it has announced that, no consumer needs the modifiers of more than two others any more.
struct Scout : Finder {
  using Finder::Finder;

  template <class S>
  DEVICE void run(S &shared) {
    if constexpr (LOOKS<Mask>) {
      Cursor<1> sight;
      Tile tile;
      int number = blockIdx.x;
      for (u32 found = 0; find(number, tile); ++found) {
        Modifiers &modifiers = shared.kept.modifiers[found % TILES];
        if (ptx::lane() == 0) shared.sight.tile = tile, modifiers = Modifiers(p, tile);
        ptx::warp_barrier();  // the first lane has made them
        look(modifiers.mask, tile.row, min(tile.row + BLOCK_Q, len_q(p, tile)), OneWarp());
        if (ptx::lane() == 0) ptx::mbarrier_arrive(sight.full(shared.sight.ring));
        sight.advance();
        sight.wait_empty(shared.sight.ring);
        number = ptx::uniform(ptx::lane() ? 0 : after(number));
      }
      if (ptx::lane() == 0) {
        shared.sight.tile.row = NONE;
        ptx::mbarrier_arrive(sight.full(shared.sight.ring));
      }
    }
  }
};

// A warp that clears the rows of V beyond their sequence, so that no weight of 0 meets what lies there.
template <class S>
DEVICE void clear_tails(S &shared) {
  if constexpr (VARIES && !FP8) {
    Cursor<1> tail;
    for (;;) {
      tail.wait_full(shared.tail.ring);
      const int slot = shared.tail.slot, rows = shared.tail.rows;
      if (slot == NONE) return;
      clear_rows(shared.v[slot], rows, BLOCK_K, ptx::lane());
      ptx::fence_proxy_async();  // wgmma reads through the asynchronous proxy
      ptx::warp_barrier();
      if (ptx::lane() == 0) {
        ptx::mbarrier_arrive(ptx::smem_address(&shared.v_ring.full[slot]));
        ptx::mbarrier_arrive(tail.empty(shared.tail.ring));
      }
      tail.advance();
    }
  }
}

// A warp that transposes V of 8-bit elements on its way to the consumers.
template <class S>
DEVICE void transpose_v(S &shared, int warp) {
  if constexpr (FP8) {
    Cursor<LANDINGS> landed;
    Cursor<V_STAGES> v;
    for (;;) {
      landed.wait_full(shared.landing.ring);
      const int rows = shared.landing.rows[landed.slot];
      if (rows == 0) return;
      if (VARIES && rows < BLOCK_K) {  // see clear_tails
        clear_share(shared.landing.v[landed.slot], rows, warp, TRANSPOSERS, ptx::lane());
        ptx::warp_barrier();
      }
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
