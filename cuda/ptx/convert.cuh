// Conversions between fp32 and 16-bit floats (PTX ISA, "cvt"); the low half of a pair is its first element.
#pragma once
#include "device.cuh"

namespace ptx {

DEVICE u32 bf16x2(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

DEVICE u32 f16x2(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

DEVICE float float_of_f16(u16 x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
  return wide;
}

DEVICE u32 float_bits(float x) { return __float_as_uint(x); }
DEVICE float bits_float(u32 x) { return __uint_as_float(x); }
DEVICE int integer(float x) { return __float_as_int(x); }

}  // namespace ptx
