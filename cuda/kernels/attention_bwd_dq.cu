// dQ = scale * its sums, the last step of the backward pass: from fp32 in the order of what added them to rows of the
// element type. Rows that are not in use become zeros. Each warp writes 16 rows of one head.
//
// Reads Config: T, Sequences, Order, HEAD_DIM, WIDTH, PARAMS_BYTES, SMEM_BYTES.
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile/place.cuh"
#include "tile/stat_rows.cuh"
#include "tile/sums.cuh"

namespace finish {

using T = Config::T;
using Sequences = Config::Sequences;
using Order = Config::Order;
using Element = T::Storage;
constexpr int HEAD_DIM = Config::HEAD_DIM, WIDTH = Config::WIDTH;
constexpr int WARPS = 4, BLOCK_Q = 16 * WARPS, THREADS = 32 * WARPS;

struct Params {
  const float *sums;              // [heads, rows, HEAD_DIM] of tile/stat_rows.cuh, in that Order
  Element *dq;                    // [batch, len_q, heads_q, head_dim]
  i64 dq_batch, dq_row, dq_head;  // strides in elements; the last dimension's is 1
  int batch, len_q, heads_q, head_dim;
  int rows;  // of a head among the sums
  float scale;
  Sequences::Params sequences;
};

using Shared = Staging<T, BLOCK_Q, HEAD_DIM>;

static_assert(sizeof(Shared) == Config::SMEM_BYTES, "the host computes the same size");
static_assert(sizeof(Params) == Config::PARAMS_BYTES, "the host packs the same struct");

// Stages 16 rows of a warp, of which the first `used` are in use.
DEVICE void stage(Shared &staging, const float *sums, float scale, int first, int used, u32 lane) {
#pragma unroll 4
  for (int n = 0; n < HEAD_DIM / 8; ++n) {
    float x[4] = {};
    if (used > 0) read<Order, HEAD_DIM>(x, sums, n, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 8 * half + static_cast<int>(lane / 4);
      const bool in_use = row < used;
      staging.put(first + row, 8 * n + lane % 4 * 2, in_use ? scale * x[2 * half] : 0.0f,
                  in_use ? scale * x[2 * half + 1] : 0.0f);
    }
  }
}

}  // namespace finish

extern "C" __global__ void __launch_bounds__(finish::THREADS)
    attention_bwd_dq(const __grid_constant__ finish::Params p) {
  using namespace finish;
  auto &staging = ptx::shared<Shared>();
  const u32 lane = ptx::lane();
  const Place place = place_of<Sequences, BLOCK_Q>(blockIdx.x, p.sequences, p.batch, p.len_q, 0, p.heads_q, 1);
  const int first = static_cast<int>(threadIdx.x / 32) * 16, row = place.q_begin + first;
  const int used = place.q.length - row, rows = min(place.q.extent - row, 16);
  if (rows <= 0) return;
  const i64 at = stat_row<Sequences>(place.q, place.batch, place.head, p.heads_q, p.rows) + row;
  stage(staging, p.sums + at * HEAD_DIM, p.scale, first, used, lane);
  ptx::warp_barrier();  // the warp's rows are staged by its own lanes
  Element *dq = p.dq + start_of<Sequences>(place.q, place.batch, p.dq_batch, p.dq_row) + place.head * p.dq_head;
  store_rows<T, WIDTH>(dq + place.q_begin * p.dq_row, p.dq_row, staging, first, rows, p.head_dim, lane);
}
