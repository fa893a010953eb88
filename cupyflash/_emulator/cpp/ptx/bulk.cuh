// Twin of cuda/ptx/bulk.cuh.
#pragma once
#include "device.cuh"
#include "runtime.h"

namespace ptx {

DEVICE void bulk_load(u32 shared, const void *global, u32 bytes, u32 barrier, emu::Loc loc = emu::Loc::here()) {
  emu::bulk_load(shared, global, bytes, barrier, loc);
}

DEVICE void bulk_store(void *global, u32 shared, u32 bytes, emu::Loc loc = emu::Loc::here()) {
  emu::bulk_store(global, shared, bytes, loc);
}

DEVICE void bulk_reduce_add_f32(float *global, u32 shared, u32 bytes, emu::Loc loc = emu::Loc::here()) {
  emu::bulk_reduce_add(global, shared, bytes, loc);
}

DEVICE void bulk_commit(emu::Loc = emu::Loc::here()) { emu::bulk_commit(); }

template <int PENDING>
DEVICE void bulk_wait_read(emu::Loc loc = emu::Loc::here()) {
  static_assert(PENDING >= 0, "a number of groups");
  emu::bulk_wait(PENDING, false, loc);
}

template <int PENDING>
DEVICE void bulk_wait(emu::Loc loc = emu::Loc::here()) {
  static_assert(PENDING >= 0, "a number of groups");
  emu::bulk_wait(PENDING, true, loc);
}

DEVICE void fence_proxy_async(emu::Loc = emu::Loc::here()) { emu::fence_proxy(); }

DEVICE void fence_proxy_async_global(emu::Loc = emu::Loc::here()) { emu::fence_proxy_global(); }

}  // namespace ptx
