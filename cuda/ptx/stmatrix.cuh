// Matrix fragments from registers to shared memory (PTX ISA, "stmatrix"): the way back of ldmatrix. Lane i names the
// row i % 8 of matrix i / 8; every row is 16 bytes, 16-byte aligned.
#pragma once
#include "device.cuh"

namespace ptx {

// Four 8 x 8 matrices of 16-bit elements. Thread t gives columns 2 (t % 4) and 2 (t % 4) + 1 of row t / 4.
DEVICE void stmatrix_x4(u32 row, const u32 (&d)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(d[0]), "r"(d[1]),
               "r"(d[2]), "r"(d[3])
               : "memory");
}

// The same matrices, each transposed on the way.
DEVICE void stmatrix_x4_trans(u32 row, const u32 (&d)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(d[0]),
               "r"(d[1]), "r"(d[2]), "r"(d[3])
               : "memory");
}

}  // namespace ptx
