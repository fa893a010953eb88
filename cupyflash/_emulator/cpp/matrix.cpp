// Matrix instructions of a warp: what the lanes' fragments hold is in cuda/ptx/ldmatrix.cuh and mma.cuh.
#include <cstring>

#include "formats.h"
#include "precise.h"
#include "products.h"
#include "state.h"

namespace emu {

namespace {

template <bool TRANSPOSED>
void load_x4(Lanes &lanes) {
  constexpr const char *NAME = TRANSPOSED ? "ldmatrix.trans" : "ldmatrix";
  Block &block = *machine.block;
  const Access access{*machine.thread, NAME, lanes.loc, true};
  ++machine.stats.ldmatrix;
  uint16_t matrix[4][8][8];
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const uint32_t address = lanes.of<MatrixLoad>(lane).row;
    const unsigned char *row = block.shared.at(address, 16, 16, NAME, lanes.loc);
    block.shadow.read(address - Shared::BASE, 16, access);
    memcpy(matrix[lane / 8][lane % 8], row, 16);
  }
  for (uint32_t lane = 0; lane < 32; ++lane) {
    uint32_t *d = lanes.of<MatrixLoad>(lane).d;
    const uint32_t row = lane / 4, column = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      const auto &m = matrix[i];
      d[i] = TRANSPOSED ? m[column][row] | m[column + 1][row] << 16 : m[row][column] | m[row][column + 1] << 16;
    }
  }
}

// Tensor cores truncate what they accumulate: bits go that a float has no room for. (Subnormal results are rounded.)
float truncated(double x) {
  constexpr uint64_t KEPT = ~uint64_t{0} << (52 - 23);
  return static_cast<float>(__builtin_bit_cast(double, __builtin_bit_cast(uint64_t, x) & KEPT));
}

template <float (*FROM)(uint16_t)>
void multiply(Lanes &lanes) {
  const PreciseFloats precise;
  ++machine.stats.mma;
  const auto low = [](uint32_t pair) { return static_cast<double>(FROM(static_cast<uint16_t>(pair))); };
  const auto high = [](uint32_t pair) { return static_cast<double>(FROM(static_cast<uint16_t>(pair >> 16))); };
  Matrices matrices;
  auto &[d, a, b] = matrices;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const Product &mine = lanes.of<Product>(lane);
    const uint32_t g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      const uint32_t row = g + i % 2 * 8, k = t + i / 2 * 8;
      a[row][k] = low(mine.a[i]), a[row][k + 1] = high(mine.a[i]);
      d[g + i / 2 * 8][t + i % 2] = mine.d[i];
    }
    for (int i = 0; i < 2; ++i) b[t + 8 * i][g] = low(mine.b[i]), b[t + 8 * i + 1][g] = high(mine.b[i]);
  }
  accumulate(matrices);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const Product &mine = lanes.of<Product>(lane);
    for (int i = 0; i < 4; ++i) mine.d[i] = truncated(d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
  }
}

}  // namespace

const Instruction LDMATRIX_X4{"ldmatrix", load_x4<false>}, LDMATRIX_X4_TRANS{"ldmatrix.trans", load_x4<true>};
const Instruction MMA_BF16{"mma.sync", multiply<from_bf16>}, MMA_F16{"mma.sync", multiply<from_f16>};

}  // namespace emu
