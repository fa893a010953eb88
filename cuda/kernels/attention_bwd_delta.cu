// What the backward pass needs to know of each row of O, before the kernels that compute gradients:
// delta = rowsum(O * dO) - dLSE, so that dS = P * (dP - delta), and the LSE in the units of tile/stat_rows.cuh, of
// which P is made. Rows that see no key or are not in use have an LSE of +inf, which makes P = 0, and delta = 0. The
// accumulator of dQ, where it is not stored to first, and the counters of blocks that add to it, or share their keys,
// become zeros.
//
// One block makes 128 rows of one head, LANES lanes a row. Rows are those of tile/stat_rows.cuh.
//
// Reads Config: T, Sequences, HEAD_DIM_V, NATURAL, WIDTH, MIN_BLOCKS, PARAMS_BYTES.
#include "ptx/math.cuh"
#include "tile/load.cuh"
#include "tile/place.cuh"
#include "tile/stat_rows.cuh"

namespace delta {

using T = Config::T;
using Sequences = Config::Sequences;
using Element = T::Storage;
constexpr int HEAD_DIM_V = Config::HEAD_DIM_V, WIDTH = Config::WIDTH, THREADS = 256;
constexpr int ELEMENTS = WIDTH / sizeof(Element), PACKETS_OF_ROW = HEAD_DIM_V / ELEMENTS;
// Lanes of a row: a power of two that divides its packets.
constexpr int DIVISOR = PACKETS_OF_ROW & -PACKETS_OF_ROW, LANES = DIVISOR < 32 ? DIVISOR : 32;
constexpr int STEP = THREADS / LANES, PASSES = STAT_ROWS / STEP;  // rows at a time, and how often

constexpr int OF_LANE = PACKETS_OF_ROW / LANES;  // packets
// Passes whose loads are in flight, of at most 4 packets a lane.
constexpr int AT_ONCE = PASSES * OF_LANE <= 4 ? PASSES : OF_LANE >= 4 ? 1 : 4 / OF_LANE;

struct Params {
  const Element *out;                // [batch, len_q, heads_q, head_dim_v]
  const Element *dout;               // likewise
  const float *lse;                  // [batch, heads_q, len_q], contiguous
  const float *dlse;                 // likewise, of any strides; may be null
  float *stat_lse;                   // [heads, rows]: all batch entries' heads, those of packed sequences once
  float *delta;                      // likewise
  float *dq;                         // [heads, rows, dq_columns]; may be null
  u32 *added;                        // [heads, rows / ADDED_ROWS], and more; may be null
  i64 out_batch, out_row, out_head;  // strides in elements; the last dimension's is 1
  i64 dout_batch, dout_row, dout_head;
  i64 dlse_batch, dlse_head, dlse_row;
  int batch, len_q, heads_q, head_dim_v;
  int rows, dq_columns;  // multiples of STAT_ROWS, and of 4
  int more, unused;      // counters beyond those of rows
  Sequences::Params sequences;
};

static_assert(sizeof(Params) == Config::PARAMS_BYTES, "the host packs the same struct");
static_assert(STEP <= STAT_ROWS && STAT_ROWS % STEP == 0, "threads divide the rows evenly");

struct alignas(WIDTH) Elements {
  Element x[ELEMENTS];
};

// This lane's share of a row; zeros where there is none.
DEVICE void load(const Params &p, Elements (&x)[OF_LANE], const Element *row, int lane, bool used) {
#pragma unroll
  for (int i = 0; i < OF_LANE; ++i) {
    const int column = (i * LANES + lane) * ELEMENTS;
    x[i] = used && column < p.head_dim_v ? *reinterpret_cast<const Elements *>(row + column) : Elements{};
  }
}

// This lane's share of the product of a row of O and one of dO.
DEVICE float product(const Elements (&o)[OF_LANE], const Elements (&d)[OF_LANE]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < OF_LANE; ++i)
#pragma unroll
    for (int n = 0; n < ELEMENTS; ++n) sum += T::single(o[i].x[n]) * T::single(d[i].x[n]);
  return sum;
}

// The LSE of row r of the sequence, and its gradient.
struct Sums {
  float lse = -INFINITE, dlse = 0.0f;
};
DEVICE Sums sums_of(const Params &p, const StatBlock &block, i64 r) {
  Sums sums;
  if (r >= 0 && r < block.q.length) {
    const i64 head = block.head, lse_batch = static_cast<i64>(p.heads_q) * p.len_q;
    sums.lse = p.lse[start_of<Sequences>(block.q, block.batch, lse_batch, 1) + head * p.len_q + r];
    if (p.dlse)
      sums.dlse = p.dlse[start_of<Sequences>(block.q, block.batch, p.dlse_batch, p.dlse_row) + head * p.dlse_head +
                         r * p.dlse_row];
  }
  return sums;
}

DEVICE void store(const Params &p, i64 stat_row, const Sums &sums, float product) {
  const bool sees = sums.lse != -INFINITE;
  // Finite where the LSE is.
  p.stat_lse[stat_row] =
      sees ? ptx::max_nan(ptx::min_nan(sums.lse * LSE_SCALE<Config::NATURAL>, LARGEST), -LARGEST) : INFINITE;
  p.delta[stat_row] = sees ? product - sums.dlse : 0.0f;
}

// Zeros where dQ of the block's rows is summed.
DEVICE void clear(const Params &p, const StatBlock &block, u32 thread) {
  if (p.dq) {
    auto *dq = reinterpret_cast<Packet<16> *>(p.dq + block.stat_row * p.dq_columns);
    for (int i = thread; i < STAT_ROWS * p.dq_columns / 4; i += THREADS) dq[i] = {};
  }
  if (p.added && thread < STAT_ROWS / ADDED_ROWS) p.added[block.stat_row / ADDED_ROWS + thread] = 0;
  // Those that belong to no rows, after all others.
  if (p.added && block.stat_row == 0)
    for (int i = static_cast<int>(thread); i < p.more; i += THREADS)
      p.added[static_cast<i64>(gridDim.x) * STAT_ROWS / ADDED_ROWS + i] = 0;
}

}  // namespace delta

extern "C" __global__ void __launch_bounds__(delta::THREADS, Config::MIN_BLOCKS)
    attention_bwd_delta(const __grid_constant__ delta::Params p) {
  using namespace delta;
  const u32 thread = threadIdx.x;
  const int lane = static_cast<int>(thread % LANES);
  const StatBlock block = stat_block_of<Sequences>(blockIdx.x, p.sequences, p.batch, p.len_q, p.heads_q, p.rows);
  const Element *out =
      p.out + start_of<Sequences>(block.q, block.batch, p.out_batch, p.out_row) + block.head * p.out_head;
  const Element *dout =
      p.dout + start_of<Sequences>(block.q, block.batch, p.dout_batch, p.dout_row) + block.head * p.dout_head;
  const int first = static_cast<int>(thread / LANES), own = lane * STEP + first;
  const bool finishes = lane < PASSES;  // the row of the pass that has the lane's number
  const Sums sums = finishes ? sums_of(p, block, block.first + own) : Sums{};
  float product_of_own = 0.0f;
  for (int chunk = 0; chunk < PASSES; chunk += AT_ONCE) {
    Elements o[AT_ONCE][OF_LANE], d[AT_ONCE][OF_LANE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const i64 r = block.first + (chunk + i) * STEP + first;
      const bool used = r >= 0 && r < block.q.length;
      load(p, o[i], out + r * p.out_row, lane, used);
      load(p, d[i], dout + r * p.dout_row, lane, used);
    }
    if (chunk == 0) clear(p, block, thread);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      float sum = product(o[i], d[i]);
#pragma unroll
      for (int bit = 1; bit < LANES; bit *= 2) sum += ptx::shfl_xor(sum, bit);
      if (lane == chunk + i) product_of_own = sum;
    }
  }
  if (finishes) store(p, block.stat_row + own, sums, product_of_own);
}
