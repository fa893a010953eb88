// Twin of cuda/ptx/wgmma.cuh.
#pragma once
#include "device.cuh"
#include "wgmma.h"

namespace ptx {

DEVICE void wgmma_fence(emu::Loc loc = emu::Loc::here()) { emu::wgmma_fence_registers(loc); }
DEVICE void wgmma_commit(emu::Loc loc = emu::Loc::here()) { emu::wgmma_commit_group(loc); }

template <int PENDING>
DEVICE void wgmma_wait(emu::Loc loc = emu::Loc::here()) {
  static_assert(PENDING >= 0 && PENDING <= 7, "a number of groups");
  emu::wgmma_wait_group(PENDING, loc);
}

DEVICE void undefined(float &x, emu::Loc = emu::Loc::here()) { __builtin_memcpy(&x, &emu::UNDEFINED_BITS, sizeof x); }

DEVICE void pin(float &x, emu::Loc = emu::Loc::here()) {}

}  // namespace ptx

#include "ptx/wgmma_shapes.cuh"
