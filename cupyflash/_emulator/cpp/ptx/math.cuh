// Twin of cuda/ptx/math.cuh. The host's exp2f, log2f and quotients are more exact than the approximations.
#pragma once
#include "device.cuh"
#include "runtime.h"

namespace ptx {

DEVICE float mul(float x, float y, emu::Loc = emu::Loc::here()) {
  return emu::flushed(emu::flushed(x) * emu::flushed(y));
}

DEVICE float fma(float x, float y, float z, emu::Loc = emu::Loc::here()) {
  return emu::flushed(__builtin_fmaf(emu::flushed(x), emu::flushed(y), emu::flushed(z)));
}

DEVICE float ex2(float x, emu::Loc = emu::Loc::here()) { return emu::flushed(exp2f(emu::flushed(x))); }
DEVICE float lg2(float x, emu::Loc = emu::Loc::here()) { return log2f(emu::flushed(x)); }

DEVICE float rcp(float x, emu::Loc = emu::Loc::here()) { return emu::flushed(1.0f / emu::flushed(x)); }

// -0 is less than +0.
DEVICE float min_nan(float x, float y, emu::Loc = emu::Loc::here()) {
  x = emu::flushed(x), y = emu::flushed(y);
  if (__builtin_isnan(x) || __builtin_isnan(y)) return __builtin_nanf("");
  return x < y || (x == y && __builtin_signbit(x)) ? x : y;
}

DEVICE float max_nan(float x, float y, emu::Loc = emu::Loc::here()) {
  x = emu::flushed(x), y = emu::flushed(y);
  if (__builtin_isnan(x) || __builtin_isnan(y)) return __builtin_nanf("");
  return x > y || (x == y && !__builtin_signbit(x)) ? x : y;
}

}  // namespace ptx
