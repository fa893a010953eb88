// Twin of cuda/ptx/group.cuh.
#pragma once
#include "device.cuh"
#include "runtime.h"

namespace ptx {

DEVICE void named_barrier_sync(u32 id, u32 threads, emu::Loc loc = emu::Loc::here()) {
  emu::named_barrier_sync(id, threads, loc);
}

DEVICE void named_barrier_arrive(u32 id, u32 threads, emu::Loc loc = emu::Loc::here()) {
  emu::named_barrier_arrive(id, threads, loc);
}

DEVICE bool elect(emu::Loc loc = emu::Loc::here()) {
  bool elected;
  emu::together(emu::ELECT, &elected, loc);
  return elected;
}

template <int REGISTERS>
DEVICE void registers_decrease(emu::Loc loc = emu::Loc::here()) {
  static_assert(REGISTERS >= 24 && REGISTERS <= 256 && REGISTERS % 8 == 0, "a multiple of 8 from 24 to 256");
  emu::set_registers(REGISTERS, false, loc);
}

template <int REGISTERS>
DEVICE void registers_increase(emu::Loc loc = emu::Loc::here()) {
  static_assert(REGISTERS >= 24 && REGISTERS <= 256 && REGISTERS % 8 == 0, "a multiple of 8 from 24 to 256");
  emu::set_registers(REGISTERS, true, loc);
}

}  // namespace ptx
