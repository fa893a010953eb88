// Words of two unsigned 16-bit integers (PTX ISA, "add", "min"; sm_90 and newer).
#pragma once
#include "device.cuh"

namespace ptx {

// Sums modulo 2^16.
DEVICE u32 add_u16x2(u32 x, u32 y) {
  u32 z;
  asm("add.u16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

DEVICE u32 min_u16x2(u32 x, u32 y) {
  u32 z;
  asm("min.u16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

}  // namespace ptx
