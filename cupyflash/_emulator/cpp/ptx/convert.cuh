// Twin of cuda/ptx/convert.cuh.
#pragma once
#include "device.cuh"
#include "formats.h"
#include "runtime.h"

namespace ptx {

DEVICE u32 bf16x2(float low, float high, emu::Loc = emu::Loc::here()) {
  return emu::bf16_of(low) | static_cast<u32>(emu::bf16_of(high)) << 16;
}

DEVICE u32 f16x2(float low, float high, emu::Loc = emu::Loc::here()) {
  return emu::f16_of(low) | static_cast<u32>(emu::f16_of(high)) << 16;
}

DEVICE float float_of_f16(u16 x, emu::Loc = emu::Loc::here()) { return emu::from_f16(x); }

DEVICE u32 float_bits(float x, emu::Loc = emu::Loc::here()) { return emu::bits_of(x); }
DEVICE float bits_float(u32 x, emu::Loc = emu::Loc::here()) { return emu::float_of(x); }
DEVICE int integer(float x, emu::Loc = emu::Loc::here()) { return static_cast<int>(emu::bits_of(x)); }

}  // namespace ptx
