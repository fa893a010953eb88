// Adds what the blocks of attention_bwd_dbias that share a tile have summed, in order, and rounds it to the bias's
// type. Of no parts the sum is 0. One thread makes one element.
//
// Reads Config: Out, PARAMS_BYTES.
#include "tile/types.cuh"

namespace dbias_sum {

using Out = Config::Out;
constexpr int THREADS = 256;

struct Params {
  const float *parts;   // [splits, count]
  Out::Storage *dbias;  // [count]
  i64 count;
  int splits, unused;
};

static_assert(sizeof(Params) == Config::PARAMS_BYTES, "the host packs the same struct");

}  // namespace dbias_sum

extern "C" __global__ void __launch_bounds__(dbias_sum::THREADS)
    attention_bwd_dbias_sum(const __grid_constant__ dbias_sum::Params p) {
  const i64 i = static_cast<i64>(blockIdx.x) * dbias_sum::THREADS + threadIdx.x;
  if (i >= p.count) return;
  float sum = 0.0f;
#pragma unroll 8
  for (int split = 0; split < p.splits; ++split) sum += p.parts[split * p.count + i];
  p.dbias[i] = dbias_sum::Out::narrow(sum);
}
