// Matrices in shared memory as wgmma's descriptors name them (PTX ISA, "Matrix Descriptor"): where each 16 bytes lie.
// Internal to the runtime.
#pragma once
#include <cstdint>

namespace emu {

// A matrix is made of lines, of which each has some chunks of 16 bytes. K-major, a line is a row of A or a column of B
// and runs along K; MN-major, a line is one k and runs along the rows or columns.
struct Descriptor {
  static constexpr uint32_t CHUNK = 16, LINES = 8;  // in a swizzle atom, which repeats

  uint32_t start, leading, stride, base_offset;  // bytes
  uint32_t width;                                // of a line of the swizzle atom: 128, 64, 32, or 16 without a swizzle
  uint64_t reserved;                             // bits that have to be 0

  explicit Descriptor(uint64_t bits)
      : start(field(bits, 0, 14) * CHUNK),
        leading(field(bits, 16, 14) * CHUNK),
        stride(field(bits, 32, 14) * CHUNK),
        base_offset(field(bits, 49, 3)),
        width(CHUNK << (4 - field(bits, 62, 2)) % 4),
        reserved(bits & ~VALID) {}

  // A swizzle takes the number of a line in its atom from the address, so a matrix begins in the atom's first line.
  bool begins_in_first_line() const { return width == CHUNK || start % (LINES * width) < width; }

  // The shared address of a chunk.
  uint32_t at(bool mn_major, uint32_t line, uint32_t chunk) const {
    uint32_t address = start + line % LINES * width;
    if (width == CHUNK) {
      address += mn_major ? chunk * stride + line / LINES * leading : line / LINES * stride + chunk * leading;
    } else {
      const uint32_t chunks = width / CHUNK;
      address += line / LINES * stride;
      address += mn_major ? chunk % chunks * CHUNK + chunk / chunks * leading : chunk * CHUNK;
    }
    return swizzled(address);
  }

 private:
  static constexpr uint64_t VALID = 0xc00e3fff3fff3fffu;  // PTX ISA: the fields above

  static uint32_t field(uint64_t bits, int first, int count) { return bits >> first & ((1u << count) - 1); }

  // The line's number in its atom is added, bit by bit, to that of the chunk in the line.
  uint32_t swizzled(uint32_t address) const { return address ^ (address >> 3 & (width - CHUNK)); }
};

}  // namespace emu
