// dsink = -sum exp(sink - LSE) delta over the rows of all batch entries, for each head of queries. One block sums one
// head in an order of its own, always the same.
//
// Reads Config: Sink, NATURAL, PARAMS_BYTES.
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile/load.cuh"
#include "tile/sink.cuh"
#include "tile/stat_rows.cuh"

namespace sinks {

using Sink = Config::Sink;
constexpr float SCALE = LSE_SCALE<Config::NATURAL>;
constexpr int THREADS = 512, WARPS = THREADS / 32;

struct Params {
  const float *lse;      // [entries, heads, rows] of tile/stat_rows.cuh
  const float *delta;    // likewise
  Sink::Storage *dsink;  // [heads], contiguous
  int entries, heads;    // packed sequences are one entry
  int rows;              // a multiple of 4
  int unused;
  Sink::Params sink;
};

struct Shared {
  float sums[WARPS];
};

static_assert(sizeof(Params) == Config::PARAMS_BYTES, "the host packs the same struct");

// This thread's share of the sum over a head's rows of all entries. Rows that see nothing have an infinite LSE here,
// and weigh nothing.
DEVICE float share(const Params &p, int head, float logit, u32 thread) {
  float sum = 0.0f;
  for (int b = 0; b < p.entries; ++b) {
    const i64 first = (static_cast<i64>(b) * p.heads + head) * p.rows;
    float of_entry = 0.0f;  // short sums of short sums: their roundings do not grow with the length
    for (int r = 4 * thread; r < p.rows; r += 4 * THREADS) {
      const auto lse = *reinterpret_cast<const Packet<16> *>(p.lse + first + r);
      const auto delta = *reinterpret_cast<const Packet<16> *>(p.delta + first + r);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float weight = ptx::ex2((logit - ptx::bits_float(lse.word[i])) * (LOG2_E / SCALE));
        of_entry -= weight * ptx::bits_float(delta.word[i]);
      }
    }
    sum += of_entry;
  }
  return sum;
}

DEVICE void differentiate(const Params &p, Shared &shared, int head, u32 thread) {
  // In the units of the LSE: a row whose only weight is the sink's has the weight 1.
  const float logit = Sink(p.sink, head).logit * SCALE;
  float sum = share(p, head, logit, thread);
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) sum += ptx::shfl_xor(sum, lane);
  if (thread % 32 == 0) shared.sums[thread / 32] = sum;
  ptx::barrier();  // every warp has written its sum
  if (thread != 0) return;
  float total = 0.0f;
  for (int warp = 0; warp < WARPS; ++warp) total += shared.sums[warp];
  p.dsink[head] = Sink::narrow(total);
}

}  // namespace sinks

extern "C" __global__ void __launch_bounds__(sinks::THREADS)
    attention_bwd_dsink(const __grid_constant__ sinks::Params p) {
  sinks::differentiate(p, ptx::shared<sinks::Shared>(), static_cast<int>(blockIdx.x), threadIdx.x);
}
