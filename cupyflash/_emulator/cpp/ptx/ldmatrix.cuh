// Twin of cuda/ptx/ldmatrix.cuh.
#pragma once
#include "device.cuh"
#include "runtime.h"

namespace ptx {

DEVICE void ldmatrix_x4(u32 (&d)[4], u32 row, emu::Loc loc = emu::Loc::here()) {
  emu::MatrixLoad load{d, row};
  emu::together(emu::LDMATRIX_X4, &load, loc);
}

DEVICE void ldmatrix_x4_trans(u32 (&d)[4], u32 row, emu::Loc loc = emu::Loc::here()) {
  emu::MatrixLoad load{d, row};
  emu::together(emu::LDMATRIX_X4_TRANS, &load, loc);
}

}  // namespace ptx
