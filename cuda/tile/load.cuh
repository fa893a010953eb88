// Global memory to shared-memory operands, and rows back to global memory. Whatever lies outside the array, rows past
// the sequence or columns past the head dim, is zero in the tile: padding adds nothing to a product.
#pragma once
#include "ptx/cp_async.cuh"
#include "tile/smem.cuh"

// BYTES moved as one access.
template <int BYTES>
struct alignas(BYTES) Packet {
  u32 word[BYTES / 4];
};
template <>
struct alignas(2) Packet<2> {
  u16 half;
};

// Eight elements, of which the first `valid` exist, into one 16-byte chunk of each plane. WIDTH divides a row's bytes,
// so that each access of WIDTH bytes is there or is not. 16-bit elements are copied asynchronously; two bytes are too
// few for cp.async, those are copied in step.
template <int WIDTH, class T, int ROWS, int COLUMNS>
  requires(T::PLANES == 1)
DEVICE void load_chunk(Operand<T, ROWS, COLUMNS> &operand, u32 row, u32 chunk, const u16 *from, int valid) {
  unsigned char *to = operand.plane[0].bytes() + Tile<ROWS, COLUMNS>::offset(row, chunk);
#pragma unroll
  for (int i = 0; i < 8; i += WIDTH / 2) {
    if constexpr (WIDTH == 2) {
      *reinterpret_cast<u16 *>(to + 2 * i) = i < valid ? from[i] : u16(0);
    } else {
      ptx::cp_async<WIDTH>(ptx::smem_address(to + 2 * i), from + i, i < valid);
    }
  }
}

// fp32 elements are read WIDTH bytes at a time and split into their planes.
template <int WIDTH, class T, int ROWS, int COLUMNS>
  requires(T::PLANES > 1)
DEVICE void load_chunk(Operand<T, ROWS, COLUMNS> &operand, u32 row, u32 chunk, const float *from, int valid) {
  constexpr int ELEMENTS = WIDTH / 4;
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; i += ELEMENTS) {
    Packet<WIDTH> packet = {};
    if (i < valid) packet = *reinterpret_cast<const Packet<WIDTH> *>(from + i);
#pragma unroll
    for (int j = 0; j < ELEMENTS; ++j) x[i + j] = ptx::bits_float(packet.word[j]);
  }
  Packet<16> packet[T::PLANES];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    u32 planes[T::PLANES];
    split<T>(x[2 * j], x[2 * j + 1], planes);
#pragma unroll
    for (int k = 0; k < T::PLANES; ++k) packet[k].word[j] = planes[k];
  }
#pragma unroll
  for (int k = 0; k < T::PLANES; ++k)
    *reinterpret_cast<Packet<16> *>(operand.plane[k].bytes() + Tile<ROWS, COLUMNS>::offset(row, chunk)) = packet[k];
}

// Fills an operand with `rows` rows of `columns` elements; row r starts at source + r * stride. All THREADS of the
// block take part. 16-bit elements arrive asynchronously: commit, wait and a barrier come before the first use.
template <class T, int THREADS, int WIDTH, int ROWS, int COLUMNS>
DEVICE void load_rows(Operand<T, ROWS, COLUMNS> &operand, const typename T::Storage *source, i64 stride, int rows,
                      int columns, u32 thread) {
  constexpr int CHUNKS = COLUMNS / 8;
  constexpr int LANES = CHUNKS % 3 == 0 ? CHUNKS / 3 : CHUNKS;  // threads side by side on a row, a power of two
  constexpr int STEP = THREADS / LANES;                         // rows between a thread's visits
  static_assert(THREADS % LANES == 0 && (ROWS % STEP == 0 || STEP % ROWS == 0), "threads divide the tile evenly");
  const u32 first = thread / LANES;
  if (STEP > ROWS && first >= ROWS) return;
  const int left = rows - static_cast<int>(first);
#pragma unroll
  for (int c = 0; c < CHUNKS; c += LANES) {
    const u32 chunk = c + thread % LANES;
    const int valid = max(0, min(columns - static_cast<int>(chunk * 8), 8));
    const typename T::Storage *from = source + first * stride + chunk * 8;
#pragma unroll
    for (int r = 0; r < ROWS; r += STEP) {
      load_chunk<WIDTH>(operand, r + first, chunk, from, r < left ? valid : 0);
      from += STEP * stride;  // past the last row of the array nothing is read
    }
  }
}

// A tile of results on its way out. Sixteen bytes of padding a row put the fragments' stores into different banks.
template <class T, int ROWS, int COLUMNS>
struct Staging {
  static constexpr int PITCH = COLUMNS + 16 / sizeof(typename T::Storage);
  alignas(16) typename T::Storage data[ROWS * PITCH];

  DEVICE void put(int row, int column, float low, float high) {
    typename T::Storage *to = data + row * PITCH + column;
    if constexpr (sizeof(typename T::Storage) == 2) {
      *reinterpret_cast<u32 *>(to) = T::pair(low, high);
    } else {
      *reinterpret_cast<Packet<8> *>(to) = {ptx::float_bits(low), ptx::float_bits(high)};
    }
  }
};

// One warp writes rows [first, first + count) of a staged tile, `columns` elements each, WIDTH bytes at a time; row r
// goes to target + r * stride.
template <class T, int WIDTH, int ROWS, int COLUMNS>
DEVICE void store_rows(typename T::Storage *target, i64 stride, const Staging<T, ROWS, COLUMNS> &staging, int first,
                       int count, int columns, u32 lane) {
  constexpr int ELEMENTS = WIDTH / sizeof(typename T::Storage), PACKETS = COLUMNS / ELEMENTS;
  for (int i = lane; i < count * PACKETS; i += 32) {
    const int row = first + i / PACKETS, column = i % PACKETS * ELEMENTS;
    const typename T::Storage *from = staging.data + row * Staging<T, ROWS, COLUMNS>::PITCH + column;
    typename T::Storage *to = target + row * stride + column;
    if (column < columns) *reinterpret_cast<Packet<WIDTH> *>(to) = *reinterpret_cast<const Packet<WIDTH> *>(from);
  }
}
