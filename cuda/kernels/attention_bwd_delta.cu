// What the backward pass needs to know of each row of O, before the kernels that compute gradients:
// delta = rowsum(O * dO) - dLSE, so that dS = P * (dP - delta), and the LSE in the units of tile/stat_rows.cuh, of
// which P is made. Rows that see no key or are not in use have an LSE of +inf, which makes P = 0, and delta = 0. The
// accumulator of dQ and the counters of what was added to it become zeros.
//
// One block makes 128 rows of one head, LANES lanes a row. Rows are those of tile/stat_rows.cuh.
//
// Reads Config: T, Sequences, HEAD_DIM_V, NATURAL, WIDTH, PARAMS_BYTES.
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

struct Params {
  const Element *out;                // [batch, len_q, heads_q, head_dim_v]
  const Element *dout;               // likewise
  const float *lse;                  // [batch, heads_q, len_q], contiguous
  const float *dlse;                 // likewise, of any strides; may be null
  float *stat_lse;                   // [heads, rows]: all batch entries' heads, those of packed sequences once
  float *delta;                      // likewise
  float *dq;                         // [heads, rows, dq_columns]; may be null
  u32 *added;                        // [heads, rows / ADDED_ROWS], and one more; may be null
  i64 out_batch, out_row, out_head;  // strides in elements; the last dimension's is 1
  i64 dout_batch, dout_row, dout_head;
  i64 dlse_batch, dlse_head, dlse_row;
  int batch, len_q, heads_q, head_dim_v;
  int rows, dq_columns;  // multiples of STAT_ROWS, and of 4
  Sequences::Params sequences;
};

static_assert(sizeof(Params) == Config::PARAMS_BYTES, "the host packs the same struct");
static_assert(STEP <= STAT_ROWS && STAT_ROWS % STEP == 0, "threads divide the rows evenly");

struct alignas(WIDTH) Elements {
  Element x[ELEMENTS];
};

// This lane's share of the product of a row of O and one of dO.
DEVICE float product(const Params &p, const Element *out, const Element *dout, int lane) {
  float sum = 0.0f;
#pragma unroll
  for (int packet = 0; packet < PACKETS_OF_ROW; packet += LANES) {
    const int column = (packet + lane) * ELEMENTS;
    if (column >= p.head_dim_v) continue;
    const auto o = *reinterpret_cast<const Elements *>(out + column);
    const auto d = *reinterpret_cast<const Elements *>(dout + column);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) sum += T::single(o.x[i]) * T::single(d.x[i]);
  }
  return sum;
}

// Makes the statistics of row r of the sequence from the product of its O and dO.
DEVICE void store(const Params &p, const StatBlock &block, i64 r, i64 stat_row, float sum) {
  float stat_lse = INFINITE, delta = 0.0f;
  if (r >= 0 && r < block.q.length) {
    const i64 head = block.head;
    const float lse =
        p.lse[start_of<Sequences>(block.q, block.batch, static_cast<i64>(p.heads_q) * p.len_q, 1) + head * p.len_q + r];
    const i64 at =
        start_of<Sequences>(block.q, block.batch, p.dlse_batch, p.dlse_row) + head * p.dlse_head + r * p.dlse_row;
    if (lse != -INFINITE) {
      const float scaled = lse * LSE_SCALE<Config::NATURAL>;
      stat_lse = ptx::max_nan(ptx::min_nan(scaled, LARGEST), -LARGEST);  // finite where the LSE is
      delta = p.dlse ? sum - p.dlse[at] : sum;
    }
  }
  p.stat_lse[stat_row] = stat_lse;
  p.delta[stat_row] = delta;
}

// Zeros where dQ of the block's rows is summed.
DEVICE void clear(const Params &p, const StatBlock &block, u32 thread) {
  if (p.dq) {
    auto *dq = reinterpret_cast<Packet<16> *>(p.dq + block.stat_row * p.dq_columns);
    for (int i = thread; i < STAT_ROWS * p.dq_columns / 4; i += THREADS) dq[i] = {};
  }
  if (p.added && thread < STAT_ROWS / ADDED_ROWS) p.added[block.stat_row / ADDED_ROWS + thread] = 0;
  // That of the next block, after all others.
  if (p.added && thread == 0 && block.stat_row == 0) p.added[static_cast<i64>(gridDim.x) * STAT_ROWS / ADDED_ROWS] = 0;
}

}  // namespace delta

extern "C" __global__ void __launch_bounds__(delta::THREADS)
    attention_bwd_delta(const __grid_constant__ delta::Params p) {
  using namespace delta;
  const u32 thread = threadIdx.x;
  const int lane = static_cast<int>(thread % LANES);
  const StatBlock block = stat_block_of<Sequences>(blockIdx.x, p.sequences, p.batch, p.len_q, p.heads_q, p.rows);
  const Element *out =
      p.out + start_of<Sequences>(block.q, block.batch, p.out_batch, p.out_row) + block.head * p.out_head;
  const Element *dout =
      p.dout + start_of<Sequences>(block.q, block.batch, p.dout_batch, p.dout_row) + block.head * p.dout_head;
  clear(p, block, thread);
#pragma unroll PASSES < 4 ? PASSES : 4
  for (int pass = 0; pass < PASSES; ++pass) {
    const int i = pass * STEP + static_cast<int>(thread / LANES);
    const i64 r = block.first + i;
    const bool used = r >= 0 && r < block.q.length;
    float sum = used ? product(p, out + r * p.out_row, dout + r * p.dout_row, lane) : 0.0f;
#pragma unroll
    for (int bit = 1; bit < LANES; bit *= 2) sum += ptx::shfl_xor(sum, bit);
    if (lane == 0) store(p, block, r, block.stat_row + i, sum);
  }
}
