// dQ from the accumulator that attention_bwd_sm90 leaves: times the scale, in its dtype, in its place. The accumulator
// is in the order of fragments: 64 x 64 numbers of a block of queries lie as [chunk of 8 columns][thread][4], as the
// threads of a warpgroup hold them. Where counters say that nothing was added, there is nothing to read, and dQ is 0.
//
// One block makes 128 rows of one head.
//
// Reads Config: T, Sequences, HEAD_DIM, PARAMS_BYTES.
#include "tile/output.cuh"
#include "tile/place.cuh"
#include "tile/stat_rows.cuh"

namespace convert {

using T = Config::T;
using Sequences = Config::Sequences;
using Element = T::Storage;
constexpr int HEAD_DIM = Config::HEAD_DIM, THREADS = 256;
constexpr int BLOCK_Q = HEAD_DIM == 64 ? 128 : 64;     // queries whose accumulators lie together
constexpr int PARTS = BLOCK_Q * HEAD_DIM / (64 * 64);  // of 64 columns, or rows

struct Params {
  const float *accumulated;       // [heads, rows, HEAD_DIM]: see tile/stat_rows.cuh
  const u32 *added;               // [heads, rows / ADDED_ROWS]: one for each part of a query block; may be null
  Element *dq;                    // [batch, len_q, heads_q, head_dim]
  i64 dq_batch, dq_row, dq_head;  // strides in elements; the last dimension's is 1
  int batch, len_q, heads_q, head_dim;
  int rows;
  float scale;
  Sequences::Params sequences;
};

static_assert(sizeof(Params) == Config::PARAMS_BYTES, "the host packs the same struct");

struct alignas(16) Four {
  float x[4];
};

// Two rows of a chunk: what the four threads of a quad hold.
DEVICE void convert(const Params &p, const StatBlock &at, Element *head, int first, int part, u32 unit) {
  const int chunk = unit % 8, warp = unit / 64, eighth = unit / 8 % 8;
  const int row = warp * 16 + eighth + (HEAD_DIM == 64 ? part * 64 : 0);
  const int column = chunk * 8 + (HEAD_DIM == 64 ? 0 : part * 64);
  const auto *quad = reinterpret_cast<const Four *>(p.accumulated + (at.stat_row + first) * HEAD_DIM + part * 4096) +
                     (chunk * 32 + warp * 8 + eighth) * 4;
  const bool some = !p.added || p.added[(at.stat_row + first) / ADDED_ROWS + part] != 0;
  Chunk halves[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Four four = some ? quad[i] : Four{};
    halves[0].word[i] = T::pair(four.x[0] * p.scale, four.x[1] * p.scale);
    halves[1].word[i] = T::pair(four.x[2] * p.scale, four.x[3] * p.scale);
  }
  if (column >= p.head_dim) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i64 r = at.first + first + row + half * 8;
    if (r >= 0 && r < at.q.extent) *reinterpret_cast<Chunk *>(head + r * p.dq_row + column) = halves[half];
  }
}

// Rows of no sequence become zeros: block `at` of a head has as many of them as of others.
DEVICE void clear(const Params &p, int at, Element *head) {
  if constexpr (Sequences::PACKED) {
    const Span before = Sequences::queries(p.sequences, p.batch, p.batch, p.len_q);
    const Span after = Sequences::queries(p.sequences, p.batch + 1, p.batch, p.len_q);
    const int columns = p.head_dim / 8, end = min((at + 1) * STAT_ROWS, before.extent + after.extent) * columns;
    for (int i = at * STAT_ROWS * columns + static_cast<int>(threadIdx.x); i < end; i += THREADS) {
      const int n = i / columns, column = i % columns * 8;
      const i64 row = n < before.extent ? n : after.first + n - before.extent;
      *reinterpret_cast<Chunk *>(head + row * p.dq_row + column) = {};
    }
  }
}

}  // namespace convert

extern "C" __global__ void __launch_bounds__(convert::THREADS)
    attention_bwd_dq_sm90(const __grid_constant__ convert::Params p) {
  using namespace convert;
  const StatBlock at = stat_block_of<Sequences>(blockIdx.x, p.sequences, p.batch, p.len_q, p.heads_q, p.rows);
  convert::clear(p, blockIdx.x % (p.rows / STAT_ROWS), p.dq + at.head * p.dq_head);
  Element *head = p.dq + start_of<Sequences>(at.q, at.batch, p.dq_batch, p.dq_row) + at.head * p.dq_head;
#pragma unroll
  for (int first = 0; first < STAT_ROWS; first += BLOCK_Q)
#pragma unroll
    for (int part = 0; part < PARTS; ++part) convert::convert(p, at, head, first, part, threadIdx.x);
}
