// Numbers in global memory that blocks share (PTX ISA, "atom", "red", "ld.acquire"; memory order as in its "Memory
// Consistency Model").
#pragma once
#include "device.cuh"

namespace ptx {

// Adds, and returns what was there.
DEVICE u32 atomic_add(u32 *global, u32 x) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(global), "r"(x) : "memory");
  return before;
}

// Adds 1, or returns to 0 from `last` on; returns what was there.
DEVICE u32 atomic_inc(u32 *global, u32 last) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(global), "r"(last) : "memory");
  return before;
}

DEVICE void reduce_add(float *global, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global), "f"(x) : "memory");
}

// Four consecutive numbers, 16-byte aligned; each is added by itself.
DEVICE void reduce_add(float *global, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}

// Adds, after all that this thread has written or has seen written.
DEVICE void release_add(u32 *global, u32 x) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}

// Waits until the number is `x`; what was written before it got there can then be read.
DEVICE void acquire_when(const u32 *global, u32 x) {
  asm volatile(
      "{.reg .pred p; .reg .u32 now;\n"
      "again: ld.acquire.gpu.global.u32 now, [%0];\n"
      "setp.ne.u32 p, now, %1;\n"
      "@p bra again;}" ::"l"(global),
      "r"(x)
      : "memory");
}

}  // namespace ptx
