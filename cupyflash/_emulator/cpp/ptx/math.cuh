// Twin of cuda/ptx/math.cuh. The host's exp2f and log2f are more exact than the approximations.
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

}  // namespace ptx
