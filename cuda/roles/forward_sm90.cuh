// What the roles of attention_fwd_sm90 share: its configuration, parameters, shared memory and tiles.
#pragma once
#include "masks/mask.cuh"
#include "ptx/tma.cuh"
#include "tile/fp8.cuh"
#include "tile/ring.cuh"
#include "tile/warpgroup.cuh"

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
constexpr int LANDINGS = Config::LANDINGS;                                // blocks of V on their way to be transposed
constexpr int PARKING = Config::PARKING;  // key blocks between two parkings of O, see tile/fp8.cuh; 0: none
static_assert(BLOCK_K % Wgmma<T>::K == 0, "key blocks are whole products");

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
  Landing<Element, BLOCK_K, HEAD_DIM_V, LANDINGS> landing;
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

}  // namespace forward
