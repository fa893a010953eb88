// O = softmax(scale Q K^T) V and LSE for any GPU with mma.sync and cp.async (sm_80 and newer). The schedule, the fp32
// method and the measurements are in docs/kernels/attention_fwd_sm80.md. One block computes BLOCK_Q rows of O of one
// head; each of its warps owns WARP_Q of those rows, from the scores to the output. Key blocks are walked from the last
// to the first: those that a mask cuts come first, then the ones it leaves whole. While a key block is multiplied, the
// next ones are on their way.
//
// Reads Config: T, Mask, HEAD_DIM, HEAD_DIM_V, BLOCK_K, WARPS, M_TILES, STAGES, MIN_BLOCKS, WIDTH, Q_IN_REGISTERS,
// POSITIVE_SCALE (false also does negative and zero scales), PARAMS_BYTES, SMEM_BYTES.
#include "masks/mask.cuh"
#include "ptx/cp_async.cuh"
#include "tile/fragment.cuh"
#include "tile/load.cuh"
#include "tile/softmax.cuh"
#include "tile/work.cuh"

namespace forward {

using T = Config::T;
using Mask = Config::Mask;
using Element = T::Storage;
constexpr int HEAD_DIM = Config::HEAD_DIM, HEAD_DIM_V = Config::HEAD_DIM_V;
constexpr int BLOCK_K = Config::BLOCK_K, STAGES = Config::STAGES, WIDTH = Config::WIDTH;
constexpr int WARP_Q = 16 * Config::M_TILES, BLOCK_Q = Config::WARPS * WARP_Q, THREADS = Config::WARPS * 32;

struct Params {
  const Element *q;            // [batch, len_q, heads_q, head_dim]
  const Element *k;            // [batch, len_k, heads_k, head_dim]
  const Element *v;            // [batch, len_k, heads_k, head_dim_v]
  Element *o;                  // [batch, len_q, heads_q, head_dim_v]
  float *lse;                  // [batch, heads_q, len_q], contiguous; may be null
  i64 q_batch, q_row, q_head;  // strides in elements; the last dimension's is 1
  i64 k_batch, k_row, k_head;
  i64 v_batch, v_row, v_head;
  i64 o_batch, o_row, o_head;
  int batch, len_q, len_k, heads_q, heads_k;
  int head_dim, head_dim_v;  // the arrays' own, at most HEAD_DIM and HEAD_DIM_V
  int group;                 // heads that share the L2 cache, see Work
  float scale;               // softmax_scale * log2(e): the softmax is in base 2
  Mask::Params mask;
};

// fp32 is split into planes: tiles land one after the other, and go to the one slot from there.
constexpr bool SPLIT = T::PLANES > 1;
constexpr bool COMPENSATED = SPLIT && HEAD_DIM_V <= 128;  // a wider O leaves no registers for it
constexpr int LANDING_K = PACKETS<THREADS, BLOCK_K, HEAD_DIM>, LANDING_V = PACKETS<THREADS, BLOCK_K, HEAD_DIM_V>;

struct Inputs {
  Operand<T, BLOCK_Q, HEAD_DIM> q;
  Operand<T, BLOCK_K, HEAD_DIM> k[STAGES];
  Operand<T, BLOCK_K, HEAD_DIM_V> v[STAGES];
};

struct Shared {
  union {
    Inputs in;
    Staging<T, BLOCK_Q, HEAD_DIM_V> o;  // when the last product has read the inputs
  };
  // What the loop needs of its surroundings, kept here because O and S leave no registers for it.
  const Element *k, *v;  // this head's
  int q_begin;           // first row of the tile
  int first_key;         // of the last key block of the walk
  Mask mask;
  Packet<16> landing[!SPLIT ? 1 : LANDING_K > LANDING_V ? LANDING_K : LANDING_V];
};

static_assert(sizeof(Shared) == Config::SMEM_BYTES, "the host computes the same size");
static_assert(sizeof(Params) == Config::PARAMS_BYTES, "the host packs the same struct");
static_assert(!SPLIT || STAGES == 1, "fp32 has one slot, and a landing");
static_assert(MaskPolicy<Mask>, "a mask answers the four questions of masks/mask.cuh");

using Scores = Fragment<WARP_Q, BLOCK_K>;
using Output = Fragment<WARP_Q, HEAD_DIM_V>;

// Hides the pairs beyond the mask or the end of the keys. Scores are replaced, not added to: whatever a hidden key
// holds is gone.
DEVICE void hide(Scores &s, const Params &p, const Mask &mask, int q, int k, u32 lane) {
  s.each([&](float &score, int r, int c) {
    const int key = k + Scores::column(c, lane);
    if (key >= p.len_k || !mask.keep(q + Scores::row(r, lane), key)) score = -INFINITE;
  });
}

DEVICE Work work_of(u32 block, const Params &p) {
  return Work(block, (p.len_q + BLOCK_Q - 1) / BLOCK_Q, p.heads_q, p.batch, p.group);
}

// Writes this warp's rows of O and LSE.
DEVICE void store(const Params &p, const Work &work, Shared &shared, const Output &o, const float (&lse)[Output::ROWS],
                  int warp, u32 lane) {
  const int q_begin = work.tile * BLOCK_Q, warp_q = warp * WARP_Q;
  const int rows = min(p.len_q - q_begin - warp_q, WARP_Q);
#pragma unroll
  for (int m = 0; m < WARP_Q / 16; ++m)
#pragma unroll
    for (int n = 0; n < HEAD_DIM_V / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        shared.o.put(warp_q + Output::row(2 * m + half, lane), Output::column(8 * n, lane), o.x[m][n][2 * half],
                     o.x[m][n][2 * half + 1]);
  ptx::warp_barrier();  // the warp's rows are staged by its own lanes
  Element *o_rows = p.o + work.batch * p.o_batch + work.head * p.o_head + q_begin * p.o_row;
  store_rows<T, WIDTH>(o_rows, p.o_row, shared.o, warp_q, rows, p.head_dim_v, lane);
  if (p.lse && lane % 4 == 0) {
    float *lse_rows = p.lse + (static_cast<i64>(work.batch) * p.heads_q + work.head) * p.len_q + q_begin + warp_q;
#pragma unroll
    for (int r = 0; r < Output::ROWS; ++r) {
      const int row = Output::row(r, lane);
      if (row < rows) lse_rows[row] = lse[r];
    }
  }
}

DEVICE u32 slot_of(int key) { return static_cast<u32>(key) / BLOCK_K % STAGES; }

// Starts the copies of one tile of `rows` rows of K or V.
template <int COLUMNS>
DEVICE void start(Shared &shared, Operand<T, BLOCK_K, COLUMNS> &slot, const Element *rows_at, i64 stride, int rows,
                  int columns) {
  const u32 thread = ptx::opaque(threadIdx.x);
  if constexpr (SPLIT) {
    land_rows<T, THREADS, WIDTH, BLOCK_K, COLUMNS>(shared.landing, rows_at, stride, rows, columns, thread);
  } else {
    load_rows<T, THREADS, WIDTH>(slot, rows_at, stride, rows, columns, thread);
  }
}

// Start the copies of the key block at `key`, if there is one.
DEVICE void load_k(const Params &p, Shared &shared, int key, int first_key) {
  if (key < first_key) return;
  const i64 row = ptx::opaque(p.k_row);
  start(shared, shared.in.k[slot_of(key)], shared.k + key * row, row, p.len_k - key, p.head_dim);
}

DEVICE void load_v(const Params &p, Shared &shared, int key, int first_key) {
  if (key < first_key) return;
  const i64 row = ptx::opaque(p.v_row);
  start(shared, shared.in.v[slot_of(key)], shared.v + key * row, row, p.len_k - key, p.head_dim_v);
}

// The largest rows / 2^n that is no more than `room`.
DEVICE constexpr int fitting(int rows, int room) { return rows <= room ? rows : fitting(rows / 2, room); }

// Loads the tile's queries. Asynchronously, in a group of their own; fp32 lands where K and V will be, as many rows at
// a time as there is room for, and is split.
DEVICE void load_q(const Params &p, Shared &shared, const Element *q, int rows, u32 thread) {
  if constexpr (SPLIT) {
    constexpr int ROWS = fitting(BLOCK_Q, (sizeof(shared.in.k) + sizeof(shared.in.v)) / (HEAD_DIM * sizeof(Element)));
    auto *landing = reinterpret_cast<Packet<16> *>(&shared.in.k);
    for (int r = 0; r < BLOCK_Q; r += ROWS) {
      land_rows<T, THREADS, WIDTH, ROWS, HEAD_DIM>(landing, q + r * p.q_row, p.q_row, rows - r, p.head_dim, thread);
      ptx::cp_async_wait_all();
      split_rows<T, THREADS, ROWS>(shared.in.q, r, landing, thread);
    }
  } else {
    load_rows<T, THREADS, WIDTH>(shared.in.q, q, p.q_row, rows, p.head_dim, thread);
    ptx::cp_async_commit();
  }
}

// The key blocks that a tile walks, from the one at key `last` down to the one at key `first`; none when last < first.
struct Walk {
  int first, last;
};

// Finds out where this block is, and starts its first copies.
DEVICE Walk begin(const Params &p, Shared &shared) {
  const u32 thread = threadIdx.x;
  const Work work = work_of(blockIdx.x, p);
  const int head_k = work.head / (p.heads_q / p.heads_k);
  const Mask mask(p.mask, work.batch, work.head, p.len_q, p.len_k);
  const int q_begin = work.tile * BLOCK_Q, q_end = min(q_begin + BLOCK_Q, p.len_q);
  const Range keys = mask.keys(q_begin, q_end);
  const int first = keys.begin / BLOCK_K * BLOCK_K;
  const int last = keys.end > keys.begin ? (keys.end - 1) / BLOCK_K * BLOCK_K : first - BLOCK_K;

  if (thread == 0) {
    shared.k = p.k + work.batch * p.k_batch + head_k * p.k_head;
    shared.v = p.v + work.batch * p.v_batch + head_k * p.v_head;
    shared.q_begin = q_begin;
    shared.first_key = first;
    shared.mask = mask;
  }
  ptx::barrier();  // thread 0 has written what the loads and the loop read
  const Element *q = p.q + work.batch * p.q_batch + work.head * p.q_head + q_begin * p.q_row;
  load_q(p, shared, q, q_end - q_begin, thread);
  if constexpr (SPLIT) {
    load_k(p, shared, last, first);
  } else {
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
      load_k(p, shared, last - i * BLOCK_K, first);
      load_v(p, shared, last - i * BLOCK_K, first);
      ptx::cp_async_commit();  // also an empty group: the waits count groups
    }
  }
  return {first, last};
}

DEVICE void attend(const Params &p, Shared &shared) {
  const Walk walk = begin(p, shared);
  const auto first = [&] { return SPLIT ? shared.first_key : walk.first; };  // fp32 needs the register more

  Rows<T, WARP_Q> q_rows[Config::Q_IN_REGISTERS ? HEAD_DIM / 16 : 1];
  if constexpr (Config::Q_IN_REGISTERS) {
    ptx::cp_async_wait<STAGES - 1>();
    ptx::barrier();  // every thread's part of Q has landed
#pragma unroll
    for (int d = 0; d < HEAD_DIM; d += 16) q_rows[d / 16].load(shared.in.q, threadIdx.x / 32 * WARP_Q, d, ptx::lane());
  }
  const auto queries = [&](Rows<T, WARP_Q> &rows, int column, u32 lane) {
    if constexpr (Config::Q_IN_REGISTERS) {
      rows = q_rows[column / 16];
    } else {
      rows.load(shared.in.q, ptx::opaque(threadIdx.x) / 32 * WARP_Q, column, lane);
    }
  };

  OnlineSoftmax<WARP_Q, COMPENSATED> softmax;
  Output o;
  softmax.reset();
  o.zero();

  for (int key = walk.last; key >= first(); key -= BLOCK_K) {
    if constexpr (SPLIT) {
      ptx::cp_async_wait_all();
      ptx::barrier();  // every warp has read the slot
      split_rows<T, THREADS, BLOCK_K>(shared.in.k[0], 0, shared.landing, ptx::opaque(threadIdx.x));
      load_v(p, shared, key, first());
      ptx::barrier();  // every thread's part of K is split
    } else {
      ptx::cp_async_wait<STAGES - 2>();
      ptx::barrier();  // every thread's part of the block has landed; every warp has read the slot to be filled next
      load_k(p, shared, key - (STAGES - 1) * BLOCK_K, first());
      load_v(p, shared, key - (STAGES - 1) * BLOCK_K, first());
      ptx::cp_async_commit();
    }
    const Mask mask = shared.mask;
    const int warp_q = shared.q_begin + ptx::uniform(ptx::opaque(threadIdx.x) / 32) * WARP_Q;
    const int warp_q_end = min(warp_q + WARP_Q, p.len_q), key_end = key + BLOCK_K;
    const Range keys = mask.keys(warp_q, warp_q_end);
    const bool seen = key < keys.end && key_end > keys.begin;  // by some row of this warp

    Scores s;
    if (seen) {
      // S = Q K^T, masked
      gemm_qk(s, queries, shared.in.k[slot_of(key)], ptx::lane());
      if constexpr (!Config::POSITIVE_SCALE) s.each([&](float &score, int, int) { score *= p.scale; });
      const bool whole = key_end <= p.len_k && mask.whole(warp_q, warp_q_end, key, key_end);
      if (!whole) hide(s, p, mask, warp_q, key, ptx::lane());
      softmax.meet(s, o, Config::POSITIVE_SCALE ? p.scale : 1.0f);
    }
    if constexpr (SPLIT) {
      ptx::cp_async_wait_all();
      split_rows<T, THREADS, BLOCK_K>(shared.in.v[0], 0, shared.landing, ptx::opaque(threadIdx.x));
      load_k(p, shared, key - BLOCK_K, first());
      ptx::barrier();  // every thread's part of V is split
    }
    if (seen) {
      // P = exp(scale S - m), sixteen keys at a time, and O += P V
      const auto weights = [&](Rows<T, WARP_Q> &rows, int first) {
        softmax.weigh(s, first, 16);
        rows.load(s, first);
      };
      gemm_pv(o, weights, shared.in.v[slot_of(key)], ptx::lane());
    }
  }

  float lse[Output::ROWS];
  softmax.finish(o, lse);
  ptx::cp_async_wait_all();
  ptx::barrier();  // the staged output lies over the inputs, which every warp has read now
  store(p, work_of(ptx::opaque(blockIdx.x), p), shared, o, lse, ptx::opaque(threadIdx.x) / 32, ptx::lane());
}

}  // namespace forward

extern "C" __global__ void __launch_bounds__(forward::THREADS, Config::MIN_BLOCKS)
    attention_fwd_sm80(const __grid_constant__ forward::Params p) {
  forward::attend(p, ptx::shared<forward::Shared>());
}
