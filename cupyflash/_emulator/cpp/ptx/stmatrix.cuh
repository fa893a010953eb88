// Twin of cuda/ptx/stmatrix.cuh.
#pragma once
#include "device.cuh"
#include "runtime.h"

namespace ptx {

DEVICE void stmatrix_x4(u32 row, const u32 (&d)[4], emu::Loc loc = emu::Loc::here()) {
  emu::MatrixStore store{row, d};
  emu::together(emu::STMATRIX_X4, &store, loc);
}

DEVICE void stmatrix_x4_trans(u32 row, const u32 (&d)[4], emu::Loc loc = emu::Loc::here()) {
  emu::MatrixStore store{row, d};
  emu::together(emu::STMATRIX_X4_TRANS, &store, loc);
}

}  // namespace ptx
