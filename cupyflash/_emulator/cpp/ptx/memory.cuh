// Twin of cuda/ptx/memory.cuh.
#pragma once
#include "device.cuh"
#include "runtime.h"

namespace ptx {

template <class S>
DEVICE S &shared(emu::Loc loc = emu::Loc::here()) {
  return *static_cast<S *>(emu::shared_memory(sizeof(S), alignof(S), loc));
}

DEVICE u32 smem_address(const void *pointer, emu::Loc loc = emu::Loc::here()) {
  return emu::shared_address(pointer, loc);
}

}  // namespace ptx
