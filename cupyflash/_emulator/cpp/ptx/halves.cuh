// Twin of cuda/ptx/halves.cuh.
#pragma once
#include "device.cuh"
#include "runtime.h"

namespace ptx {

DEVICE u32 add_u16x2(u32 x, u32 y, emu::Loc = emu::Loc::here()) {
  return ((x + y) & 0xffffu) | ((x >> 16) + (y >> 16)) << 16;
}

DEVICE u32 min_u16x2(u32 x, u32 y, emu::Loc = emu::Loc::here()) {
  const u32 low = (x & 0xffffu) < (y & 0xffffu) ? x : y, high = x >> 16 < y >> 16 ? x : y;
  return (low & 0xffffu) | (high & 0xffff0000u);
}

}  // namespace ptx
