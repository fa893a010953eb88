// Accumulators of m16n8k16 products in the registers of one warp, and the products of attention. In each 16 x 8
// piece a thread owns two columns of two rows: row lane / 4 (+ 8), columns 2 (lane % 4) (+ 1).
#pragma once
#include "tile/smem.cuh"

template <int M, int N>
struct Fragment {
  static constexpr int ROWS = M / 8;  // rows of which this thread owns a part
  float x[M / 16][N / 8][4];

  DEVICE void zero() {
    each([](float &value, int, int) { value = 0.0f; });
  }

  // f(value, row, column) for `columns` columns from `first` on: row counts this thread's rows, column counts from the
  // fragment's first column (lane 0's share).
  template <class F>
  DEVICE void each(F f, int first = 0, int columns = N) {
#pragma unroll
    for (int m = 0; m < M / 16; ++m)
#pragma unroll
      for (int n = first / 8; n < (first + columns) / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) f(x[m][n][i], 2 * m + i / 2, 8 * n + i % 2);
  }

  // f(even, odd, row, column) of neighbours in a row, likewise.
  template <class F>
  DEVICE void each_pair(F f) {
#pragma unroll
    for (int m = 0; m < M / 16; ++m)
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; i += 2) f(x[m][n][i], x[m][n][i + 1], 2 * m + i / 2, 8 * n);
  }

  DEVICE static int row(int index, u32 lane) { return index / 2 * 16 + index % 2 * 8 + static_cast<int>(lane / 4); }
  DEVICE static int column(int index, u32 lane) { return index + static_cast<int>(lane % 4 * 2); }
};

// The A operand of 16 x 16 pieces: one for each 16 rows.
template <class T, int M>
struct Rows {
  u32 a[T::PLANES][M / 16][4];

  template <int R, int C>
  DEVICE void load(const Operand<T, R, C> &operand, int row, int column, u32 lane) {
#pragma unroll
    for (int i = 0; i < T::PLANES; ++i)
#pragma unroll
      for (int m = 0; m < M / 16; ++m) operand.plane[i].load_rows(a[i][m], row + 16 * m, column, lane);
  }

  template <int R, int C>
  DEVICE void load(const RawOperand<T, R, C> &operand, int row, int column, u32 lane) {
#pragma unroll
    for (int m = 0; m < M / 16; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float *pair = &operand.at(row + 16 * m + i % 2 * 8 + lane / 4, column + i / 2 * 8 + lane % 4 * 2);
        put(m, i, pair[0], pair[1]);
      }
  }

  // Rows of A are columns [row, row + M) of the tile.
  template <int R, int C>
  DEVICE void load_transposed(const Operand<T, R, C> &operand, int row, int column, u32 lane) {
#pragma unroll
    for (int i = 0; i < T::PLANES; ++i)
#pragma unroll
      for (int m = 0; m < M / 16; ++m) operand.plane[i].load_rows_trans(a[i][m], column, row + 16 * m, lane);
  }

  template <int R, int C>
  DEVICE void load_transposed(const RawOperand<T, R, C> &operand, int row, int column, u32 lane) {
#pragma unroll
    for (int m = 0; m < M / 16; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 r = column + i / 2 * 8 + lane % 4 * 2, c = row + 16 * m + i % 2 * 8 + lane / 4;
        put(m, i, operand.at(r, c), operand.at(r + 1, c));
      }
  }

  // Two neighbours in a row: register i of the 16 x 16 piece m.
  DEVICE void put(int m, int i, float low, float high) {
    u32 planes[T::PLANES];
    split<T>(low, high, planes);
#pragma unroll
    for (int k = 0; k < T::PLANES; ++k) a[k][m][i] = planes[k];
  }

  // To where load would read it.
  template <int R, int C>
  DEVICE void store(Operand<T, R, C> &operand, int row, int column, u32 lane) const {
#pragma unroll
    for (int k = 0; k < T::PLANES; ++k)
#pragma unroll
      for (int m = 0; m < M / 16; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          operand.plane[k].pair(row + 16 * m + i % 2 * 8 + lane / 4, column + i / 2 * 8 + lane % 4 * 2) = a[k][m][i];
  }

  // The sum of the planes is what was split.
  template <int R, int C>
  DEVICE void store(RawOperand<T, R, C> &operand, int row, int column, u32 lane) const {
#pragma unroll
    for (int m = 0; m < M / 16; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int k = T::PLANES - 1; k >= 0; --k) {
          low += ptx::bits_float(a[k][m][i] << 16);
          high += ptx::bits_float(a[k][m][i] & 0xffff0000u);
        }
        float *pair = &operand.at(row + 16 * m + i % 2 * 8 + lane / 4, column + i / 2 * 8 + lane % 4 * 2);
        pair[0] = low, pair[1] = high;
      }
  }

  // Columns [column, column + 16) of an accumulator of weights: its layout is that of the A operand.
  template <int N>
  DEVICE void load(const Fragment<M, N> &p, int column) {
#pragma unroll
    for (int m = 0; m < M / 16; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&pair)[4] = p.x[m][column / 8 + i / 2];
        put(m, i, pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
      }
  }
};

// The B operand of two 8-column pieces: b[plane][piece][half of k].
template <class T>
struct Columns {
  u32 b[T::PLANES][2][2];

  // Columns of B are rows [row, row + 16) of the tile, as in Q K^T.
  template <int R, int C>
  DEVICE void load_transposed(const Operand<T, R, C> &operand, int row, int column, u32 lane) {
#pragma unroll
    for (int i = 0; i < T::PLANES; ++i) {
      u32 quarter[4];
      operand.plane[i].load_columns(quarter, row, column, lane);
      b[i][0][0] = quarter[0], b[i][0][1] = quarter[1], b[i][1][0] = quarter[2], b[i][1][1] = quarter[3];
    }
  }

  template <int R, int C>
  DEVICE void load_transposed(const RawOperand<T, R, C> &operand, int row, int column, u32 lane) {
#pragma unroll
    for (int piece = 0; piece < 2; ++piece)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float *pair = &operand.at(row + 8 * piece + lane / 4, column + 8 * half + lane % 4 * 2);
        put(piece, half, pair[0], pair[1]);
      }
  }

  // Columns of B are columns [column, column + 16) of the tile, as in P V.
  template <int R, int C>
  DEVICE void load(const Operand<T, R, C> &operand, int row, int column, u32 lane) {
#pragma unroll
    for (int i = 0; i < T::PLANES; ++i) {
      u32 quarter[4];
      operand.plane[i].load_columns_trans(quarter, row, column, lane);
      b[i][0][0] = quarter[0], b[i][0][1] = quarter[1], b[i][1][0] = quarter[2], b[i][1][1] = quarter[3];
    }
  }

  template <int R, int C>
  DEVICE void load(const RawOperand<T, R, C> &operand, int row, int column, u32 lane) {
#pragma unroll
    for (int piece = 0; piece < 2; ++piece)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 r = row + 8 * half + lane % 4 * 2, c = column + 8 * piece + lane / 4;
        put(piece, half, operand.at(r, c), operand.at(r + 1, c));
      }
  }

 private:
  DEVICE void put(int piece, int half, float low, float high) {
    u32 planes[T::PLANES];
    split<T>(low, high, planes);
#pragma unroll
    for (int i = 0; i < T::PLANES; ++i) b[i][piece][half] = planes[i];
  }
};

// How many pairs of 8-column pieces are multiplied side by side. With three planes each accumulator takes five products
// in a row, and four accumulators keep the tensor cores busy while each product waits for the one before.
template <class T, int M, int N>
constexpr int GROUP = T::PLANES > 1 && M == 16 && N % 32 == 0 && N < 256 ? 2 : 1;

// Columns [column, column + 16 G) of the accumulator += a b, one 16-deep step. With three planes the five lesser
// products gather in `low`, so that the roundings of the leading one are the only ones of its size; with one plane
// `low` is unused.
template <class T, int M, int N, int G>
DEVICE void multiply(Fragment<M, N> &high, Fragment<M, N> &low, int column, const Rows<T, M> &a,
                     const Columns<T> (&b)[G]) {
#pragma unroll
  for (int order = T::PLANES - 1; order >= 0; --order)
#pragma unroll
    for (int i = 0; i <= order; ++i)
#pragma unroll
      for (int m = 0; m < M / 16; ++m)
#pragma unroll
        for (int n = 0; n < 2 * G; ++n) {
          Fragment<M, N> &sum = order == 0 ? high : low;
          const u32(&piece)[2] = b[n / 2].b[order - i][n % 2];
          T::Plane::mma(sum.x[m][column / 8 + n], a.a[i][m], piece[0], piece[1]);
        }
}

// The sum of the two parts of a product. Where an infinity was multiplied the lesser products are meaningless, NaN or
// infinite: clamped, they leave the leading part, which is infinite or NaN itself, as it is.
DEVICE float joined(float high, float low) { return high + fminf(fmaxf(low, -LARGEST), LARGEST); }

// Columns [column, column + W) of D += those two parts.
template <int M, int N, int W>
DEVICE void add_joined(Fragment<M, N> &d, int column, const Fragment<M, W> &high, const Fragment<M, W> &low) {
#pragma unroll
  for (int m = 0; m < M / 16; ++m)
#pragma unroll
    for (int n = 0; n < W / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) d.x[m][column / 8 + n][i] += joined(high.x[m][n][i], low.x[m][n][i]);
}

// D, the leading part of a product, += the lesser one.
template <class T, int M, int N>
DEVICE void join(Fragment<M, N> &d, const Fragment<M, N> &low) {
  if constexpr (T::PLANES > 1) {
#pragma unroll
    for (int m = 0; m < M / 16; ++m)
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) d.x[m][n][i] = joined(d.x[m][n][i], low.x[m][n][i]);
  }
}

// fp32 sums of so many products are good enough in one chain of tensor cores, which takes fewer registers.
constexpr int SHORT_SUM = 64;

// Where a step of a product is summed: in D, or, since tensor cores truncate as they accumulate, fp32 may be summed
// APART from it. Then D takes it by a rounded addition, whose error goes to the lesser part (Knuth, "The Art of
// Computer Programming", volume 2, 4.2.2, theorem B).
template <class T, bool APART, int M, int N>
struct Step {
  Fragment<M, N> &sum;

  DEVICE Step(Fragment<M, N> &d, Fragment<M, N> &) : sum(d) {}
  DEVICE void end() {}
};
template <int M, int N>
struct Step<Float32, true, M, N> {
  Fragment<M, N> &d, &low, sum;

  DEVICE Step(Fragment<M, N> &d, Fragment<M, N> &low) : d(d), low(low) { sum.zero(); }
  DEVICE void end() {
#pragma unroll
    for (int m = 0; m < M / 16; ++m)
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float before = d.x[m][n][i], step = sum.x[m][n][i];
          const float after = before + step, taken = after - before;
          low.x[m][n][i] += (before - (after - taken)) + (step - taken);
          d.x[m][n][i] = after;
        }
  }
};

// D + low += A B^T, for rows [row, row + N) of the tile B. a(rows, column, lane) provides the A operand of columns
// [column, column + 16) of A. The parts stay apart, to be joined: the columns of several calls have the sum, to the
// last bit, that they have in one.
template <bool APART, class T, int M, int N, int R, int C, class Left>
DEVICE void gather_transposed(Fragment<M, N> &d, Fragment<M, N> &low, Left a, const Operand<T, R, C> &b, int row,
                              u32 lane) {
  constexpr int G = GROUP<T, M, N>;
#pragma unroll
  for (int column = 0; column < C; column += 16) {
    Rows<T, M> left;
    a(left, column, lane);
    Step<T, APART, M, N> step(d, low);
#pragma unroll
    for (int n = 0; n < N; n += 16 * G) {
      Columns<T> right[G];
#pragma unroll
      for (int g = 0; g < G; ++g) right[g].load_transposed(b, row + n + 16 * g, column, lane);
      multiply(step.sum, low, n, left, right);
    }
    step.end();
  }
}

// The same for elements that are split on the way, of which more than two steps at once would find no registers.
template <bool APART, class T, int M, int N, int R, int C, class Left>
DEVICE void gather_transposed(Fragment<M, N> &d, Fragment<M, N> &low, Left a, const RawOperand<T, R, C> &b, int row,
                              u32 lane) {
#pragma unroll C / 16 < 2 ? C / 16 : 2
  for (int column = 0; column < C; column += 16) {
    Rows<T, M> left;
    a(left, column, lane);
    Step<T, APART, M, N> step(d, low);
#pragma unroll
    for (int n = 0; n < N; n += 16) {
      Columns<T> right[1];
      right[0].load_transposed(b, row + n, column, lane);
      multiply(step.sum, low, n, left, right);
    }
    step.end();
  }
}

// D += A B^T, likewise.
template <class T, int M, int N, int R, int C, class Left>
DEVICE void gemm_transposed(Fragment<M, N> &d, Left a, const Operand<T, R, C> &b, int row, u32 lane) {
  Fragment<M, N> low;
  low.zero();
  gather_transposed<(C > SHORT_SUM)>(d, low, a, b, row, lane);
  join<T>(d, low);
}

// The same for elements that are split on the way. Each step is summed apart and added to D by a rounded addition, as
// in gemm.
template <class T, int M, int N, int R, int C, class Left>
DEVICE void gemm_transposed(Fragment<M, N> &d, Left a, const RawOperand<T, R, C> &b, int row, u32 lane) {
#pragma unroll C / 16 < 2 ? C / 16 : 2
  for (int column = 0; column < C; column += 16) {
    Rows<T, M> left;
    a(left, column, lane);
    Fragment<M, N> high, low;
    high.zero();
    low.zero();
#pragma unroll
    for (int n = 0; n < N; n += 16) {
      Columns<T> right[1];
      right[0].load_transposed(b, row + n, column, lane);
      multiply(high, low, n, left, right);
    }
    add_joined(d, 0, high, low);
  }
}

// S = Q K^T, with q as gemm_transposed takes it.
template <class T, int M, int N, int D, class Queries>
DEVICE void gemm_qk(Fragment<M, N> &s, Queries q, const Operand<T, N, D> &k, u32 lane) {
  s.zero();
  gemm_transposed(s, q, k, 0, lane);
}

// D += A B, for rows [row, row + DEPTH) and columns [column, column + N) of the tile B. a(rows, k) provides the A
// operand of columns [k, k + 16) of A, each once and in order. Tensor cores truncate as they accumulate: fp32 sums each
// call apart and adds it to D by a rounded addition.
template <int DEPTH, class T, int M, int N, int R, int C, class Left, template <class, int, int> class Right>
DEVICE void gemm(Fragment<M, N> &d, Left a, const Right<T, R, C> &b, int row, int column, u32 lane) {
  if constexpr (T::PLANES == 1) {
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
      Rows<T, M> left;
      a(left, k);
#pragma unroll
      for (int n = 0; n < N; n += 16) {
        Columns<T> right[1];
        right[0].load(b, row + k, column + n, lane);
        multiply(d, d, n, left, right);
      }
    }
  } else {
    constexpr int G = GROUP<T, M, N>;
    Rows<T, M> left[DEPTH / 16];
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) a(left[k / 16], k);
#pragma unroll
    for (int first = 0; first < N; first += 16 * G) {
      Fragment<M, 16 * G> high, low;
      high.zero();
      low.zero();
#pragma unroll
      for (int k = 0; k < DEPTH; k += 16) {
        Columns<T> right[G];
#pragma unroll
        for (int g = 0; g < G; ++g) right[g].load(b, row + k, column + first + 16 * g, lane);
        multiply(high, low, 0, left[k / 16], right);
      }
      add_joined(d, first, high, low);
    }
  }
}

// O += P V, with p as gemm takes it.
template <class T, int M, int N, int DV, class Weights>
DEVICE void gemm_pv(Fragment<M, DV> &o, Weights p, const Operand<T, N, DV> &v, u32 lane) {
  gemm<N>(o, p, v, 0, 0, lane);
}
