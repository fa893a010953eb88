// O = softmax(scale Q K^T) V and LSE for any GPU with mma.sync and cp.async (sm_80 and newer). The schedule, the fp32
// method and the measurements are in docs/kernels/attention_fwd_sm80.md. One block computes BLOCK_Q rows of O of one
// head; each of its warps owns WARP_Q of those rows, from the scores to the output. Key blocks are walked from the last
// to the first: those that a mask cuts come first, then the ones it leaves whole. While a key block is multiplied, the
// next ones are on their way.
//
// Reads Config: T, the policies Mask, Score, Dropout, Sink and Sequences, HEAD_DIM, HEAD_DIM_V, BLOCK_K, WARPS,
// M_TILES, STAGES, MIN_BLOCKS, WIDTH, Q_IN_REGISTERS, POSITIVE_SCALE (false also does negative and zero scales),
// PARAMS_BYTES, SMEM_BYTES.
#include "masks/mask.cuh"
#include "ptx/cp_async.cuh"
#include "scores/score.cuh"
#include "tile/drop.cuh"
#include "tile/fragment.cuh"
#include "tile/load.cuh"
#include "tile/place.cuh"
#include "tile/sink.cuh"
#include "tile/softmax.cuh"
#include "tile/team.cuh"

namespace forward {

using T = Config::T;
using Mask = Config::Mask;
using Score = Config::Score;
using Dropout = Config::Dropout;
using Sink = Config::Sink;
using Sequences = Config::Sequences;
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
  float scale_log2, scale;   // softmax_scale * log2(e), and softmax_scale
  alignas(8) Mask::Params mask;
  Score::Params score;
  Dropout::Params dropout;
  Sink::Params sink;
  Sequences::Params sequences;
};

// Scores enter the softmax as the product of Q and K gives them, and the scale its exponents.
constexpr bool RAW = Score::IDENTITY && Config::POSITIVE_SCALE;
// The columns of P that are made at a time: one product takes 16, one draw of dropout decides about 32.
constexpr int STEP = Dropout::DROPS && BLOCK_K % 32 == 0 ? 32 : 16;

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
  Place place;
  const Element *k, *v;  // the sequence's, of this head
  Mask mask;
  int first_key;  // of the last key block of the walk
  Packet<16> landing[!SPLIT ? 1 : LANDING_K > LANDING_V ? LANDING_K : LANDING_V];
};

static_assert(sizeof(Shared) == Config::SMEM_BYTES, "the host computes the same size");
static_assert(sizeof(Params) == Config::PARAMS_BYTES, "the host packs the same struct");
static_assert(!SPLIT || STAGES == 1, "fp32 has one slot, and a landing");
static_assert(MaskPolicy<Mask>, "a mask answers the four questions of masks/mask.cuh");
static_assert(ScorePolicy<Score>, "a score is what scores/score.cuh says");

using Scores = Fragment<WARP_Q, BLOCK_K>;
using Output = Fragment<WARP_Q, HEAD_DIM_V>;

// The lengths in use; those of the arrays are in Params, where they take no register.
DEVICE int len_q(const Params &p, const Shared &shared) { return Sequences::VARIES ? shared.place.q.length : p.len_q; }
DEVICE int len_k(const Params &p, const Shared &shared) { return Sequences::VARIES ? shared.place.k.length : p.len_k; }

// Scores in the units of the softmax, where the product of Q and K does not give them.
DEVICE void modify(Scores &s, const Params &p, const Shared &shared, int q, int k, u32 lane) {
  if constexpr (RAW) return;
  const Score score(p.score, shared.place.batch, shared.place.head, len_q(p, shared), len_k(p, shared));
  s.each_pair([&](float &even, float &odd, int r, int c) {
    even *= p.scale, odd *= p.scale;
    score.apply(even, odd, q + Scores::row(r, lane), k + Scores::column(0, lane), c);
  });
}

// Hides the pairs beyond the mask or the end of the keys. Scores are replaced, not added to: whatever a hidden key
// holds is gone.
DEVICE void hide(Scores &s, int len_k, const Mask &mask, int q, int k, u32 lane) {
  s.each([&](float &score, int r, int c) {
    const int key = k + Scores::column(c, lane);
    if (key >= len_k || !mask.keep(q + Scores::row(r, lane), key)) score = -INFINITE;
  });
}

// Rows of the sequence that are not in use see no key.
DEVICE void clear(const Place &place, Output &o, float (&lse)[Output::ROWS], int warp, u32 lane) {
  const int used = place.q.length - place.q_begin - warp * WARP_Q;
  o.each([&](float &value, int r, int) { value = Output::row(r, lane) < used ? value : 0.0f; });
#pragma unroll
  for (int r = 0; r < Output::ROWS; ++r) lse[r] = Output::row(r, lane) < used ? lse[r] : -INFINITE;
}

// The first row of the tile in O and in LSE.
DEVICE Element *o_at(const Params &p, const Place &place) {
  return p.o + start_of<Sequences>(place.q, place.batch, p.o_batch, p.o_row) + place.q_begin * p.o_row +
         place.head * p.o_head;
}
DEVICE float *lse_at(const Params &p, const Place &place) {
  return p.lse + start_of<Sequences>(place.q, place.batch, static_cast<i64>(p.heads_q) * p.len_q, 1) + place.q_begin +
         static_cast<i64>(place.head) * p.len_q;
}

// Writes this warp's rows of O and LSE.
DEVICE void store(const Params &p, Shared &shared, const Output &o, const float (&lse)[Output::ROWS], int warp,
                  u32 lane) {
  const Place place = shared.place;
  const int warp_q = warp * WARP_Q;
  const int rows = min(place.q.extent - place.q_begin - warp_q, WARP_Q);
#pragma unroll
  for (int m = 0; m < WARP_Q / 16; ++m)
#pragma unroll
    for (int n = 0; n < HEAD_DIM_V / 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        shared.o.put(warp_q + Output::row(2 * m + half, lane), Output::column(8 * n, lane), o.x[m][n][2 * half],
                     o.x[m][n][2 * half + 1]);
  ptx::warp_barrier();  // the warp's rows are staged by its own lanes
  store_rows<T, WIDTH>(o_at(p, place), p.o_row, shared.o, warp_q, rows, p.head_dim_v, lane);
  if (p.lse && lane % 4 == 0) {
    float *lse_rows = lse_at(p, place) + warp_q;
#pragma unroll
    for (int r = 0; r < Output::ROWS; ++r) {
      const int row = Output::row(r, lane);
      if (row < rows) lse_rows[row] = lse[r];
    }
  }
}

// Writes a tile of which no row is in use.
DEVICE void store_nothing(const Params &p, const Place &place, u32 thread) {
  const int rows = min(place.q.extent - place.q_begin, BLOCK_Q);
  zero_rows<T, THREADS, WIDTH>(o_at(p, place), p.o_row, rows, p.head_dim_v, thread);
  if (p.lse)
    for (int row = thread; row < rows; row += THREADS) lse_at(p, place)[row] = -INFINITE;
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
  start(shared, shared.in.k[slot_of(key)], shared.k + key * row, row, len_k(p, shared) - key, p.head_dim);
}

DEVICE void load_v(const Params &p, Shared &shared, int key, int first_key) {
  if (key < first_key) return;
  const i64 row = ptx::opaque(p.v_row);
  start(shared, shared.in.v[slot_of(key)], shared.v + key * row, row, len_k(p, shared) - key, p.head_dim_v);
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

// The range of keys that queries of a tile see. A mask that looks at ids does it in shared memory.
DEVICE Range keys_of(Shared &shared, const Mask &mask, int q, int q_end) {
  if constexpr (!LOOKS<Mask>) return mask.keys(q, q_end);
  if (threadIdx.x == 0) shared.mask = mask;
  ptx::barrier();  // thread 0 has made the mask
  look(shared.mask, q, q_end, WholeBlock<Config::WARPS>{reinterpret_cast<u32 *>(&shared.in)});
  ptx::barrier();  // thread 0 has noted what they found
  return shared.mask.keys(q, q_end);
}

// Tells the block where its tile is, and starts its first copies.
DEVICE Walk begin(const Params &p, Shared &shared, const Place &place) {
  const u32 thread = threadIdx.x;
  const int head_k = place.head / (p.heads_q / p.heads_k);
  const Mask mask(p.mask, place.batch, place.head, place.q.length, place.k.length);
  const int q_begin = place.q_begin, q_end = min(q_begin + BLOCK_Q, place.q.length);
  const Range keys = keys_of(shared, mask, q_begin, q_end);
  const int first = keys.begin / BLOCK_K * BLOCK_K;
  const int last = keys.end > keys.begin ? (keys.end - 1) / BLOCK_K * BLOCK_K : first - BLOCK_K;

  if (thread == 0) {
    shared.place = place;
    shared.k = p.k + start_of<Sequences>(place.k, place.batch, p.k_batch, p.k_row) + head_k * p.k_head;
    shared.v = p.v + start_of<Sequences>(place.k, place.batch, p.v_batch, p.v_row) + head_k * p.v_head;
    shared.first_key = first;
    if (!LOOKS<Mask>) shared.mask = mask;
  }
  ptx::barrier();  // thread 0 has written what the loads and the loop read
  const Element *q =
      p.q + start_of<Sequences>(place.q, place.batch, p.q_batch, p.q_row) + q_begin * p.q_row + place.head * p.q_head;
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

// One tile of the output.
DEVICE void attend(const Params &p, Shared &shared, const Place &place) {
  if (Sequences::VARIES && place.q_begin >= place.q.length) return store_nothing(p, place, threadIdx.x);
  const Walk walk = begin(p, shared, place);
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

  OnlineSoftmax<WARP_Q, COMPENSATED> softmax(RAW ? p.scale : 1.0f, RAW ? p.scale_log2 : LOG2_E);
  Output o;
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
    const int warp_q = shared.place.q_begin + ptx::uniform(ptx::opaque(threadIdx.x) / 32) * WARP_Q;
    const int warp_q_end = min(warp_q + WARP_Q, len_q(p, shared)), key_end = key + BLOCK_K;
    const Range keys = mask.keys(warp_q, warp_q_end);
    const bool seen = key < keys.end && key_end > keys.begin;  // by some row of this warp

    Scores s;
    if (seen) {
      // S = Q K^T, modified and masked
      gemm_qk(s, queries, shared.in.k[slot_of(key)], ptx::lane());
      modify(s, p, shared, warp_q, key, ptx::lane());
      const int keys_used = len_k(p, shared);
      const bool whole = key_end <= keys_used && mask.whole(warp_q, warp_q_end, key, key_end);
      if (!whole) hide(s, keys_used, mask, warp_q, key, ptx::lane());
      softmax.meet(s, o);
    }
    if constexpr (SPLIT) {
      ptx::cp_async_wait_all();
      split_rows<T, THREADS, BLOCK_K>(shared.in.v[0], 0, shared.landing, ptx::opaque(threadIdx.x));
      load_k(p, shared, key - BLOCK_K, first());
      ptx::barrier();  // every thread's part of V is split
    }
    if (seen) {
      // P = exp(S - m), STEP keys at a time, and O += P V
      const Dropout dropout(p.dropout, shared.place.batch, shared.place.head);
      const auto weights = [&](Rows<T, WARP_Q> &rows, int first) {
        if (first % STEP == 0) {
          softmax.weigh(s, first, STEP);
          drop<STEP>(s, dropout, warp_q, key, first, ptx::lane());
        }
        rows.load(s, first);
      };
      gemm_pv(o, weights, shared.in.v[slot_of(key)], ptx::lane());
    }
  }

  float lse[Output::ROWS];
  const Dropout dropout(p.dropout, shared.place.batch, shared.place.head);
  softmax.finish(o, lse, Sink(p.sink, shared.place.head), rescale(dropout));
  if constexpr (Sequences::VARIES) clear(shared.place, o, lse, ptx::opaque(threadIdx.x) / 32, ptx::lane());
  ptx::cp_async_wait_all();
  ptx::barrier();  // the staged output lies over the inputs, which every warp has read now
  store(p, shared, o, lse, ptx::opaque(threadIdx.x) / 32, ptx::lane());
}

// Where the bounds of packed sequences fall, which only those that the host has not seen may, no search finds every
// tile. Then the block of a head's first slot, where there is nothing to compute else, walks the sequences of its head
// one after the other, beside the blocks that find some.
DEVICE bool has_first_slot(const Params &p) {
  return packed_slot<BLOCK_Q>(blockIdx.x, p.batch, p.len_q, p.heads_q, p.group).tile == 0;
}

// Zeros in the rows of a head that no sequence has.
DEVICE void clear_rows_of_none(const Params &p, int head) {
  for (int side = p.batch; side < p.batch + 2; ++side) {
    Place place = {side, head, static_cast<int>(threadIdx.x / 32),
                   Sequences::queries(p.sequences, side, p.batch, p.len_q)};
    for (; place.q_begin < place.q.extent; place.q_begin += Config::WARPS) {
      const i64 row = place.q.first + place.q_begin;
      if (taken<Sequences>(p.sequences, p.batch, p.len_q, row, row + 1)) continue;
      zero_rows<T, 32, WIDTH>(o_at(p, place), p.o_row, 1, p.head_dim_v, ptx::lane());
      if (p.lse && ptx::lane() == 0) *lse_at(p, place) = -INFINITE;
    }
  }
}

// Moves to the next tile of a head with a query in use, over all sequences; false after the last. Writes those without.
DEVICE bool advance(const Params &p, Place &place) {
  for (place.q_begin += BLOCK_Q; place.q_begin >= place.q.length; place.q_begin += BLOCK_Q) {
    if (place.q_begin < place.q.extent) {
      store_nothing(p, place, threadIdx.x);
    } else {
      if (++place.batch == p.batch) return false;
      place.q = Sequences::queries(p.sequences, place.batch, p.batch, p.len_q);
      place.k = Sequences::keys(p.sequences, place.batch, p.len_k);
      place.q_begin = -BLOCK_Q;
    }
  }
  return true;
}

DEVICE void attend(const Params &p, Shared &shared) {
  Place place = place_of<Sequences, BLOCK_Q>(blockIdx.x, p.sequences, p.batch, p.len_q, p.len_k, p.heads_q, p.group);
  if constexpr (!Sequences::PACKED) {
    attend(p, shared, place);
  } else {
    if (place.batch >= p.batch) {
      const bool first = has_first_slot(p);
      if (!first && place.q_begin >= place.q.extent) return;
      if (!falls<Sequences>(p.sequences, p.batch, p.len_q)) return store_nothing(p, place, threadIdx.x);
      if (!first) return;
      clear_rows_of_none(p, place.head);
      place = {-1, place.head};
      if (!advance(p, place)) return;
    }
    for (;;) {
      attend(p, shared, place);
      if (!has_first_slot(p)) return;
      ptx::barrier();  // every warp has stored its rows, and read the place
      place = shared.place;
      ptx::barrier();  // every thread has read it
      if (!advance(p, place)) return;
    }
  }
}

}  // namespace forward

extern "C" __global__ void __launch_bounds__(forward::THREADS, Config::MIN_BLOCKS)
    attention_fwd_sm80(const __grid_constant__ forward::Params p) {
  forward::attend(p, ptx::shared<forward::Shared>());
}
