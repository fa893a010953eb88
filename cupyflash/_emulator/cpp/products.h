// D += A B for small matrices, in double: products of 16-bit floats are exact there. Internal to the runtime.
#pragma once

namespace emu {

struct Matrices {
  alignas(64) double d[16][8], a[16][16], b[16][8];
};

// Rows of D in vectors V, ROWS of them at a time. Vectors wider than the processor's are slow.
template <class V, int ROWS>
inline __attribute__((always_inline)) void accumulate_in(Matrices &m) {
  constexpr int VECTORS = 8 * sizeof(double) / sizeof(V);
  for (int row = 0; row < 16; row += ROWS) {
    V sum[ROWS][VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) sum[r][v] = reinterpret_cast<V *>(m.d[row + r])[v];
    for (int k = 0; k < 16; ++k)
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sum[r][v] += m.a[row + r][k] * reinterpret_cast<V *>(m.b[k])[v];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) reinterpret_cast<V *>(m.d[row + r])[v] = sum[r][v];
  }
}

typedef double Double2 __attribute__((vector_size(16), may_alias));
typedef double Double4 __attribute__((vector_size(32), may_alias));

inline void accumulate_anywhere(Matrices &m) { accumulate_in<Double2, 2>(m); }

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline void accumulate_avx2(Matrices &m) { accumulate_in<Double4, 4>(m); }
inline void accumulate(Matrices &m) {
  static const bool avx2 = __builtin_cpu_supports("avx2");
  avx2 ? accumulate_avx2(m) : accumulate_anywhere(m);
}
#else
inline void accumulate(Matrices &m) { accumulate_anywhere(m); }
#endif

}  // namespace emu
