// Twin of cuda/ptx/mma.cuh.
#pragma once
#include "device.cuh"
#include "runtime.h"

namespace ptx {

DEVICE void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, emu::Loc loc = emu::Loc::here()) {
  emu::Product product{d, a, {b0, b1}};
  emu::together(emu::MMA_BF16, &product, loc);
}

DEVICE void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, emu::Loc loc = emu::Loc::here()) {
  emu::Product product{d, a, {b0, b1}};
  emu::together(emu::MMA_F16, &product, loc);
}

}  // namespace ptx
