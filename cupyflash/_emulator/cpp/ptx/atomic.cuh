// Twin of cuda/ptx/atomic.cuh.
#pragma once
#include "device.cuh"
#include "runtime.h"

namespace ptx {

DEVICE u32 atomic_add(u32 *global, u32 x, emu::Loc loc = emu::Loc::here()) { return emu::atomic_add(global, x, loc); }

DEVICE u32 atomic_inc(u32 *global, u32 last, emu::Loc loc = emu::Loc::here()) {
  return emu::atomic_inc(global, last, loc);
}

DEVICE void reduce_add(float *global, float x, emu::Loc loc = emu::Loc::here()) { emu::reduce_add(global, &x, 1, loc); }

DEVICE void reduce_add(float *global, const float (&x)[4], emu::Loc loc = emu::Loc::here()) {
  emu::reduce_add(global, x, 4, loc);
}

DEVICE void release_add(u32 *global, u32 x, emu::Loc loc = emu::Loc::here()) { emu::release_add(global, x, loc); }

DEVICE void acquire_when(const u32 *global, u32 x, emu::Loc loc = emu::Loc::here()) {
  emu::acquire_when(global, x, loc);
}

}  // namespace ptx
