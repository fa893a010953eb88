// Tiles in shared memory as the tensor memory accelerator writes and wgmma reads them: panels of 128 bytes a row, each
// with the 128-byte swizzle (PTX ISA, "Swizzling modes"): chunk c of 16 bytes of row r lies at chunk c ^ r % 8.
#pragma once
#include "ptx/tma.cuh"

struct alignas(16) Chunk {
  u32 word[4];
};

template <class Element, int ROWS_, int COLUMNS>
struct Panels {
  static constexpr int ROWS = ROWS_;
  static constexpr int WIDTH = 128 / sizeof(Element);  // columns of a panel
  static constexpr int COUNT = (COLUMNS + WIDTH - 1) / WIDTH;
  static constexpr u32 PANEL = ROWS * 128, BYTES = COUNT * PANEL;
  static_assert(ROWS % 8 == 0, "the swizzle repeats every eight rows");

  alignas(1024) unsigned char data[BYTES];

  // Starts the copy of rows [row, row + ROWS) of one head; BYTES bytes count towards the barrier.
  DEVICE static void load(u32 tile, const ptx::TensorMap &map, u32 barrier, int row, int head, int batch) {
#pragma unroll
    for (int panel = 0; panel < COUNT; ++panel)
      ptx::tma_load_4d(tile + panel * PANEL, map, barrier, panel * WIDTH, row, head, batch);
  }

  // Byte offset of a chunk of 16 bytes.
  DEVICE static u32 offset(u32 row, u32 chunk) { return chunk / 8 * PANEL + row * 128 + ((chunk ^ row) % 8) * 16; }
};

// Makes rows [begin, end) zeros, by one warp: whatever their chunks' places, they are whole rows of the panels.
template <class Tile>
DEVICE void clear_rows(Tile &tile, int begin, int end, u32 lane) {
  for (int panel = 0; panel < Tile::COUNT; ++panel) {
    auto *words = reinterpret_cast<u64 *>(tile.data + panel * Tile::PANEL);
    for (int i = begin * 16 + static_cast<int>(lane); i < end * 16; i += 32) words[i] = 0;
  }
}

// Descriptors of operands of wgmma (PTX ISA, "Matrix Descriptor"), in units of 16 bytes. The high word of panels says:
// groups of eight rows follow each other at 1024 bytes, 128-byte swizzle. The low word is the address and the stride of
// panels, so that a step along the operand adds to it.
constexpr u32 IN_PANELS = 1024 / 16 | 1u << 30;
DEVICE u64 descriptor(u32 low, u32 high = IN_PANELS) { return static_cast<u64>(high) << 32 | low; }

// An operand whose K runs along its rows (Q and K), at an address.
template <class Tile>
struct AlongRows {
  static constexpr u32 BYTES = 32;  // of K in one product
  DEVICE static u32 low(u32 tile) { return tile / 16; }
  // After `step` products.
  DEVICE static constexpr u32 advance(int step) { return (step * BYTES / 128 * Tile::PANEL + step * BYTES % 128) / 16; }
};

// An operand of 16-bit elements whose K runs down its columns (V).
template <class Tile>
struct DownColumns {
  static constexpr u32 HIGH = IN_PANELS;
  DEVICE static u32 low(u32 tile) { return tile / 16 | Tile::PANEL / 16 << 16; }
  DEVICE static constexpr u32 advance(int step) { return step * 16 * 128 / 16; }
};
