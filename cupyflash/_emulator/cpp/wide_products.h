// D += A B of a warpgroup, in double: the products of 16-bit and 8-bit floats are exact there, so it makes no
// difference whether a processor adds them in the same instruction. Internal to the runtime.
#pragma once
#include <cstdint>

namespace emu {

// Tensor cores truncate what they accumulate: bits go that a float has no room for. (Subnormal results are rounded.)
constexpr uint64_t KEPT_BITS = ~uint64_t{0} << (52 - 23);

struct WideMatrices {
  static constexpr int ROWS = 64, MAX_COLUMNS = 256, MAX_DEPTH = 32;

  int columns, depth;
  bool keep;  // what D held
  float *d;   // [ROWS][columns], 16-byte aligned
  alignas(64) double a[ROWS][MAX_DEPTH], b[MAX_DEPTH][MAX_COLUMNS];
};

struct TwoLanes {
  typedef double Doubles __attribute__((vector_size(16), may_alias));
  typedef uint64_t Bits __attribute__((vector_size(16)));
  typedef float Floats __attribute__((vector_size(8), may_alias));
};
struct FourLanes {
  typedef double Doubles __attribute__((vector_size(32), may_alias));
  typedef uint64_t Bits __attribute__((vector_size(32)));
  typedef float Floats __attribute__((vector_size(16), may_alias));
};

// A tile of D, 4 rows of 8 elements. Vectors wider than the processor's are slow.
template <class Vector>
inline __attribute__((always_inline)) void accumulate_tile(const WideMatrices &m, int row, int column) {
  using Doubles = typename Vector::Doubles;
  using Bits = typename Vector::Bits;
  using Floats = typename Vector::Floats;
  constexpr int ROWS = 4, LANES = sizeof(Doubles) / sizeof(double), VECTORS = 8 / LANES;
  float *d = m.d + row * m.columns + column;
  Doubles sum[ROWS][VECTORS] = {};
  if (m.keep) {
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v)
        sum[r][v] = __builtin_convertvector(*reinterpret_cast<const Floats *>(d + r * m.columns + v * LANES), Doubles);
  }
  for (int k = 0; k < m.depth; ++k)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const Doubles b = *reinterpret_cast<const Doubles *>(&m.b[k][column + v * LANES]);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) sum[r][v] += m.a[row + r][k] * b;
    }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const Doubles kept = reinterpret_cast<Doubles>(reinterpret_cast<Bits>(sum[r][v]) & KEPT_BITS);
      *reinterpret_cast<Floats *>(d + r * m.columns + v * LANES) = __builtin_convertvector(kept, Floats);
    }
}

template <class Vector>
inline __attribute__((always_inline)) void accumulate_tiles(const WideMatrices &m) {
  for (int row = 0; row < WideMatrices::ROWS; row += 4)
    for (int column = 0; column < m.columns; column += 8) accumulate_tile<Vector>(m, row, column);
}

inline void accumulate_wide_anywhere(const WideMatrices &m) { accumulate_tiles<TwoLanes>(m); }

#if defined(__x86_64__)
__attribute__((target("avx2,fma"),
               optimize("fp-contract=fast"))) inline void accumulate_wide_fma(const WideMatrices &m) {
  accumulate_tiles<FourLanes>(m);
}
inline void accumulate(const WideMatrices &m) {
  static const bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  fma ? accumulate_wide_fma(m) : accumulate_wide_anywhere(m);
}
#else
inline void accumulate(const WideMatrices &m) { accumulate_wide_anywhere(m); }
#endif

}  // namespace emu
