// Twin of cuda/ptx/cp_async.cuh.
#pragma once
#include "device.cuh"
#include "runtime.h"

namespace ptx {

template <int BYTES>
DEVICE void cp_async(u32 shared, const void *global, bool present, emu::Loc loc = emu::Loc::here()) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  emu::copy_async(shared, global, BYTES, present, loc);
}

DEVICE void cp_async_commit(emu::Loc = emu::Loc::here()) { emu::copy_commit(); }
DEVICE void cp_async_wait_all(emu::Loc loc = emu::Loc::here()) { emu::copy_wait(emu::ALL, loc); }

template <int PENDING>
DEVICE void cp_async_wait(emu::Loc loc = emu::Loc::here()) {
  static_assert(PENDING >= 0, "a number of groups");
  emu::copy_wait(PENDING, loc);
}

}  // namespace ptx
