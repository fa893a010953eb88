// What the roles of attention_fwd_sm90 share: its configuration, parameters, shared memory and tiles.
#pragma once
#include "masks/mask.cuh"
#include "ptx/tma.cuh"
#include "scores/score.cuh"
#include "tile/dropout.cuh"
#include "tile/fp8.cuh"
#include "tile/ring.cuh"
#include "tile/sequences.cuh"
#include "tile/sink.cuh"
#include "tile/warpgroup.cuh"

namespace forward {

using T = Config::T;
using Mask = Config::Mask;
using Score = Config::Score;
using Dropout = Config::Dropout;
using Sink = Config::Sink;
using Sequences = Config::Sequences;
using Element = T::Storage;
using Output = T::Output;
constexpr bool FP8 = sizeof(Element) == 1;
constexpr int HEAD_DIM = Config::HEAD_DIM, HEAD_DIM_V = Config::HEAD_DIM_V, BLOCK_K = Config::BLOCK_K;
constexpr int CONSUMERS = Config::CONSUMERS, BLOCK_Q = 64 * CONSUMERS, THREADS = 128 * (1 + CONSUMERS);
constexpr int K_STAGES = Config::K_STAGES, V_STAGES = Config::V_STAGES, Q_BUFFERS = Config::Q_BUFFERS;
constexpr bool STAGED = Q_BUFFERS > 1 && HEAD_DIM_V <= HEAD_DIM && !FP8;  // O leaves through the Q that it came from
constexpr int LANDINGS = Config::LANDINGS;                                // blocks of V on their way to be transposed
// Nothing acts on the scores but a mask of few numbers.
constexpr bool SMALL_MASK = sizeof(Mask) <= 16, PLAIN = Score::IDENTITY && !Dropout::DROPS && SMALL_MASK;
constexpr bool VARIES = Sequences::VARIES, PACKED = Sequences::PACKED;
static_assert(BLOCK_K % Wgmma<T>::K == 0, "key blocks are whole products");
static_assert(!Dropout::DROPS || BLOCK_K % 32 == 0, "random bits come for 32 keys at a time");

// What elements are multiplied by: a number for each batch entry and kv head.
struct Descale {
  const float *x;
  i64 batch, head;  // strides
};

// Packed arrays are those of one batch entry, len_q and len_k are their rows, and batch is the number of sequences.
struct Params {
  ptx::TensorMap q, k, v, o;   // (columns, rows, heads, batch); boxes of 128 bytes and 64, BLOCK_K, BLOCK_K, 16 rows
  Output::Storage *out;        // [batch, len_q, heads_q, head_dim_v]
  float *lse;                  // [batch, heads_q, len_q], packed [heads_q, len_q], contiguous; may be null
  u32 *tickets;                // two zeros, which the last block leaves as zeros; null: tiles in turn
  i64 o_batch, o_row, o_head;  // strides in elements; the last dimension's is 1
  Descale q_descale, k_descale, v_descale;  // of 8-bit elements
  int batch, len_q, len_k, heads_q, heads_k;
  int head_dim_v;  // the array's own, at most HEAD_DIM_V
  int group;       // heads that share the L2 cache, see Work
  float scale;     // softmax_scale; times log2(e) where nothing modifies scores: the softmax is in base 2
  Mask::Params mask;
  Score::Params score;
  Dropout::Params dropout;
  Sink::Params sink;
  Sequences::Params sequences;
};

using Queries = Panels<Element, 64, HEAD_DIM>;  // of one consumer
using Keys = Panels<Element, BLOCK_K, HEAD_DIM>;
using Values = Wgmma<T>::template Values<BLOCK_K, HEAD_DIM_V>;
// Warps of the producer that transpose V of 8-bit elements, beside the scout if there is one.
constexpr int TRANSPOSERS = LOOKS<Mask> ? 2 : 3;

// A tile of the output, as the producer announces it: its first row, and the key blocks that some rows of it see, from
// the one at key `last` down to the one at key `first`.
template <bool VARIES>
struct TileOf {
  int row, head, batch;  // row is NONE after the last tile
  int last, first;       // no blocks when last < first
  float scale, scale_v;  // of scores and of O, of 8-bit elements
};
template <>
struct TileOf<true> : TileOf<false> {
  Span q, k;     // its sequence
  bool of_none;  // its rows are no sequence's, unless the bounds of packed sequences fall
};
using Tile = TileOf<VARIES>;

// The sequence of a tile; its queries may extend beyond the length in use.
template <class Tile>
DEVICE Span queries_of(const Params &p, const Tile &tile) {
  if constexpr (VARIES) {
    return tile.q;
  } else {
    return {0, p.len_q, p.len_q};
  }
}
template <class Tile>
DEVICE Span keys_of(const Params &p, const Tile &tile) {
  if constexpr (VARIES) {
    return tile.k;
  } else {
    return {0, p.len_k, p.len_k};
  }
}
template <class Tile>
DEVICE bool of_none(const Tile &tile) {
  if constexpr (VARIES) {
    return tile.of_none;
  } else {
    return false;
  }
}
DEVICE int len_q(const Params &p, const Tile &tile) { return queries_of(p, tile).length; }
DEVICE int len_k(const Params &p, const Tile &tile) { return keys_of(p, tile).length; }
DEVICE int extent(const Params &p, const Tile &tile) { return queries_of(p, tile).extent; }
// Where the sequence is in the arrays.
DEVICE int first_q(const Params &p, const Tile &tile) { return static_cast<int>(queries_of(p, tile).first); }
DEVICE int first_k(const Params &p, const Tile &tile) { return static_cast<int>(keys_of(p, tile).first); }
DEVICE int batch_of(const Tile &tile) { return PACKED ? 0 : tile.batch; }

// What acts on the scores and the weights of a tile.
struct Modifiers {
  Mask mask;
  Score score;
  Dropout dropout;

  DEVICE Modifiers(const Params &p, const Tile &tile)
      : mask(p.mask, tile.batch, tile.head, len_q(p, tile), len_k(p, tile)),
        score(p.score, tile.batch, tile.head, len_q(p, tile), len_k(p, tile)),
        dropout(p.dropout, tile.batch, tile.head) {}
};

constexpr int NONE = -1;
constexpr int COLUMNS = HEAD_DIM > 192 ? 8 : 16;  // of S that are modified at a time
constexpr bool WARPWISE = FP8;                    // turns are those of a warp, and not of a warpgroup
constexpr u32 TURN_THREADS = WARPWISE ? 2 * 32 : 2 * 128;
// The named barriers; 0 is that of all threads.
constexpr u32 FIRST_TURN = 1, FIRST_CLEARED = FIRST_TURN + CONSUMERS * (WARPWISE ? 4 : 1);
static_assert(FIRST_CLEARED + CONSUMERS <= 16, "a block has sixteen barriers");
constexpr float SMALLEST_NORMAL = 1.17549435e-38f;
constexpr int TILES = 4;  // those of the Q in buffers, the one before, whose O is stored, and the next

// A block of V with rows beyond its sequence, on its way to the warp that makes them zeros: 0 x NaN would reach O.
template <bool EXISTS>
struct Tail {
  DEVICE void init() {}
};
template <>
struct Tail<true> {
  Ring<1> ring;
  int slot, rows;  // of V, and those that are the sequence's; slot is NONE after the last

  DEVICE void init() { ring.init(1); }
};

// The tile that the scout has found, of row NONE after the last.
template <bool EXISTS>
struct Sight {
  DEVICE void init() {}
};
template <>
struct Sight<true> {
  Ring<1> ring;
  Tile tile;

  DEVICE void init() { ring.init(1); }
};

// The modifiers of the tiles, kept here where they are more than a mask: S, P and O leave no registers for them.
template <bool EXISTS>
struct Kept {};
template <>
struct Kept<true> {
  alignas(1024) Modifiers modifiers[TILES];
};

struct Shared {
  Queries q[Q_BUFFERS][CONSUMERS];
  Keys k[K_STAGES];
  Values v[V_STAGES];
  Landing<Element, BLOCK_K, HEAD_DIM_V, LANDINGS> landing;
  Ring<Q_BUFFERS> q_ring[CONSUMERS];
  Ring<K_STAGES> k_ring;
  Ring<V_STAGES> v_ring;
  Tile tile[TILES];  // the i-th tile of this block is at i % TILES
  Tail<VARIES && !FP8> tail;
  Sight<LOOKS<Mask>> sight;
  Kept<!PLAIN> kept;
};

static_assert(sizeof(Shared) == Config::SMEM_BYTES, "the host computes the same size");
static_assert(sizeof(Params) == Config::PARAMS_BYTES, "the host packs the same struct");
static_assert(MaskPolicy<Mask>, "a mask answers the four questions of masks/mask.cuh");
static_assert(ScorePolicy<Score>, "a score modifier is as scores/score.cuh says");
static_assert(V_STAGES + LANDINGS >= ((CONSUMERS - 1) * 64 + BLOCK_K - 1) / BLOCK_K + (Q_BUFFERS == 1 || LOOKS<Mask>),
              "else consumers that see other blocks than each other wait for each other");

// The key blocks that rows of a tile see.
DEVICE void walk_of(const Params &p, const Tile &tile, const Mask &mask, int q, int rows, int &last, int &first) {
  const Range keys = mask.keys(q, min(q + rows, len_q(p, tile)));
  first = keys.begin / BLOCK_K * BLOCK_K;
  last = keys.end > keys.begin && q < len_q(p, tile) ? (keys.end - 1) / BLOCK_K * BLOCK_K : first - BLOCK_K;
}

DEVICE int tiles_of(int rows) { return (rows + BLOCK_Q - 1) / BLOCK_Q; }

}  // namespace forward
