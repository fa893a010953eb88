// Tensor maps, in the emulator's own encoding. Internal to the runtime.
#pragma once
#include <cstdint>

namespace emu {

struct alignas(64) TensorMap {
  static constexpr int MAX_RANK = 5;
  static constexpr uint64_t MARK = 0x70616d20726f736eu;

  uint64_t mark;
  unsigned char *address;
  uint64_t size[MAX_RANK];        // in elements, innermost first
  uint64_t stride[MAX_RANK - 1];  // in bytes, of all dimensions but the innermost
  uint16_t box[MAX_RANK];
  uint8_t dtype, rank, swizzle;
  bool fill_nan;  // where the tensor is not, else zero
};
static_assert(sizeof(TensorMap) == 128, "CUtensorMap's");

}  // namespace emu
