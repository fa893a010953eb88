// What the roles of attention_bwd_sm90 share: its configuration, parameters, shared memory, and the walk of a block.
#pragma once
#include "masks/mask.cuh"
#include "ptx/atomic.cuh"
#include "ptx/tma.cuh"
#include "scores/score.cuh"
#include "tile/dropout.cuh"
#include "tile/ring.cuh"
#include "tile/sink.cuh"
#include "tile/stat_rows.cuh"
#include "tile/warpgroup.cuh"
#include "tile/work.cuh"

namespace backward {

using T = Config::T;
using Mask = Config::Mask;
using Score = Config::Score;
using Dropout = Config::Dropout;
using Sink = Config::Sink;
using Sequences = Config::Sequences;
using Element = T::Storage;
constexpr int HEAD_DIM = Config::HEAD_DIM, BLOCK_Q = Config::BLOCK_Q;
// Consumers share the keys of a block, or, where dK and dV of 64 keys are more than the registers of one, their
// columns.
constexpr bool WIDE = HEAD_DIM > 128;
constexpr int CONSUMERS = 2, BLOCK_K = WIDE ? 64 : 64 * CONSUMERS, THREADS = 128 * (1 + CONSUMERS);
constexpr int HALVES = BLOCK_Q / 64;  // of a query block: products are 64 queries wide
constexpr int STAGES = 2;             // query blocks in shared memory at a time
constexpr bool VARIES = Sequences::VARIES, PACKED = Sequences::PACKED;
constexpr bool DETERMINISTIC = Config::DETERMINISTIC;  // dQ is summed in a fixed order
constexpr bool SPLITS = Config::SPLITS;                // the last keys have several blocks, which share their walk
constexpr bool FINISHES = Config::FINISHES;            // who adds the last part to dQ makes it: there is no other step
constexpr int PART = BLOCK_Q * HEAD_DIM / CONSUMERS;   // numbers of dQ of a query block that one accumulates
static_assert(WIDE ? BLOCK_Q == 64 : PART == 4096, "products are 64 queries and 64 columns of dQ wide");
static_assert(!SPLITS || !(DETERMINISTIC || WIDE || VARIES), "shares of a walk begin anywhere");
static_assert(!FINISHES || (DETERMINISTIC && !(WIDE || VARIES)), "it is known which part is the last");
static_assert(BLOCK_Q / ADDED_ROWS >= 2 * CONSUMERS, "each consumer has two counters of the sums of a query block");

// Packed arrays are those of one batch entry, len_q and len_k are their rows, and batch is the number of sequences.
struct Params {
  ptx::TensorMap q, dout;         // (columns, rows, heads, batch); boxes of 128 bytes and BLOCK_Q rows
  ptx::TensorMap k, v;            // boxes of BLOCK_K rows
  ptx::TensorMap dk, dv;          // boxes of 64 rows
  Element *dk_rows, *dv_rows;     // the same arrays
  Element *dq_rows;               // [batch, len_q, heads_q, head_dim]
  const float *lse_log2, *delta;  // [heads, stat_rows]: see attention_bwd_delta
  float *dq;                      // [heads, stat_rows, HEAD_DIM], in the order of fragments
  i64 dk_batch, dk_row, dk_head;  // strides in elements; the last dimension's is 1
  i64 dv_batch, dv_row, dv_head;
  i64 dq_batch, dq_row, dq_head;
  int batch, len_q, len_k, heads_q, heads_k;
  int head_dim, head_dim_v;  // the arrays' own, at most HEAD_DIM
  int stat_rows;             // see tile/stat_rows.cuh
  int group;                 // kv heads whose arrays share the L2 cache
  int sharers;               // query heads of a kv head
  int wholes, shares;        // blocks of keys that one block walks, which come first; blocks that share each other walk
  float scale_log2, scale;   // softmax_scale * log2(e), and softmax_scale
  alignas(8) Mask::Params mask;
  Score::Params score;
  Dropout::Params dropout;
  Sink::Params sink;
  Sequences::Params sequences;
  float *partial;  // [split walks, shares, CONSUMERS, dV and dK, 64 x HEAD_DIM], in the order of fragments
  u32 *came;       // [split walks, CONSUMERS]: shares whose sums are there
  u32 *added;  // [heads, stat_rows / ADDED_ROWS] and the number of the next block; null if WIDE, unless DETERMINISTIC
};

using Queries = Panels<Element, BLOCK_Q, HEAD_DIM>;  // and those of dO
using Keys = Panels<Element, BLOCK_K, HEAD_DIM>;     // and those of V
using Scores = Panels<Element, BLOCK_K, BLOCK_Q>;    // dS, a row for each key
constexpr int DQ_CHUNKS = 8;                         // of 8 columns

// The keys of this block.
struct Place {
  int batch, head_k;  // the batch entry, or the sequence
  int key;            // the first, in the sequence
  int split, share;   // which split walk it has a share of, or -1, and which share
  Span q, k;          // of the sequence
};

// A query block of one head.
struct Block {
  int head, q;  // the first query
};
constexpr int BLOCKS = 4;  // those under way: of the dQ that leaves, of P, of the scores, and the next

// What becomes of a consumer's part of dQ of a query block: it is added to others in global memory, or it is the last
// and makes dQ with the sum of the others, if there are any.
enum class Fate { ADDED, LAST, ALONE };

// What one consumer tells the other, and what it leaves for the producer: numbers in the order of fragments.
template <bool WIDE>
struct Passed {
  alignas(128) float dq[CONSUMERS][DQ_CHUNKS][128][4];
  Ring<1> dq_ring[CONSUMERS];
  // Where the last part makes dQ, known when the slot is empty, with the sum of the others in it.
  Fate fate[CONSUMERS];
  Element *rows[CONSUMERS];  // of dQ that the part is of
  int count[CONSUMERS];      // that exist

  DEVICE void init() {
    for (auto &ring : dq_ring) ring.init(1, 4);
  }
};
template <>
struct Passed<true> {
  alignas(128) float p[8][128][4];
  Ring<1> p_ring;

  DEVICE void init() { p_ring.init(4, 4); }
};

// A tile with rows beyond its sequence, on its way to the warp that makes them zeros.
template <bool EXISTS>
struct Tail {
  DEVICE void init() {}
};
template <>
struct Tail<true> {
  Ring<1> ring;
  unsigned char *data;    // of the tile; null after the last
  int panels, rows, end;  // rows from `rows` on are not the sequence's, the tile has `end`
  u32 full;               // the barrier of those who wait for the tile

  DEVICE void init() { ring.init(1); }
};

// Leave for consumers that add to dQ themselves, where that has a fixed order: full when a consumer may add its part of
// a query block, empty when it has.
template <bool EXISTS>
struct Leave {
  DEVICE void init() {}
  DEVICE void await(u32, int) const {}
  DEVICE void end(u32, int) const {}
};
template <>
struct Leave<true> {
  Ring<1> ring[CONSUMERS];

  DEVICE void init() {
    for (auto &one : ring) one.init(4);
  }
  DEVICE void await(u32 number, int group) const { Cursor<1>(number).wait_full(ring[group]); }
  DEVICE void end(u32 number, int group) const {
    ptx::warp_barrier();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Cursor<1>(number).empty(ring[group]));
  }
};

struct Shared {
  Keys k, v;
  Queries q[STAGES], dout[STAGES];
  Scores ds[2];
  Passed<WIDE> passed;
  alignas(16) float lse_log2[STAGES][BLOCK_Q], delta[STAGES][BLOCK_Q];
  Ring<STAGES> q_ring, dout_ring;
  Ring<2> ds_ring;
  Ring<1> k_ring, v_ring;
  Tail<VARIES> tail;
  Block block[BLOCKS];  // the i-th query block of the walk is at i % BLOCKS
  Place place;
  u32 blocks;           // of the walk
  u32 came[CONSUMERS];  // shares of it before this one
  Leave<WIDE && DETERMINISTIC> leave;
};

static_assert(sizeof(Shared) == Config::SMEM_BYTES, "the host computes the same size");
static_assert(sizeof(Params) == Config::PARAMS_BYTES, "the host packs the same struct");
static_assert(MaskPolicy<Mask> && Mask::INTERVALS, "a key is seen by the queries of an interval");
static_assert(Score::IDENTITY && !Dropout::DROPS, "scores have keys in rows, where modifiers take them in columns");

// Which tile a block has.
template <bool ROLLS>
struct OrderOf {
  const int tiles, heads, batches, group;

  DEVICE Work at(u32 index) const {
    Work work(index, tiles, heads, batches, group);
    work.tile = tiles - 1 - work.tile;  // Work begins with the last
    return work;
  }
};
template <>
struct OrderOf<true> {
  const RollingOrder order;

  DEVICE OrderOf(int tiles, int heads, int batches, int group) : order(tiles, heads, batches, group) {}
  DEVICE RollingWork at(u32 index) const { return {order, index}; }
};

// Blocks of keys run roughly in the order of their index. Heads go in groups whose arrays fit the L2 cache together;
// inside a group the first keys come first, since under a causal mask those have most queries, and heads alternate
// fastest; where dQ has a fixed order groups overlap. Packed sequences have as many slots for blocks as their rows may
// need wherever they begin, see tile/place.cuh. What blocks have in common is computed before a block has its number.
using Order = OrderOf<DETERMINISTIC>;
DEVICE Order order_of(const Params &p) {
  const int blocks = PACKED ? p.len_k / BLOCK_K + p.batch + 2 : (p.len_k + BLOCK_K - 1) / BLOCK_K;
  return {blocks, p.heads_k, PACKED ? 1 : p.batch, p.group};
}

// By a full warp.
template <class Sequences>
DEVICE Place place_of(const Params &p, const typename Sequences::Params &sequences, const Order &order, u32 index) {
  constexpr bool PACKED = Sequences::PACKED;
  Place place;
  place.split = -1, place.share = 0;
  if (SPLITS && index >= static_cast<u32>(p.wholes)) {
    const u32 at = index - p.wholes, split = at / p.shares;
    place.split = static_cast<int>(split), place.share = static_cast<int>(at - split * p.shares);
    index = p.wholes + split;
  }
  const auto work = order.at(index);
  place.head_k = work.head;
  if constexpr (PACKED) {
    const auto slot = [&](int i) {
      return static_cast<int>(i == 0 ? 0 : sequences.cu_k.clipped(i - 1, 0, p.len_k) / BLOCK_K) + i;
    };
    const int i = last_at_most(work.tile, p.batch + 2, slot, ptx::lane());
    const int b = i == 0 ? p.batch : i <= p.batch ? i - 1 : i;  // before the first, a sequence, or after the last
    place.batch = b, place.key = (work.tile - slot(i)) * BLOCK_K;
    place.q = b < p.batch ? Sequences::queries(sequences, b, p.batch, p.len_q) : Span{0, 0, 0};
    place.k = Sequences::every_keys(sequences, b, p.batch, p.len_k);
  } else {
    place.batch = work.batch, place.key = work.tile * BLOCK_K;
    place.q = Sequences::queries(sequences, place.batch, p.batch, p.len_q);
    place.k = Sequences::keys(sequences, place.batch, p.len_k);
  }
  return place;
}
DEVICE int batch_of(const Place &place) { return PACKED ? 0 : place.batch; }
// Where a row of the sequence is in the arrays.
DEVICE int row_of(const Span &span, int row) { return static_cast<int>(span.first) + row; }

// The queries of a head that see one of BLOCK_K keys, from the first of a query block on. Those of later keys begin and
// end no earlier.
DEVICE Range queries_of(const Params &p, const Place &place, int head, int key) {
  const Mask mask(p.mask, place.batch, head, place.q.length, place.k.length);
  const Range seen = mask.queries(key, min(key + BLOCK_K, place.k.length));
  return {seen.begin / BLOCK_Q * BLOCK_Q, min(seen.end, place.q.length)};
}

// The query blocks that see a key of the block, head after head of its group. Where blocks of keys see the same
// queries, each begins at another, so that they do not add to one dQ at once, and goes on from the first after the
// last. A share of a split walk is some of them.
struct HeadsWalk {
  const Params &p;
  const Place &place;
  Block block;
  int begin, end, start;  // of the head's queries, and where the walk of them starts

  DEVICE HeadsWalk(const Params &p, const Place &place) : p(p), place(place) {
    block.head = place.head_k * p.sharers;
    enter();
    if constexpr (SPLITS) {
      left = all();
      if (place.split >= 0) {
        const u32 before = left * place.share / p.shares;
        left = left * (place.share + 1) / p.shares - before;
        skip(before);
      }
    }
  }

  // How many there are, from here on.
  DEVICE u32 count() const { return SPLITS ? left : all(); }
  DEVICE bool done() const { return SPLITS ? left == 0 : after_last(); }
  DEVICE void advance() {
    if constexpr (SPLITS) --left;
    block.q += BLOCK_Q;
    if (block.q >= end) block.q = begin;
    if (block.q == start) next_head();
  }
  DEVICE void next_head() { ++block.head, enter(); }

 private:
  u32 left = 0;  // of the share

  DEVICE u32 all() const {
    u32 blocks = 0;
    for (HeadsWalk walk = *this; !walk.after_last(); walk.next_head()) blocks += walk.of_head();
    return blocks;
  }
  DEVICE u32 of_head() const { return (end - begin + BLOCK_Q - 1) / BLOCK_Q; }
  DEVICE bool after_last() const { return block.head == (place.head_k + 1) * p.sharers; }

  // From the first block on.
  DEVICE void skip(u32 blocks) {
    for (; !after_last() && blocks >= of_head(); next_head()) blocks -= of_head();
    block.q += blocks * BLOCK_Q;
    if (block.q >= end) block.q -= of_head() * BLOCK_Q;
  }

  DEVICE void enter() {
    for (; !after_last(); ++block.head) {
      if (place.key >= place.k.length) continue;
      const Range seen = queries_of(p, place, block.head, place.key);
      begin = seen.begin, end = seen.end;
      if (begin >= end) continue;
      const int blocks = (end - begin + BLOCK_Q - 1) / BLOCK_Q;
      start = block.q = begin == 0 ? place.key / BLOCK_K % blocks * BLOCK_Q : begin;
      return;
    }
  }
};

// The same from the last query block to the first, with all heads of the group at each: a block of keys that adds to dQ
// after those of earlier keys reaches no query block before they do if all walk alike. Masks of intervals are the same
// for all heads.
struct OrderedWalk {
  Block block;
  int first_head, end_head;
  u32 left;  // query blocks, this one too

  DEVICE OrderedWalk(const Params &p, const Place &place) {
    const int heads = p.sharers;
    first_head = place.head_k * heads, end_head = first_head + heads;
    const Range seen = place.key < place.k.length ? queries_of(p, place, first_head, place.key) : Range{0, 0};
    left = seen.begin < seen.end ? (seen.end - seen.begin + BLOCK_Q - 1) / BLOCK_Q * heads : 0;
    block = {first_head, (seen.end - 1) / BLOCK_Q * BLOCK_Q};
  }

  DEVICE u32 count() const { return left; }
  DEVICE bool done() const { return left == 0; }
  DEVICE void advance() {
    --left;
    if (++block.head == end_head) block = {first_head, block.q - BLOCK_Q};
  }
};

template <bool DETERMINISTIC>
struct WalkOf {
  using Type = HeadsWalk;
};
template <>
struct WalkOf<true> {
  using Type = OrderedWalk;
};
using Walk = WalkOf<DETERMINISTIC>::Type;

// Where a block's numbers are in lse, delta and, times HEAD_DIM, in dq.
DEVICE i64 stat_of(const Params &p, const Place &place, const Block &block) {
  return stat_row<Sequences>(place.q, place.batch, block.head, p.heads_q, p.stat_rows) + block.q;
}

// The index of this block: blocks that wait for each other take numbers, so that the earlier ones have begun. For a
// warp's first lane.
DEVICE int index_of_block(const Params &p) {
  if constexpr (DETERMINISTIC) {
    const i64 heads = static_cast<i64>(p.heads_q) * (PACKED ? 1 : p.batch);
    int number = 0;
    if (ptx::lane() == 0) number = static_cast<int>(ptx::atomic_add(p.added + heads * p.stat_rows / ADDED_ROWS, 1));
    return number;
  }
  return static_cast<int>(blockIdx.x);
}

}  // namespace backward
