// Matrix instructions of a warp: what the lanes' fragments hold is in cuda/ptx/ldmatrix.cuh, mma.cuh and fp8.cuh.
#include <cstring>

#include "formats.h"
#include "precise.h"
#include "products.h"
#include "state.h"

namespace emu {

namespace {

// A lane, for ThreadSanitizer.
const tsan::Fiber &fiber_of(uint32_t lane) {
  const Thread &self = *machine.thread;
  return self.block->threads[self.number / 32 * 32 + lane]->context.fiber;
}

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
    for (const uint32_t reader : {lane, lane ^ 1}) {  // all lanes get parts of it, the one that stored it is not alone
      const tsan::As as(fiber_of(reader));
      tsan::read(row, 16, lanes.counter);
    }
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

template <bool TRANSPOSED>
void store_x4(Lanes &lanes) {
  constexpr const char *NAME = TRANSPOSED ? "stmatrix.trans" : "stmatrix";
  Block &block = *machine.block;
  const Access access{*machine.thread, NAME, lanes.loc, true};
  uint16_t matrix[4][8][8];
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const uint32_t *d = lanes.of<MatrixStore>(lane).d;
    const uint32_t row = lane / 4, column = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      auto &m = matrix[i];
      (TRANSPOSED ? m[column][row] : m[row][column]) = static_cast<uint16_t>(d[i]);
      (TRANSPOSED ? m[column + 1][row] : m[row][column + 1]) = static_cast<uint16_t>(d[i] >> 16);
    }
  }
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const uint32_t address = lanes.of<MatrixStore>(lane).row;
    unsigned char *row = block.shared.at(address, 16, 16, NAME, lanes.loc);
    block.shadow.write(address - Shared::BASE, 16, access);
    const tsan::As as(fiber_of(lane));
    tsan::write(row, 16, lanes.counter);
    memcpy(row, matrix[lane / 8][lane % 8], 16);
  }
}

// Tensor cores truncate what they accumulate: bits go that a float has no room for. (Subnormal results are rounded.)
float truncated(double x) {
  constexpr uint64_t KEPT = ~uint64_t{0} << (52 - 23);
  return static_cast<float>(__builtin_bit_cast(double, __builtin_bit_cast(uint64_t, x) & KEPT));
}

// D of a product, from and to the lanes.
void gather(Lanes &lanes, Matrices &matrices) {
  for (uint32_t lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) matrices.d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = lanes.of<Product>(lane).d[i];
}

void scatter(Lanes &lanes, const Matrices &matrices) {
  for (uint32_t lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i)
      lanes.of<Product>(lane).d[i] = truncated(matrices.d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
}

template <float (*FROM)(uint16_t)>
void multiply(Lanes &lanes) {
  const PreciseFloats precise;
  ++machine.stats.mma;
  const auto low = [](uint32_t pair) { return static_cast<double>(FROM(static_cast<uint16_t>(pair))); };
  const auto high = [](uint32_t pair) { return static_cast<double>(FROM(static_cast<uint16_t>(pair >> 16))); };
  Matrices matrices;
  auto &[d, a, b] = matrices;
  gather(lanes, matrices);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const Product &mine = lanes.of<Product>(lane);
    const uint32_t g = lane / 4, t = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      const uint32_t row = g + i % 2 * 8, k = t + i / 2 * 8;
      a[row][k] = low(mine.a[i]), a[row][k + 1] = high(mine.a[i]);
    }
    for (int i = 0; i < 2; ++i) b[t + 8 * i][g] = low(mine.b[i]), b[t + 8 * i + 1][g] = high(mine.b[i]);
  }
  accumulate(matrices);
  scatter(lanes, matrices);
}

// The same of 8-bit elements: a register holds four along K, which is twice as long.
template <float (*FROM)(uint8_t)>
void multiply_bytes(Lanes &lanes) {
  const PreciseFloats precise;
  ++machine.stats.mma;
  const auto byte = [](uint32_t four, uint32_t i) { return static_cast<double>(FROM(four >> 8 * i & 0xff)); };
  Matrices matrices;
  auto &[d, a, b] = matrices;
  gather(lanes, matrices);
  for (int half = 0; half < 2; ++half) {
    for (uint32_t lane = 0; lane < 32; ++lane) {
      const Product &mine = lanes.of<Product>(lane);
      const uint32_t g = lane / 4, k = lane % 4 * 4;
      for (uint32_t i = 0; i < 4; ++i) {
        a[g][k + i] = byte(mine.a[2 * half], i), a[g + 8][k + i] = byte(mine.a[2 * half + 1], i);
        b[k + i][g] = byte(mine.b[half], i);
      }
    }
    accumulate(matrices);
  }
  scatter(lanes, matrices);
}

}  // namespace

const Instruction LDMATRIX_X4{"ldmatrix", load_x4<false>}, LDMATRIX_X4_TRANS{"ldmatrix.trans", load_x4<true>};
const Instruction STMATRIX_X4{"stmatrix", store_x4<false>}, STMATRIX_X4_TRANS{"stmatrix.trans", store_x4<true>};
const Instruction MMA_BF16{"mma.sync", multiply<from_bf16>}, MMA_F16{"mma.sync", multiply<from_f16>};
const Instruction MMA_E4M3{"mma.sync", multiply_bytes<from_e4m3>}, MMA_E5M2{"mma.sync", multiply_bytes<from_e5m2>};

}  // namespace emu
