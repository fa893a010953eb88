// Tiles of 16-bit elements in shared memory, swizzled so that ldmatrix and 16-byte stores meet no bank conflict, and
// the operand of a product: one tile for each plane of its element type.
#pragma once
#include "device.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/memory.cuh"
#include "tile/types.cuh"

// A row is a sequence of 16-byte chunks. The eight rows that one ldmatrix reads at one logical chunk must lie in eight
// different 16-byte columns of the 128-byte lines of shared memory, so the low bits of the chunk number are XORed with
// bits of the row number: as many bits as the row's length in chunks has factors of two, three at most.
template <int ROWS_, int COLUMNS_>
struct Tile {
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_;
  static constexpr int CHUNKS = COLUMNS / 8;
  static constexpr int SPAN = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;
  static_assert(COLUMNS % 16 == 0 && ROWS % 16 == 0, "a tile is made of 16 x 16 matrices");

  u16 data[ROWS * COLUMNS];

  DEVICE unsigned char *bytes() { return reinterpret_cast<unsigned char *>(data); }

  // Byte offset of a chunk.
  DEVICE static constexpr u32 offset(u32 row, u32 chunk) {
    return row * COLUMNS * 2 + (chunk ^ row / (8 / SPAN) % SPAN) * 16;
  }

  // Two neighbouring elements, of which the first has an even column.
  DEVICE u32 &pair(u32 row, u32 column) {
    return *reinterpret_cast<u32 *>(bytes() + offset(row, column / 8) + column % 8 * 2);
  }

  // The 16 x 16 matrix at (row, column) as an A operand: its 8 x 8 quarters top left, bottom left, top right, bottom
  // right.
  DEVICE void load_rows(u32 (&d)[4], int row, int column, u32 lane) const {
    ptx::ldmatrix_x4(d, address(lane % 16, lane / 16, row, column));
  }

  // The transpose of the matrix as an A operand: quarters top left, top right, bottom left, bottom right, each
  // transposed.
  DEVICE void load_rows_trans(u32 (&d)[4], int row, int column, u32 lane) const {
    ptx::ldmatrix_x4_trans(d, address(lane % 8 + lane / 16 * 8, lane / 8 % 2, row, column));
  }

  // The matrix whose rows are the columns of two B operands: quarters top left, top right, bottom left, bottom right.
  DEVICE void load_columns(u32 (&d)[4], int row, int column, u32 lane) const {
    ptx::ldmatrix_x4(d, address(lane % 8 + lane / 16 * 8, lane / 8 % 2, row, column));
  }

  // The matrix whose columns are those of two B operands: quarters top left, bottom left, top right, bottom right, each
  // transposed.
  DEVICE void load_columns_trans(u32 (&d)[4], int row, int column, u32 lane) const {
    ptx::ldmatrix_x4_trans(d, address(lane % 16, lane / 16, row, column));
  }

 private:
  // The address of a lane's 16 bytes, (lane_row, lane_chunk) in the matrix at (row, column). Row and column are
  // multiples of 16, so the lane alone decides the twist, and the matrices of a tile differ by constants.
  DEVICE u32 address(u32 lane_row, u32 lane_chunk, int row, int column) const {
    const int chunk = column / 8;
    const u32 lane_offset = offset(lane_row, lane_chunk);
    const u32 turned = lane_offset ^ chunk % SPAN * 16;  // the chunk's low bits are bits 4.. of the offset
    return ptx::smem_address(data) + turned + row * COLUMNS * 2 + chunk / SPAN * SPAN * 16;
  }
};

template <class T, int ROWS, int COLUMNS>
struct Operand {
  Tile<ROWS, COLUMNS> plane[T::PLANES];
};

// The operand of a product whose fp32 elements lie as they are, and are split into planes where a fragment is made of
// them. Four columns of padding put the rows that a fragment's columns are read from into different banks.
template <class T, int ROWS, int COLUMNS>
struct RawOperand {
  static constexpr int PITCH = COLUMNS + 4;
  alignas(16) float data[ROWS * PITCH];

  DEVICE unsigned char *bytes() { return reinterpret_cast<unsigned char *>(data); }
  DEVICE static constexpr u32 offset(u32 row, u32 chunk) { return (row * PITCH + chunk * 8) * 4; }
  DEVICE float &at(u32 row, u32 column) { return data[row * PITCH + column]; }
  DEVICE const float &at(u32 row, u32 column) const { return data[row * PITCH + column]; }
};
