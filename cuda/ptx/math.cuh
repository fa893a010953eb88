// Arithmetic whose rounding matters, which a compiler must neither fuse nor split, the approximations of the
// special-function unit (PTX ISA, "ex2", "lg2", "rcp"), and bounds that NaN passes (PTX ISA, "min", "max").
#pragma once
#include "device.cuh"

namespace ptx {

// x * y, rounded to nearest.
DEVICE float mul(float x, float y) {
  float z;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// x * y + z, rounded once.
DEVICE float fma(float x, float y, float z) {
  float w;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(w) : "f"(x), "f"(y), "f"(z));
  return w;
}

// 2^x to two units in its last place; ex2(-inf) is 0, ex2(NaN) is NaN.
DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x): off by 2^-22 where x is between 1/2 and 2, by 2^-22 of it elsewhere, also at powers of two. lg2(0) is -inf.
DEVICE float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to a unit in its last place; rcp of zeros and subnormals is infinite, rcp(INFINITE) is 0.
DEVICE float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The lesser and the greater of two numbers; NaN where one is NaN. sm_80 and newer.
DEVICE float min_nan(float x, float y) {
  float z;
  asm("min.ftz.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

DEVICE float max_nan(float x, float y) {
  float z;
  asm("max.ftz.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

}  // namespace ptx
