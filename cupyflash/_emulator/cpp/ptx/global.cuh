// Twin of cuda/ptx/global.cuh.
#pragma once
#include "device.cuh"
#include "runtime.h"

namespace ptx {

#define CUPYFLASH_LOAD_IF(TYPE)                                                        \
  DEVICE TYPE load_if(bool condition, const TYPE *from, emu::Loc = emu::Loc::here()) { \
    using Word [[gnu::may_alias]] = TYPE;                                              \
    return condition ? *reinterpret_cast<const Word *>(from) : TYPE{0};                \
  }

CUPYFLASH_LOAD_IF(u16)
CUPYFLASH_LOAD_IF(u32)
CUPYFLASH_LOAD_IF(u64)

DEVICE u32 load_u16(const void *from, emu::Loc = emu::Loc::here()) {
  return load_if(true, static_cast<const u16 *>(from));
}

}  // namespace ptx
