// Twin of cuda/ptx/mbarrier.cuh.
#pragma once
#include "device.cuh"
#include "runtime.h"

namespace ptx {

DEVICE void mbarrier_init(u32 barrier, u32 arrivals, emu::Loc loc = emu::Loc::here()) {
  emu::mbarrier_init(barrier, arrivals, loc);
}

DEVICE void fence_mbarrier_init(emu::Loc = emu::Loc::here()) { emu::mbarrier_fence_init(); }

DEVICE void mbarrier_arrive(u32 barrier, emu::Loc loc = emu::Loc::here()) { emu::mbarrier_arrive(barrier, loc); }

DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes, emu::Loc loc = emu::Loc::here()) {
  emu::mbarrier_arrive_expect_tx(barrier, bytes, loc);
}

DEVICE void mbarrier_wait(u32 barrier, u32 parity, emu::Loc loc = emu::Loc::here()) {
  emu::mbarrier_wait(barrier, parity, loc);
}

}  // namespace ptx
