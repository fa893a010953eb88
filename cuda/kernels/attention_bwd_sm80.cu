// dK, dV and the sum of dQ for any GPU with mma.sync and cp.async (sm_80 and newer), from the statistics that
// attention_bwd_delta makes:
//
//   P = exp(S - LSE), S = modified and masked scale Q K^T      dP = dO V^T
//   dV = P^T dO       dS = P * (dP - delta) * dS/dT       dK = scale dS^T Q       dQ = scale dS K
//
// One block owns BLOCK_K keys of one head of K and V. It walks the queries that see them, of all heads that share these
// keys, BLOCK_Q at a time, with K and V in shared memory and dK and dV in registers; while a tile is computed, the next
// one is on its way. All products but that of dQ are transposed: their rows are keys. SHARERS warps share WARP_K keys:
// each makes P^T and dS^T for its part of the queries, if it has one, then sums its columns of dK and dV over all. dS
// also goes through shared memory to the product of dQ, one tile later, which is added to global memory. The schedule
// and the measurements are in docs/kernels/attention_bwd_sm80.md.
//
// Reads Config: T, the policies Mask, Score, Dropout, Sink and Sequences, Order (of the sums of dQ), HEAD_DIM,
// HEAD_DIM_V, BLOCK_Q, BLOCK_K, WARP_Q, WARP_K, SHARERS, WARPS_Q, STAGES, DS_BUFFERS, MIN_BLOCKS, WIDTH, DETERMINISTIC,
// NATURAL (of the LSE), PARAMS_BYTES, SMEM_BYTES.
#include "masks/mask.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/group.cuh"
#include "ptx/math.cuh"
#include "scores/score.cuh"
#include "tile/drop.cuh"
#include "tile/fragment.cuh"
#include "tile/load.cuh"
#include "tile/place.cuh"
#include "tile/stat_rows.cuh"
#include "tile/sums.cuh"

namespace backward {

using T = Config::T;
using Mask = Config::Mask;
using Score = Config::Score;
using Dropout = Config::Dropout;
using Sequences = Config::Sequences;
using Order = Config::Order;
using Element = T::Storage;
constexpr int HEAD_DIM = Config::HEAD_DIM, HEAD_DIM_V = Config::HEAD_DIM_V;
constexpr int BLOCK_Q = Config::BLOCK_Q, BLOCK_K = Config::BLOCK_K, WARP_Q = Config::WARP_Q, WARP_K = Config::WARP_K;
constexpr int SHARERS = Config::SHARERS, STAGES = Config::STAGES, WIDTH = Config::WIDTH;
constexpr int GROUPS = BLOCK_K / WARP_K, WARPS = GROUPS * SHARERS, THREADS = WARPS * 32;
// How many of the warps that share keys make P and dS, and of how many queries each, WARP_Q at a time.
constexpr int MAKERS = SHARERS == 1 ? 1 : BLOCK_Q / WARP_Q, PART_Q = BLOCK_Q / MAKERS;
constexpr int PART = HEAD_DIM / SHARERS, PART_V = HEAD_DIM_V / SHARERS;  // the columns of dK and dV that it sums
// Its share of dQ, and the columns that it makes at a time: the planes of fp32 leave no registers for more.
constexpr int SUM_Q = BLOCK_Q / Config::WARPS_Q, SUM_D = HEAD_DIM * Config::WARPS_Q / WARPS;
constexpr int SUM_STEP = T::PLANES == 1 ? SUM_D : SUM_D % 32 == 0 ? 32 : 16;

struct Params {
  const Element *q;            // [batch, len_q, heads_q, head_dim]
  const Element *k;            // [batch, len_k, heads_k, head_dim]
  const Element *v;            // [batch, len_k, heads_k, head_dim_v]
  const Element *dout;         // [batch, len_q, heads_q, head_dim_v]
  Element *dk;                 // like k
  Element *dv;                 // like v
  const float *lse;            // [heads, rows] of tile/stat_rows.cuh, and in its units
  const float *delta;          // likewise
  float *dq;                   // [heads, rows, HEAD_DIM], in that Order
  u32 *added;                  // [heads, rows / ADDED_ROWS] and the number of the next block; only if DETERMINISTIC
  i64 q_batch, q_row, q_head;  // strides in elements; the last dimension's is 1
  i64 k_batch, k_row, k_head;
  i64 v_batch, v_row, v_head;
  i64 dout_batch, dout_row, dout_head;
  i64 dk_batch, dk_row, dk_head;
  i64 dv_batch, dv_row, dv_head;
  int batch, len_q, len_k, heads_q, heads_k;
  int head_dim, head_dim_v;  // the arrays' own, at most HEAD_DIM and HEAD_DIM_V
  int rows;                  // of a head among the statistics
  int group;                 // heads of keys that share the L2 cache, see Work
  float scale_lse, scale;    // softmax_scale in the units of the LSE, and softmax_scale
  alignas(8) Mask::Params mask;
  Score::Params score;
  Dropout::Params dropout;
  Config::Sink::Params sink;  // in the LSE: unused here
  Sequences::Params sequences;
};

// dP is summed onto -delta, so that dS = P dP; fp32 subtracts delta from the sum, which tensor cores truncate.
constexpr bool ONTO_DELTA = T::PLANES == 1 && !Dropout::DROPS;

// fp32 elements are split into planes by the warps that read them: three planes of everything would not fit.
template <class Type, int ROWS, int COLUMNS>
struct StoredAs {
  using Tile = Operand<Type, ROWS, COLUMNS>;
};
template <int ROWS, int COLUMNS>
struct StoredAs<Float32, ROWS, COLUMNS> {
  using Tile = RawOperand<Float32, ROWS, COLUMNS>;
};
template <int ROWS, int COLUMNS>
using Stored = StoredAs<T, ROWS, COLUMNS>::Tile;

struct Queries {
  Stored<BLOCK_Q, HEAD_DIM> q;
  Stored<BLOCK_Q, HEAD_DIM_V> dout;
};

struct Statistics {
  alignas(16) float lse[BLOCK_Q], delta[BLOCK_Q];
};

struct Inputs {
  Stored<BLOCK_K, HEAD_DIM> k;
  Stored<BLOCK_K, HEAD_DIM_V> v;
  Queries queries[STAGES];
  Statistics statistics[2];
  Stored<BLOCK_K, BLOCK_Q> ds[Config::DS_BUFFERS + (SHARERS > 1)];  // dS^T; P^T for the other sharers is the last
};

struct Outputs {
  Staging<T, BLOCK_K, HEAD_DIM> dk;
  Staging<T, BLOCK_K, HEAD_DIM_V> dv;
};

// A tile of queries, from q on, of one head; there is none when end <= q.
struct Step {
  int head, q, end;

  DEVICE bool there() const { return q < end; }
};

struct Shared {
  union {
    Inputs in;
    Outputs out;  // when the last product has read the inputs
  };
  // Kept here because dK, dV and S leave no registers for it.
  KeyPlace place;
  Step steps[4];  // of the walk: the one that is computed, one before it and two after
  u32 block;
  bool waits;  // for blocks of earlier keys; those two only if DETERMINISTIC
};

static_assert(sizeof(Shared) == Config::SMEM_BYTES, "the host computes the same size");
static_assert(sizeof(Params) == Config::PARAMS_BYTES, "the host packs the same struct");
static_assert(MAKERS <= SHARERS, "sharers make their part of the queries at once");
static_assert(SUM_D % 16 == 0 && PART % 16 == 0 && PART_V % 16 == 0, "products are made of 16 columns");
static_assert(STAGES == 1 || STAGES == 2, "the next tile is on its way while one is computed, or it is not");
static_assert(STAT_ROWS % BLOCK_Q == 0 && BLOCK_Q % ADDED_ROWS == 0, "tiles of queries are aligned stat rows");
static_assert(BLOCK_Q / 2 <= THREADS, "the threads load the statistics at once");
static_assert(MaskPolicy<Mask>, "a mask answers the four questions of masks/mask.cuh");
static_assert(ScorePolicy<Score>, "a score is what scores/score.cuh says");

using Scores = Fragment<WARP_K, WARP_Q>;  // transposed: rows are keys
using Weights = Rows<T, WARP_K>[WARP_Q / 16];
using SumK = Fragment<WARP_K, PART>;
using SumV = Fragment<WARP_K, PART_V>;

// What a warp does.
struct Warp {
  u32 lane;
  int index, group, sharer;

  DEVICE Warp() : lane(ptx::lane()), index(ptx::uniform(threadIdx.x / 32)) {
    group = index / SHARERS, sharer = index % SHARERS;
  }
};

DEVICE Mask mask_of(const Params &p, const KeyPlace &place, int head) {
  return Mask(p.mask, place.batch, head, place.q.length, place.k.length);
}

// The range of queries of a head that see keys of the block at k, as whole tiles begin. Ranges of later blocks begin
// and end no earlier.
DEVICE Range queries_of(const Params &p, const KeyPlace &place, int head, int k) {
  const int k_end = min(k + BLOCK_K, place.k.length);
  const Range range = mask_of(p, place, head).queries(k, k_end);
  return {range.begin / BLOCK_Q * BLOCK_Q, range.end};
}

// Goes to the next tile of queries, of this head or of the next one that has any.
DEVICE void advance(Step &step, const Params &p, const KeyPlace &place) {
  step.q += BLOCK_Q;
  const int heads = p.heads_q / p.heads_k, end = (place.head + 1) * heads;
  while (!step.there() && step.head + 1 < end) {
    const Range range = queries_of(p, place, ++step.head, place.k_begin);
    step.q = range.begin, step.end = range.end;
  }
}

DEVICE i64 stat_row_of(const Params &p, const KeyPlace &place, const Step &step) {
  return stat_row<Sequences>(place.q, place.batch, step.head, p.heads_q, p.rows) + step.q;
}

// Starts the copies of a tile of Q and dO and its statistics, the count-th of the walk.
DEVICE void load(const Params &p, Shared &shared, const KeyPlace &place, const Step &step, int count) {
  const int rows = place.q.length - step.q;
  Queries &queries = shared.in.queries[count % STAGES];
  const Element *q = p.q + start_of<Sequences>(place.q, place.batch, p.q_batch, p.q_row) + step.head * p.q_head;
  const Element *dout =
      p.dout + start_of<Sequences>(place.q, place.batch, p.dout_batch, p.dout_row) + step.head * p.dout_head;
  const u32 thread = threadIdx.x;
  load_rows<T, THREADS, WIDTH>(queries.q, q + step.q * p.q_row, p.q_row, rows, p.head_dim, thread);
  load_rows<T, THREADS, WIDTH>(queries.dout, dout + step.q * p.dout_row, p.dout_row, rows, p.head_dim_v, thread);
  const int i = threadIdx.x % (BLOCK_Q / 4) * 4;
  Statistics &statistics = shared.in.statistics[count % 2];
  const i64 row = stat_row_of(p, place, step) + i;
  if (threadIdx.x < BLOCK_Q / 4) {
    ptx::cp_async<16>(ptx::smem_address(&statistics.lse[i]), p.lse + row, true);
  } else if (threadIdx.x < BLOCK_Q / 2) {
    ptx::cp_async<16>(ptx::smem_address(&statistics.delta[i]), p.delta + row, true);
  }
}

// Starts the copies of the block's keys and values, and of the first tile of queries.
DEVICE void begin(const Params &p, Shared &shared, const KeyPlace &place, const Step &first) {
  const Element *k = p.k + start_of<Sequences>(place.k, place.batch, p.k_batch, p.k_row) + place.head * p.k_head;
  const Element *v = p.v + start_of<Sequences>(place.k, place.batch, p.v_batch, p.v_row) + place.head * p.v_head;
  const int rows = place.k.length - place.k_begin;
  const u32 thread = threadIdx.x;
  load_rows<T, THREADS, WIDTH>(shared.in.k, k + place.k_begin * p.k_row, p.k_row, rows, p.head_dim, thread);
  load_rows<T, THREADS, WIDTH>(shared.in.v, v + place.k_begin * p.v_row, p.v_row, rows, p.head_dim_v, thread);
  load(p, shared, place, first, 0);
}

// What a warp makes of a part of a tile: keys from k on, queries from q on.
struct Piece {
  int head, q, k;
  int column;  // of the tile, at q
};

// P^T, dropped, and dS^T as operands, from S^T = (Q K^T)^T and dP^T. Not WHOLE: some pairs are hidden or beyond the
// ends. Those have no weight and no gradient, whatever the arrays hold there.
template <bool WHOLE>
DEVICE void weigh(Weights &weights, Weights &gradients, const Scores &s, const Scores &dp, const Params &p,
                  const KeyPlace &place, const Statistics &statistics, const Mask &mask, const Piece &piece, u32 lane) {
  const Score score(p.score, place.batch, piece.head, place.q.length, place.k.length);
  const Dropout dropout(p.dropout, place.batch, piece.head);
  const Kept<Dropout, WARP_K, WARP_Q> kept(dropout, piece.q, piece.k, lane);
#pragma unroll
  for (int n = 0; n < WARP_Q / 8; ++n) {
    float lse[2], delta[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = piece.column + Scores::column(8 * n + j, lane);
      lse[j] = statistics.lse[column], delta[j] = statistics.delta[column];
    }
#pragma unroll
    for (int m = 0; m < WARP_K / 16; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int k = piece.k + Scores::row(2 * m + half, lane);
        float weight[2], gradient[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int q = piece.q + Scores::column(8 * n + j, lane);
          float x = s.x[m][n][2 * half + j], slope = 1.0f;
          if constexpr (Score::IDENTITY) {
            x = ptx::fma(x, p.scale_lse, -lse[j]);
          } else {
            x *= p.scale;
            slope = score.differentiate(x, q, k);
            x = ptx::fma(x, LSE_SCALE<Config::NATURAL>, -lse[j]);
          }
          const bool seen = WHOLE || (q < place.q.length && k < place.k.length && mask.keep(q, k));
          const float full = seen ? ptx::ex2(x * (LOG2_E / LSE_SCALE<Config::NATURAL>)) : 0.0f;
          const bool keeps = kept.at(2 * m + half, 8 * n + j);
          float ds = dp.x[m][n][2 * half + j];
          if constexpr (!ONTO_DELTA) ds = (keeps ? ds * rescale(dropout) : 0.0f) - delta[j];
          ds *= full * slope;
          weight[j] = keeps ? full : 0.0f;
          gradient[j] = WHOLE || full != 0.0f ? ds : 0.0f;
        }
        weights[n / 2].put(m, n % 2 * 2 + half, weight[0], weight[1]);
        gradients[n / 2].put(m, n % 2 * 2 + half, gradient[0], gradient[1]);
      }
  }
}

// P^T and dS^T of a piece.
DEVICE void score(Weights &weights, Weights &gradients, const Params &p, const Shared &shared, const KeyPlace &place,
                  const Queries &queries, const Statistics &statistics, const Piece &piece, const Warp &warp) {
  const Mask mask = mask_of(p, place, piece.head);
  const int k_end = piece.k + WARP_K, q_end = piece.q + WARP_Q;
  const Range range = mask.queries(piece.k, min(k_end, place.k.length));
  if (piece.k >= place.k.length || piece.q >= range.end || q_end <= range.begin) {
#pragma unroll
    for (int q = 0; q < WARP_Q / 16; ++q) weights[q] = gradients[q] = {};
    return;
  }
  // S^T = K Q^T, in fp32 rounded as the forward kernel's S is; dP^T = V dO^T
  const auto keys = [&](Rows<T, WARP_K> &rows, int column, u32 lane) {
    rows.load(shared.in.k, warp.group * WARP_K, column, lane);
  };
  const auto values = [&](Rows<T, WARP_K> &rows, int column, u32 lane) {
    rows.load(shared.in.v, warp.group * WARP_K, column, lane);
  };
  Scores s, low, dp;
  s.zero();
  low.zero();
  gather_transposed<(HEAD_DIM > SHORT_SUM)>(s, low, keys, queries.q, piece.column, warp.lane);
  join<T>(s, low);
  dp.each([&](float &value, int, int c) {
    value = ONTO_DELTA ? -statistics.delta[piece.column + Scores::column(c, warp.lane)] : 0.0f;
  });
  gemm_transposed(dp, values, queries.dout, piece.column, warp.lane);

  const bool whole = q_end <= place.q.length && k_end <= place.k.length && mask.whole(piece.q, q_end, piece.k, k_end);
  if (whole) {
    weigh<true>(weights, gradients, s, dp, p, place, statistics, mask, piece, warp.lane);
  } else {
    weigh<false>(weights, gradients, s, dp, p, place, statistics, mask, piece, warp.lane);
  }
}

// Adds what a tile of queries gives to dK and dV, and leaves its dS^T for dQ.
DEVICE void attend(SumK &dk, SumV &dv, const Params &p, Shared &shared, const KeyPlace &place, const Step &step,
                   int count, const Warp &warp) {
  const Queries &queries = shared.in.queries[count % STAGES];
  auto &ds = shared.in.ds[count % Config::DS_BUFFERS];
  const int key = warp.group * WARP_K;
  const bool makes = MAKERS == SHARERS || warp.sharer < MAKERS;
#pragma unroll 1
  for (int pass = 0; makes && pass < PART_Q; pass += WARP_Q) {
    const int column = warp.sharer * PART_Q + pass;
    const Piece piece{step.head, step.q + column, place.k_begin + key, column};
    Weights weights, gradients;
    score(weights, gradients, p, shared, place, queries, shared.in.statistics[count % 2], piece, warp);
#pragma unroll
    for (int q = 0; q < WARP_Q; q += 16) {
      gradients[q / 16].store(ds, key, column + q, warp.lane);
      if constexpr (SHARERS > 1) weights[q / 16].store(shared.in.ds[Config::DS_BUFFERS], key, column + q, warp.lane);
    }
    // dV += P^T dO, dK += dS^T Q
    gemm<WARP_Q>(
        dv, [&](Rows<T, WARP_K> &rows, int q) { rows = weights[q / 16]; }, queries.dout, column, warp.sharer * PART_V,
        warp.lane);
    gemm<WARP_Q>(
        dk, [&](Rows<T, WARP_K> &rows, int q) { rows = gradients[q / 16]; }, queries.q, column, warp.sharer * PART,
        warp.lane);
  }
  if constexpr (SHARERS > 1) {
    ptx::named_barrier_sync(1 + warp.group, SHARERS * 32);  // the other makers have stored their parts
#pragma unroll 1
    for (int other = makes ? 1 : 0; other < MAKERS; ++other) {
      const int column = (warp.sharer + other) % MAKERS * PART_Q;
      gemm<WARP_Q>(
          dv,
          [&](Rows<T, WARP_K> &rows, int q) {
            rows.load(shared.in.ds[Config::DS_BUFFERS], key, column + q, warp.lane);
          },
          queries.dout, column, warp.sharer * PART_V, warp.lane);
      gemm<WARP_Q>(
          dk, [&](Rows<T, WARP_K> &rows, int q) { rows.load(ds, key, column + q, warp.lane); }, queries.q, column,
          warp.sharer * PART, warp.lane);
    }
  }
}

// Waits until the blocks of earlier keys have added to the dQ of a tile; returns the number that says so.
DEVICE u32 wait_for_earlier(const Params &p, const Shared &shared, const KeyPlace &place, const Step &step) {
  u32 tile = place.k_begin / BLOCK_K;
  if (tile > 0) {
    const Range range = queries_of(p, place, step.head, place.k_begin - BLOCK_K);
    if (step.q < range.begin || step.q >= range.end) tile = 0;  // none of them has queries in this tile
  }
  if (threadIdx.x == 0 && shared.waits) ptx::acquire_when(p.added + stat_row_of(p, place, step) / ADDED_ROWS, tile);
  ptx::barrier();  // thread 0 has seen it
  return tile;
}

// Adds dS K of a tile of queries to dQ, SUM_STEP columns at a time.
DEVICE void sum_dq(const Params &p, Shared &shared, const KeyPlace &place, const Step &step, int count,
                   const Warp &warp) {
  const int row = warp.index % Config::WARPS_Q * SUM_Q, column = warp.index / Config::WARPS_Q * SUM_D;
  const auto &ds = shared.in.ds[count % Config::DS_BUFFERS];
  float *sums = p.dq + (stat_row_of(p, place, step) + row) * HEAD_DIM;
  u32 earlier = 0;
#pragma unroll 1
  for (int first = column; first < column + SUM_D; first += SUM_STEP) {
    Fragment<SUM_Q, SUM_STEP> dq;
    dq.zero();
    // dQ = dS K
    gemm<BLOCK_K>(
        dq, [&](Rows<T, SUM_Q> &rows, int k) { rows.load_transposed(ds, row, k, warp.lane); }, shared.in.k, 0, first,
        warp.lane);
    if (Config::DETERMINISTIC && first == column) earlier = wait_for_earlier(p, shared, place, step);
#pragma unroll
    for (int m = 0; m < SUM_Q / 16; ++m) {
      if (step.q + row + 16 * m >= place.q.length) continue;
#pragma unroll
      for (int n = 0; n < SUM_STEP / 8; ++n)
        add<Order, HEAD_DIM>(sums + 16 * m * HEAD_DIM, first / 8 + n, dq.x[m][n], warp.lane);
    }
  }
  if constexpr (Config::DETERMINISTIC) {
    ptx::barrier();  // every thread has added
    if (threadIdx.x == 0)
      ptx::release_add(p.added + stat_row_of(p, place, step) / ADDED_ROWS, place.k_begin / BLOCK_K + 1 - earlier);
  }
}

// Writes the block's rows of dK, or dV, from where its warps have staged them.
template <int COLUMNS>
DEVICE void store(Element *target, i64 stride, const Staging<T, BLOCK_K, COLUMNS> &staging, int rows, int columns,
                  const Warp &warp) {
  constexpr int SHARE = BLOCK_K / WARPS;
  const int first = warp.index * SHARE;
  store_rows<T, WIDTH>(target, stride, staging, first, min(rows - first, SHARE), columns, warp.lane);
}

// Stages a warp's part of dK or dV, times a factor; rows that are not in use are zeros.
template <int N, int COLUMNS>
DEVICE void stage(Staging<T, BLOCK_K, COLUMNS> &staging, const Fragment<WARP_K, N> &sum, float factor, int used,
                  const Warp &warp) {
#pragma unroll
  for (int m = 0; m < WARP_K / 16; ++m)
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp.group * WARP_K + sum.row(2 * m + half, warp.lane);
        const float low = sum.x[m][n][2 * half] * factor, high = sum.x[m][n][2 * half + 1] * factor;
        staging.put(row, warp.sharer * N + sum.column(8 * n, warp.lane), row < used ? low : 0.0f,
                    row < used ? high : 0.0f);
      }
}

// The index of this block: blocks that wait for each other take numbers.
DEVICE u32 block_index(const Params &p, Shared &shared) {
  if constexpr (!Config::DETERMINISTIC) return blockIdx.x;
  if (threadIdx.x == 0) {
    const i64 heads = static_cast<i64>(p.heads_q) * (Sequences::PACKED ? 1 : p.batch);
    shared.block = ptx::atomic_add(p.added + heads * p.rows / ADDED_ROWS, 1);
  }
  ptx::barrier();  // thread 0 has the number
  return shared.block;
}

// Finds the block's keys and its first steps; false if there are no keys.
DEVICE bool find_place(const Params &p, Shared &shared) {
  const KeyPlace place = key_place_of<Sequences, BLOCK_K>(block_index(p, shared), p.sequences, p.batch, p.len_q,
                                                          p.len_k, p.heads_k, p.group);
  if (Config::DETERMINISTIC && threadIdx.x < 32) {
    // Where bounds fall, sequences may share counters or lack blocks of keys, and waits might not end.
    const bool waits = !falls<Sequences>(p.sequences, p.batch, p.len_q, p.len_k);
    if (threadIdx.x == 0) shared.waits = waits;
  }
  if (threadIdx.x == 0) {
    shared.place = place;
    Step step{place.head * (p.heads_q / p.heads_k) - 1, 0, 0};
    if (place.k_begin < place.k.length) advance(step, p, place);
    shared.steps[0] = step;
    if (step.there()) advance(step, p, place);  // rows of no sequence have no mask to ask
    shared.steps[1] = step;
  }
  ptx::barrier();  // thread 0 has written what all read
  return place.k_begin < place.k.extent;
}

// Walks the queries.
DEVICE void walk(SumK &dk, SumV &dv, const Params &p, Shared &shared) {
  const KeyPlace &place = shared.place;
  const auto step = [&](int count) -> Step & { return shared.steps[count % 4]; };
  begin(p, shared, place, step(0));
  int count = 0;
  for (;; ++count) {
    const Warp warp;
    if constexpr (STAGES == 1) {
      ptx::barrier();  // every warp has read the slot
      if (count > 0) load(p, shared, place, step(count), count);
    }
    ptx::cp_async_wait_all();
    ptx::barrier();  // every thread's part of the tile has landed; every warp has read the slot to be filled next
    if (step(count + 1).there() && STAGES == 2) load(p, shared, place, step(count + 1), count + 1);
    if (threadIdx.x == 0) {
      Step next = step(count + 1);
      advance(next, p, place);
      step(count + 2) = next;
    }
    if (count > 0) sum_dq(p, shared, place, step(count - 1), count - 1, warp);
    if constexpr (Config::DS_BUFFERS == 1) ptx::barrier();  // every warp has read the last tile's dS
    attend(dk, dv, p, shared, place, step(count), count, warp);
    if (!step(count + 1).there()) break;
  }
  ptx::barrier();  // every warp has stored its part of dS
  sum_dq(p, shared, place, step(count), count, Warp());
}

DEVICE void differentiate(const Params &p, Shared &shared) {
  if (!find_place(p, shared)) return;
  const KeyPlace &place = shared.place;
  SumK dk;
  SumV dv;
  dk.zero();
  dv.zero();
  if (shared.steps[0].there()) walk(dk, dv, p, shared);

  const Warp warp;
  const int used = place.k.length - place.k_begin, rows = place.k.extent - place.k_begin;
  const Dropout dropout(p.dropout, place.batch, 0);
  ptx::barrier();  // the staged output lies over the inputs, which every warp has read now
  stage(shared.out.dk, dk, p.scale, used, warp);
  stage(shared.out.dv, dv, rescale(dropout), used, warp);
  ptx::barrier();  // every warp has staged its part
  Element *dk_at = p.dk + start_of<Sequences>(place.k, place.batch, p.dk_batch, p.dk_row) + place.head * p.dk_head;
  Element *dv_at = p.dv + start_of<Sequences>(place.k, place.batch, p.dv_batch, p.dv_row) + place.head * p.dv_head;
  store(dk_at + place.k_begin * p.dk_row, p.dk_row, shared.out.dk, rows, p.head_dim, warp);
  store(dv_at + place.k_begin * p.dv_row, p.dv_row, shared.out.dv, rows, p.head_dim_v, warp);
}

}  // namespace backward

extern "C" __global__ void __launch_bounds__(backward::THREADS, Config::MIN_BLOCKS)
    attention_bwd_sm80(const __grid_constant__ backward::Params p) {
  backward::differentiate(p, ptx::shared<backward::Shared>());
}
