// Twin of cuda/ptx/fp8.cuh.
#pragma once
#include "device.cuh"
#include "formats.h"
#include "runtime.h"

namespace ptx {

DEVICE u16 e4m3x2(float low, float high, emu::Loc = emu::Loc::here()) {
  return static_cast<u16>(emu::e4m3_of(low) | emu::e4m3_of(high) << 8);
}

DEVICE u16 e5m2x2(float low, float high, emu::Loc = emu::Loc::here()) {
  return static_cast<u16>(emu::e5m2_of(low) | emu::e5m2_of(high) << 8);
}

DEVICE u32 f16x2_of_e4m3x2(u16 pair, emu::Loc = emu::Loc::here()) {
  return emu::f16_of(emu::from_e4m3(pair & 0xff)) | static_cast<u32>(emu::f16_of(emu::from_e4m3(pair >> 8))) << 16;
}

DEVICE u32 f16x2_of_e5m2x2(u16 pair, emu::Loc = emu::Loc::here()) {
  return emu::f16_of(emu::from_e5m2(pair & 0xff)) | static_cast<u32>(emu::f16_of(emu::from_e5m2(pair >> 8))) << 16;
}

DEVICE u32 word_of(u16 low, u16 high, emu::Loc = emu::Loc::here()) { return low | static_cast<u32>(high) << 16; }

DEVICE u32 permute_bytes(u32 low, u32 high, u32 selector, emu::Loc = emu::Loc::here()) {
  const u64 bytes = low | static_cast<u64>(high) << 32;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 nibble = selector >> 4 * i & 15, byte = static_cast<u32>(bytes >> 8 * (nibble & 7)) & 0xff;
    result |= (nibble < 8 ? byte : byte & 0x80 ? 0xffu : 0u) << 8 * i;  // from 8 on: the sign of byte - 8
  }
  return result;
}

DEVICE void mma_m16n8k32_e4m3(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, emu::Loc loc = emu::Loc::here()) {
  emu::Product product{d, a, {b0, b1}};
  emu::together(emu::MMA_E4M3, &product, loc);
}

DEVICE void mma_m16n8k32_e5m2(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, emu::Loc loc = emu::Loc::here()) {
  emu::Product product{d, a, {b0, b1}};
  emu::together(emu::MMA_E5M2, &product, loc);
}

}  // namespace ptx
