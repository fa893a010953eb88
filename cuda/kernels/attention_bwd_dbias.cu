// The gradient of the bias, dBias = the sum of dS = P (dP - delta) over all that the bias is repeated along, for any
// GPU with mma.sync and cp.async (sm_80 and newer). P = exp(S - LSE) and dP = dO V^T are made anew; docs/kernels/
// attention_bwd_dbias.md has the schedule. One block owns BLOCK_Q x BLOCK_K elements of dBias, or of a row or column of
// it where it has one row or column, and sums them in registers, in a fixed order: over batch entries and heads, in
// each over the blocks of queries and of keys that the tile is repeated along. Where a few tiles have many steps, each
// is given to several blocks, whose sums attention_bwd_dbias_sum adds.
//
// A step is two products, S and dP, each of chunks of CHUNK columns of both factors. All that differs between steps is
// written to shared memory by one warp, two steps ahead of its use.
//
// Reads Config: T, Out, the policies Mask, Score, Dropout and Sequences, BLOCK_K, WARPS, M_TILES, CHUNK, STAGES,
// MIN_BLOCKS, WIDTH, WRITE, PARAMS_BYTES, SMEM_BYTES.
#include "masks/mask.cuh"
#include "scores/score.cuh"
#include "tile/drop.cuh"
#include "tile/fragment.cuh"
#include "tile/load.cuh"
#include "tile/place.cuh"
#include "tile/sink.cuh"
#include "tile/stat_rows.cuh"

namespace dbias {

using T = Config::T;
using Out = Config::Out;  // what is written: the bias's own type, or fp32 where several blocks share a tile
using Mask = Config::Mask;
using Score = Config::Score;
using Dropout = Config::Dropout;
using Sequences = Config::Sequences;
using Element = T::Storage;
constexpr int BLOCK_K = Config::BLOCK_K, CHUNK = Config::CHUNK, STAGES = Config::STAGES, WIDTH = Config::WIDTH;
constexpr int WARP_Q = 16 * Config::M_TILES, BLOCK_Q = Config::WARPS * WARP_Q, THREADS = Config::WARPS * 32;

struct Params {
  const Element *q;            // [batch, len_q, heads_q, head_dim]
  const Element *k;            // [batch, len_k, heads_k, head_dim]
  const Element *v;            // [batch, len_k, heads_k, head_dim_v]
  const Element *dout;         // [batch, len_q, heads_q, head_dim_v]
  const float *lse;            // [batch, heads_q, len_q], contiguous
  const float *delta;          // [heads, stat_rows]: all batch entries' heads, those of packed sequences once
  Out::Storage *dbias;         // [entry_splits, block_splits, batches, heads, rows, columns], contiguous
  i64 q_batch, q_row, q_head;  // strides in elements; the last dimension's is 1
  i64 k_batch, k_row, k_head;
  i64 v_batch, v_row, v_head;
  i64 dout_batch, dout_row, dout_head;
  int batch, len_q, len_k, heads_q, heads_k, head_dim, head_dim_v, stat_rows;
  int batches, heads, rows, columns;  // of the bias: 1, or as many as there are of what it does not repeat along
  int entry_splits, block_splits;     // parts of the sum: of batch entries and heads, and of each of those
  float scale;                        // softmax_scale
  int unused;
  Mask::Params mask;
  Score::Params score;
  Dropout::Params dropout;
  NoSink::Params sink;  // what there is of it is in the LSE
  Sequences::Params sequences;
};

// fp32 is split into planes: a chunk lands while the one before is multiplied, and goes to the one slot from there.
constexpr bool SPLIT = T::PLANES > 1;
constexpr int LEAD = SPLIT ? 1 : STAGES - 1;  // chunks on their way
constexpr int RING = 3;                       // steps that are known at a time: one that is computed, and two more

// The tile of dBias that is the block's, and which part of its sum.
struct Part {
  int batch, head, q_begin, k_begin;  // 0 along an axis of one element
  int entry_part, block_part;
};

// One term of the sum: a block of queries and one of keys, of one head.
struct Step {
  const Element *q, *dout;  // the first row
  const Element *k, *v;     // likewise
  i64 lse_row, stat_row;    // the first row's, in the arrays of LSE and of delta
  int batch, head;
  int q_begin, k_begin;  // positions in the sequence
  int len_q, len_k;      // in use; none where there is no such step

  DEVICE bool exists() const { return len_q > 0; }
};

// Where the walk over the steps is: entries are batch entries x heads that the tile is repeated along.
struct Cursor {
  int entry, entry_end;       // the next one, and where they end
  int q, k;                   // of the entry before: the next step's positions,
  int q_end, k_first, k_end;  // and between which they lie; no step is left when q >= q_end
};

struct Slot {
  Operand<T, BLOCK_Q, CHUNK> rows;     // of Q, then of dO
  Operand<T, BLOCK_K, CHUNK> columns;  // of K, then of V
};

struct Statistics {
  float lse[BLOCK_Q], delta[BLOCK_Q];  // of the rows of a step; zeros beyond those in use
};

struct Shared {
  union {
    Slot slot[STAGES];
    Staging<Float32, BLOCK_Q, BLOCK_K> sums;  // when the last product has read the slots
  };
  Packet<16> landing_rows[SPLIT ? PACKETS<THREADS, BLOCK_Q, CHUNK> : 1];
  Packet<16> landing_columns[SPLIT ? PACKETS<THREADS, BLOCK_K, CHUNK> : 1];
  Statistics statistics[2];  // of even and of odd steps
  Step step[RING];
  Cursor cursor;
  Part part;
};

static_assert(sizeof(Shared) == Config::SMEM_BYTES, "the host computes the same size");
static_assert(sizeof(Params) == Config::PARAMS_BYTES, "the host packs the same struct");
static_assert(SPLIT ? STAGES == 1 : STAGES == 2 || STAGES == 3, "two chunks a step: loads are one step ahead");
static_assert(STAT_ROWS % BLOCK_Q == 0, "every row of a tile has statistics");
static_assert(BLOCK_Q <= THREADS, "a thread for the statistics of each row");
static_assert(BLOCK_K % 32 == 0, "one draw of dropout decides about 32 columns");
static_assert(MaskPolicy<Mask>, "a mask answers the four questions of masks/mask.cuh");
static_assert(ScorePolicy<Score>, "a score is what scores/score.cuh says");

using Scores = Fragment<WARP_Q, BLOCK_K>;

// This thread's warp, read anew at each call: it need not be kept across the loop.
DEVICE int warp() { return ptx::uniform(static_cast<int>(ptx::opaque(threadIdx.x) / 32)); }

DEVICE int quotient(int x, int y) { return (x + y - 1) / y; }  // rounded up

// How many chunks a product of such a depth has: one at least, which is zero where there is no column.
DEVICE int chunks_of(int columns) { return columns > 0 ? quotient(columns, CHUNK) : 1; }

DEVICE Part part_of(const Params &p, u32 block) {
  const u32 across = quotient(p.columns, BLOCK_K), down = quotient(p.rows, BLOCK_Q);
  const u32 k = block % across, q = block / across % down;
  u32 rest = block / across / down;
  Part part;
  part.q_begin = static_cast<int>(q) * BLOCK_Q, part.k_begin = static_cast<int>(k) * BLOCK_K;
  part.head = static_cast<int>(rest % p.heads), rest /= p.heads;
  part.batch = static_cast<int>(rest % p.batches), rest /= p.batches;
  part.block_part = static_cast<int>(rest % p.block_splits), part.entry_part = static_cast<int>(rest / p.block_splits);
  return part;
}

// The blocks of a range of positions that are a part's, of `parts`.
template <int BLOCK>
DEVICE Range divided(const Range &range, int part, int parts) {
  const int first = range.begin / BLOCK, blocks = quotient(range.end, BLOCK) - first, most = quotient(blocks, parts);
  const int begin = min(part * most, blocks), end = min(begin + most, blocks);
  return {(first + begin) * BLOCK, min((first + end) * BLOCK, range.end)};
}

// Whether there are pairs of an entry in the tile; its first step, and the walk from there.
DEVICE bool find(const Params &p, const Part &part, int entry, Step &step, Cursor &cursor) {
  const int heads = p.heads == 1 ? p.heads_q : 1;  // that the tile is repeated along
  const int batch = part.batch + entry / heads, head = part.head + entry % heads;
  const Span q = Sequences::queries(p.sequences, batch, p.batch, p.len_q);
  const Span k = Sequences::keys(p.sequences, batch, p.len_k);
  if (part.q_begin >= q.length || part.k_begin >= k.length) return false;

  const Mask mask(p.mask, batch, head, q.length, k.length);
  Range keys = {part.k_begin, p.columns == 1 ? k.length : min(part.k_begin + BLOCK_K, k.length)};
  Range queries = {part.q_begin, min(part.q_begin + BLOCK_Q, q.length)};
  if (p.rows == 1) queries = divided<BLOCK_Q>(mask.queries(keys.begin, keys.end), part.block_part, p.block_splits);
  if (queries.end <= queries.begin) return false;
  const Range seen = mask.keys(queries.begin, queries.end);
  if (seen.end <= keys.begin || seen.begin >= keys.end || seen.end <= seen.begin) return false;
  if (p.columns == 1)
    keys = divided<BLOCK_K>(seen, p.rows == 1 ? 0 : part.block_part, p.rows == 1 ? 1 : p.block_splits);
  if (keys.end <= keys.begin) return false;

  const int head_k = head / (p.heads_q / p.heads_k);
  const i64 q_begin = queries.begin, k_begin = keys.begin;
  step.q = p.q + start_of<Sequences>(q, batch, p.q_batch, p.q_row) + q_begin * p.q_row + head * p.q_head;
  step.dout =
      p.dout + start_of<Sequences>(q, batch, p.dout_batch, p.dout_row) + q_begin * p.dout_row + head * p.dout_head;
  step.k = p.k + start_of<Sequences>(k, batch, p.k_batch, p.k_row) + k_begin * p.k_row + head_k * p.k_head;
  step.v = p.v + start_of<Sequences>(k, batch, p.v_batch, p.v_row) + k_begin * p.v_row + head_k * p.v_head;
  step.lse_row = start_of<Sequences>(q, batch, static_cast<i64>(p.heads_q) * p.len_q, 1) +
                 static_cast<i64>(head) * p.len_q + q_begin;
  step.stat_row = stat_row<Sequences>(q, batch, head, p.heads_q, p.stat_rows) + q_begin;
  step.batch = batch, step.head = head;
  step.q_begin = queries.begin, step.k_begin = keys.begin;
  step.len_q = q.length, step.len_k = k.length;
  cursor = {entry + 1, cursor.entry_end, queries.begin, keys.begin, queries.end, keys.begin, keys.end};
  return true;
}

// The step at the cursor, of the same entry as the one before.
DEVICE Step following(const Params &p, const Step &before, const Cursor &cursor) {
  Step step = before;
  const i64 rows = cursor.q - before.q_begin, columns = cursor.k - before.k_begin;
  step.q += rows * p.q_row, step.dout += rows * p.dout_row;
  step.k += columns * p.k_row, step.v += columns * p.v_row;
  step.lse_row += rows, step.stat_row += rows;
  step.q_begin = cursor.q, step.k_begin = cursor.k;
  return step;
}

// Past the step at the cursor.
DEVICE Cursor past(Cursor cursor) {
  cursor.k += BLOCK_K;
  if (cursor.k >= cursor.k_end) cursor.k = cursor.k_first, cursor.q += BLOCK_Q;
  return cursor;
}

// Writes down step i. One full warp does; its lanes look at 32 entries at a time.
DEVICE void prepare(const Params &p, Shared &shared, int i, u32 lane) {
  Step &to = shared.step[i % RING];
  const Cursor cursor = shared.cursor;
  ptx::warp_barrier();  // every lane has read the cursor
  if (cursor.q < cursor.q_end) {
    if (lane == 0) {
      to = following(p, shared.step[(i + RING - 1) % RING], cursor);
      shared.cursor = past(cursor);
    }
    return;
  }
  for (int first = cursor.entry; first < cursor.entry_end; first += 32) {
    const int entry = first + static_cast<int>(lane);
    Step step;
    Cursor found = cursor;
    u32 best = entry < cursor.entry_end && find(p, shared.part, entry, step, found) ? lane : 32;
    const u32 mine = best;
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
      const u32 other = ptx::shfl_xor(best, bit);
      best = other < best ? other : best;
    }
    if (best == mine && mine < 32) to = step, shared.cursor = past(found);
    if (best < 32) return;
  }
  if (lane == 0) to.len_q = 0, shared.cursor.entry = cursor.entry_end;
}

// Starts the copies of the statistics of a step's rows.
DEVICE void load_statistics(const Params &p, Statistics &to, const Step &step, u32 thread) {
  const int row = static_cast<int>(thread);
  if (row >= BLOCK_Q) return;
  const bool used = row < step.len_q - step.q_begin;
  ptx::cp_async<4>(ptx::smem_address(&to.lse[row]), p.lse + step.lse_row + row, used);
  ptx::cp_async<4>(ptx::smem_address(&to.delta[row]), p.delta + step.stat_row + row, used);
}

// Starts the copies of a chunk of step i, or of the step after it, if there is one; with the first chunk of a step
// those of its statistics.
DEVICE void load(const Params &p, Shared &shared, int i, int chunk, u32 slot) {
  const int of_scores = chunks_of(p.head_dim), of_both = of_scores + chunks_of(p.head_dim_v);
  if (chunk >= of_both) ++i, chunk -= of_both;
  const Step &step = shared.step[i % RING];
  if (!step.exists()) return;
  const bool scores = chunk < of_scores;
  const int column = (scores ? chunk : chunk - of_scores) * CHUNK,
            columns = (scores ? p.head_dim : p.head_dim_v) - column;
  const Element *rows_at = (scores ? step.q : step.dout) + column, *columns_at = (scores ? step.k : step.v) + column;
  const i64 rows_stride = ptx::opaque(scores ? p.q_row : p.dout_row);
  const i64 columns_stride = ptx::opaque(scores ? p.k_row : p.v_row);
  const int queries = step.len_q - step.q_begin, keys = step.len_k - step.k_begin;
  const u32 thread = ptx::opaque(threadIdx.x);
  if (chunk == 0) load_statistics(p, shared.statistics[i % 2], step, thread);
  if constexpr (SPLIT) {
    land_rows<T, THREADS, WIDTH, BLOCK_Q, CHUNK>(shared.landing_rows, rows_at, rows_stride, queries, columns, thread);
    land_rows<T, THREADS, WIDTH, BLOCK_K, CHUNK>(shared.landing_columns, columns_at, columns_stride, keys, columns,
                                                 thread);
  } else {
    load_rows<T, THREADS, WIDTH>(shared.slot[slot].rows, rows_at, rows_stride, queries, columns, thread);
    load_rows<T, THREADS, WIDTH>(shared.slot[slot].columns, columns_at, columns_stride, keys, columns, thread);
  }
}

// Waits for a chunk of step i, which is in the slot afterwards, and starts the copies of one LEAD chunks later.
DEVICE void turn(const Params &p, Shared &shared, int i, int chunk, u32 slot) {
  if constexpr (SPLIT) {
    const u32 thread = ptx::opaque(threadIdx.x);
    ptx::cp_async_wait_all();
    ptx::barrier();  // every warp has read the slot
    split_rows<T, THREADS, BLOCK_Q>(shared.slot[0].rows, 0, shared.landing_rows, thread);
    split_rows<T, THREADS, BLOCK_K>(shared.slot[0].columns, 0, shared.landing_columns, thread);
    load(p, shared, i, chunk + LEAD, 0);
    ptx::barrier();  // every thread's part of the chunk is split
  } else {
    ptx::cp_async_wait<LEAD - 1>();
    ptx::barrier();  // every thread's part of the chunk has landed; every warp has read the slot to be filled next
    load(p, shared, i, chunk + LEAD, (slot + LEAD) % STAGES);
    ptx::cp_async_commit();  // also an empty group: the waits count groups
  }
}

// d + low += the product of a slot's rows that are this warp's and its columns.
DEVICE void gemm_slot(Scores &d, Scores &low, const Slot &slot, u32 lane) {
  const int row = warp() * WARP_Q;
  const auto rows = [&](Rows<T, WARP_Q> &a, int column, u32 lane) { a.load(slot.rows, row, column, lane); };
  gather_transposed<true>(d, low, rows, slot.columns, 0, lane);
}

// Scores in units of the natural logarithm; those of pairs that are hidden, or of rows not in use, are -inf.
DEVICE void modify(Scores &s, const Params &p, const Step &step, u32 lane) {
  const int q = step.q_begin + warp() * WARP_Q;
  const int k = step.k_begin, k_end = k + BLOCK_K, q_end = min(q + WARP_Q, step.len_q);
  const Score score(p.score, step.batch, step.head, step.len_q, step.len_k);
  s.each_pair([&](float &even, float &odd, int r, int c) {
    even *= p.scale, odd *= p.scale;
    score.apply(even, odd, q + Scores::row(r, lane), k + Scores::column(0, lane), c);
  });
  const Mask mask(p.mask, step.batch, step.head, step.len_q, step.len_k);
  if (k_end <= step.len_k && q + WARP_Q <= step.len_q && mask.whole(q, q_end, k, k_end)) return;
  s.each([&](float &score, int r, int c) {
    const int row = q + Scores::row(r, lane), key = k + Scores::column(c, lane);
    const bool used = row < step.len_q & key < step.len_k;
    if (!(used & mask.keep(row, key))) score = -INFINITE;
  });
}

// sum += dS. A hidden pair adds nothing, whatever its row of V holds. The LSE is subtracted before the units change: in
// those of log 2 it would be rounded once more.
DEVICE void add(Scores &sum, const Scores &s, Scores &dp, const Params &p, const Step &step,
                const Statistics &statistics, u32 lane) {
  const int first_row = warp() * WARP_Q;
  const Dropout dropout(p.dropout, step.batch, step.head);
#pragma unroll
  for (int first = 0; first < BLOCK_K; first += 32)
    drop<32>(dp, dropout, step.q_begin + first_row, step.k_begin, first, lane);
  const float factor = rescale(dropout);
#pragma unroll
  for (int r = 0; r < Scores::ROWS; ++r) {
    const int row = first_row + Scores::row(r, lane);
    const float lse = statistics.lse[row], delta = statistics.delta[row];
#pragma unroll
    for (int n = 0; n < BLOCK_K / 8; ++n)
#pragma unroll
      for (int i = r % 2 * 2; i < r % 2 * 2 + 2; ++i) {
        const float score = s.x[r / 2][n][i], weight = ptx::ex2(ptx::mul(score - lse, LOG2_E));
        const float ds = weight * ptx::fma(dp.x[r / 2][n][i], factor, -delta);
        sum.x[r / 2][n][i] += score == -INFINITE ? 0.0f : ds;
      }
  }
}

// Sums over the axes of which dBias has one element, and writes the tile.
DEVICE void store(const Params &p, Shared &shared, Scores &sum, u32 lane) {
  const int first_row = warp() * WARP_Q;
  const u32 thread = threadIdx.x;
  const Part part = shared.part;
  if (p.columns == 1) {
    float total[Scores::ROWS] = {};
    sum.each([&](float &value, int r, int) { total[r] += value; });
#pragma unroll
    for (int r = 0; r < Scores::ROWS; ++r) {
      total[r] += ptx::shfl_xor(total[r], 1);
      total[r] += ptx::shfl_xor(total[r], 2);
    }
    sum.each([&](float &value, int r, int) { value = total[r]; });
  }
  sum.each_pair([&](float &even, float &odd, int r, int c) {
    shared.sums.put(first_row + Scores::row(r, lane), Scores::column(c, lane), even, odd);
  });
  ptx::barrier();  // every warp's rows are there

  constexpr int PITCH = Staging<Float32, BLOCK_Q, BLOCK_K>::PITCH;
  float *sums = shared.sums.data;
  if (p.rows == 1) {
    for (int c = thread; c < BLOCK_K; c += THREADS) {
      float total = 0.0f;
      for (int r = 0; r < BLOCK_Q; ++r) total += sums[r * PITCH + c];
      sums[c] = total;
    }
    ptx::barrier();  // every column's sum is there
  }
  constexpr int WRITE = Config::WRITE, ACROSS = BLOCK_K / WRITE;
  struct alignas(WRITE * sizeof(typename Out::Storage)) Elements {
    typename Out::Storage x[WRITE];
  };
  const int height = min(p.rows - part.q_begin, BLOCK_Q), width = min(p.columns - part.k_begin, BLOCK_K);
  const i64 head =
      ((static_cast<i64>(part.entry_part) * p.block_splits + part.block_part) * p.batches + part.batch) * p.heads +
      part.head;
  auto *to = p.dbias + (head * p.rows + part.q_begin) * p.columns + part.k_begin;
  for (int i = thread; i < height * ACROSS; i += THREADS) {
    const int row = i / ACROSS, column = i % ACROSS * WRITE;
    if (column >= width) continue;
    Elements elements;
#pragma unroll
    for (int j = 0; j < WRITE; ++j) elements.x[j] = Out::narrow(sums[row * PITCH + column + j]);
    *reinterpret_cast<Elements *>(to + static_cast<i64>(row) * p.columns + column) = elements;
  }
}

DEVICE void differentiate(const Params &p, Shared &shared) {
  if (threadIdx.x == 0) {
    const Part part = part_of(p, blockIdx.x);
    const int entries = (p.batches == 1 ? p.batch : 1) * (p.heads == 1 ? p.heads_q : 1);
    const int most = quotient(entries, p.entry_splits), first = min(part.entry_part * most, entries);
    shared.part = part;
    shared.cursor = {first, min(first + most, entries), 0, 0, 0, 0, 0};
  }
  ptx::barrier();  // thread 0 has written what the walk begins with
  if (warp() == 0) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      prepare(p, shared, i, ptx::lane());
      ptx::warp_barrier();  // the cursor is past the step
    }
  }
  ptx::barrier();  // the first two steps are known
#pragma unroll
  for (int chunk = 0; chunk < LEAD; ++chunk) {
    load(p, shared, 0, chunk, chunk);
    ptx::cp_async_commit();
  }

  Scores sum;
  sum.zero();
  u32 slot = 0;
  const auto next = [&] { slot = slot + 1 < STAGES ? slot + 1 : 0; };
  const int of_scores = chunks_of(p.head_dim), of_both = of_scores + chunks_of(p.head_dim_v);
  for (int i = 0; shared.step[i % RING].exists(); ++i) {
    const Step &step = shared.step[i % RING];
    // S = Q K^T, with the bits that it has in the forward kernel of these instructions, modified and masked
    Scores s, low;
    s.zero();
    low.zero();
#pragma unroll 1
    for (int chunk = 0; chunk < of_scores; ++chunk, next()) {
      turn(p, shared, i, chunk, slot);
      if (chunk == 0 && warp() == i % Config::WARPS) prepare(p, shared, i + 2, ptx::lane());
      gemm_slot(s, low, shared.slot[slot], ptx::lane());
    }
    join<T>(s, low);
    modify(s, p, step, ptx::lane());
    // dP = dO V^T
    Scores dp;
    dp.zero();
    low.zero();
#pragma unroll 1
    for (int chunk = of_scores; chunk < of_both; ++chunk, next()) {
      turn(p, shared, i, chunk, slot);
      gemm_slot(dp, low, shared.slot[slot], ptx::lane());
    }
    join<T>(dp, low);
    // dS = P (dP - delta)
    add(sum, s, dp, p, step, shared.statistics[i % 2], ptx::lane());
  }
  ptx::cp_async_wait_all();
  ptx::barrier();  // the sums lie over the slots, which every warp has read now
  store(p, shared, sum, ptx::lane());
}

}  // namespace dbias

extern "C" __global__ void __launch_bounds__(dbias::THREADS, Config::MIN_BLOCKS)
    attention_bwd_dbias(const __grid_constant__ dbias::Params p) {
  dbias::differentiate(p, ptx::shared<dbias::Shared>());
}
