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

// The 8-column chunks of a tile that one of THREADS threads moves: threads side by side on LANES chunks of a row, then
// every STEP-th row.
template <int THREADS, int ROWS, int COLUMNS>
struct Share {
  static constexpr int CHUNKS = COLUMNS / 8;
  static constexpr int LANES = CHUNKS % 3 == 0 ? CHUNKS / 3 : CHUNKS;  // a power of two
  static constexpr int STEP = THREADS / LANES;
  static constexpr int VISITS = ROWS <= STEP ? 1 : ROWS / STEP;  // of each of the thread's columns
  static_assert(THREADS % LANES == 0 && (ROWS % STEP == 0 || STEP % ROWS == 0), "threads divide the tile evenly");

  u32 row, chunk;  // the first
  DEVICE explicit Share(u32 thread) : row(thread / LANES), chunk(thread % LANES) {}
  DEVICE bool idle() const { return STEP > ROWS && row >= ROWS; }
};

// How many packets of 16 bytes land for a tile of fp32 elements.
template <int THREADS, int ROWS, int COLUMNS>
constexpr int PACKETS = 2 * THREADS * (Share<THREADS, ROWS, COLUMNS>::CHUNKS / Share<THREADS, ROWS, COLUMNS>::LANES) *
                        Share<THREADS, ROWS, COLUMNS>::VISITS;

// WIDTH bytes from global to shared memory, or zeros. Two bytes are too few for cp.async, those are copied in step.
template <int WIDTH>
DEVICE void copy(unsigned char *to, const void *from, bool present) {
  if constexpr (WIDTH == 2) {
    *reinterpret_cast<u16 *>(to) = present ? *static_cast<const u16 *>(from) : u16(0);
  } else {
    ptx::cp_async<WIDTH>(ptx::smem_address(to), from, present);
  }
}

// Starts the copy of `rows` rows of `columns` elements; row r starts at source + r * stride. All THREADS of the block
// take part. to(row, chunk, packet, byte) says where a byte of a chunk goes, which is the packet-th 16 bytes that this
// thread moves. WIDTH divides a row's bytes, so that each access is there or is not. Commit and wait come before the
// first use.
template <class T, int THREADS, int WIDTH, int ROWS, int COLUMNS, class Target>
DEVICE void copy_rows(Target to, const typename T::Storage *source, i64 stride, int rows, int columns, u32 thread) {
  using Mine = Share<THREADS, ROWS, COLUMNS>;
  constexpr int SIZE = sizeof(typename T::Storage);
  const Mine share(thread);
  if (share.idle()) return;
  const int left = rows - static_cast<int>(share.row);
#pragma unroll
  for (int c = 0, packet = 0; c < Mine::CHUNKS; c += Mine::LANES) {
    const u32 chunk = c + share.chunk;
    const int valid = columns - static_cast<int>(chunk * 8);
    const typename T::Storage *from = source + share.row * stride + chunk * 8;
#pragma unroll T::PLANES == 1 ? Mine::VISITS : 1
    for (int i = 0; i < Mine::VISITS; ++i) {
#pragma unroll T::PLANES == 1 ? 8 * SIZE / WIDTH : 1
      for (int byte = 0; byte < 8 * SIZE; byte += WIDTH) {
        const bool present = i * Mine::STEP < left && byte / SIZE < valid;
        copy<WIDTH>(to(share.row + i * Mine::STEP, chunk, packet, byte), from + byte / SIZE, present);
      }
      packet += SIZE / 2;
      from += Mine::STEP * stride;  // past the last row of the array nothing is read
    }
  }
}

// 16-bit elements go into the tile of their operand; a barrier comes before the first use too.
template <class T, int THREADS, int WIDTH, int ROWS, int COLUMNS>
DEVICE void load_rows(Operand<T, ROWS, COLUMNS> &operand, const typename T::Storage *source, i64 stride, int rows,
                      int columns, u32 thread) {
  const auto to = [&](u32 row, u32 chunk, int, int byte) {
    return operand.plane[0].bytes() + Tile<ROWS, COLUMNS>::offset(row, chunk) + byte;
  };
  copy_rows<T, THREADS, WIDTH, ROWS, COLUMNS>(to, source, stride, rows, columns, thread);
}

// fp32 elements that stay as they are, likewise.
template <class T, int THREADS, int WIDTH, int ROWS, int COLUMNS>
DEVICE void load_rows(RawOperand<T, ROWS, COLUMNS> &operand, const typename T::Storage *source, i64 stride, int rows,
                      int columns, u32 thread) {
  const auto to = [&](u32 row, u32 chunk, int, int byte) {
    return operand.bytes() + RawOperand<T, ROWS, COLUMNS>::offset(row, chunk) + byte;
  };
  copy_rows<T, THREADS, WIDTH, ROWS, COLUMNS>(to, source, stride, rows, columns, thread);
}

// fp32 elements land, to be split into planes by the thread that copied them. Its packets are THREADS apart whatever
// tile lands, so that it may copy again while others still split.
template <class T, int THREADS, int WIDTH, int ROWS, int COLUMNS>
DEVICE void land_rows(Packet<16> *landing, const typename T::Storage *source, i64 stride, int rows, int columns,
                      u32 thread) {
  const auto to = [&](u32, u32, int packet, int byte) {
    return reinterpret_cast<unsigned char *>(&landing[(packet + byte / 16) * THREADS + thread]) + byte % 16;
  };
  copy_rows<T, THREADS, WIDTH, ROWS, COLUMNS>(to, source, stride, rows, columns, thread);
}

// Splits fp32 elements that have landed into the planes of rows [first, first + ROWS) of an operand. A barrier comes
// before the first use.
template <class T, int THREADS, int ROWS, int OPERAND_ROWS, int COLUMNS>
DEVICE void split_rows(Operand<T, OPERAND_ROWS, COLUMNS> &operand, int first, const Packet<16> *landing, u32 thread) {
  using Mine = Share<THREADS, ROWS, COLUMNS>;
  const Mine share(thread);
  if (share.idle()) return;
#pragma unroll
  for (int c = 0, packet = 0; c < Mine::CHUNKS; c += Mine::LANES)
#pragma unroll 1  // O and S are live: there are no registers for several chunks at once
    for (int i = 0; i < Mine::VISITS; ++i, packet += 2) {
      float x[8];
      bool all_tame = true;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        x[j] = ptx::bits_float(landing[(packet + j / 4) * THREADS + thread].word[j % 4]);
        all_tame = all_tame && tame(x[j]);
      }
      Packet<16> planes[T::PLANES];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32 pair[T::PLANES];
        if (all_tame) {
          split<T>(x[2 * j], x[2 * j + 1], pair);
        } else {
          split_wild<T>(x[2 * j], x[2 * j + 1], pair);
        }
#pragma unroll
        for (int k = 0; k < T::PLANES; ++k) planes[k].word[j] = pair[k];
      }
      const u32 offset = Tile<OPERAND_ROWS, COLUMNS>::offset(first + share.row + i * Mine::STEP, c + share.chunk);
#pragma unroll
      for (int k = 0; k < T::PLANES; ++k)
        *reinterpret_cast<Packet<16> *>(operand.plane[k].bytes() + offset) = planes[k];
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

// THREADS threads write zeros to `rows` rows of `columns` elements, WIDTH bytes at a time; row r starts at target + r *
// stride.
template <class T, int THREADS, int WIDTH>
DEVICE void zero_rows(typename T::Storage *target, i64 stride, int rows, int columns, u32 thread) {
  constexpr int ELEMENTS = WIDTH / sizeof(typename T::Storage);
  for (int row = thread / 32; row < rows; row += THREADS / 32)
    for (int column = thread % 32 * ELEMENTS; column < columns; column += 32 * ELEMENTS)
      *reinterpret_cast<Packet<WIDTH> *>(target + row * stride + column) = {};
}
