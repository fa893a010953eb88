// Groups of warps: barriers with names, one lane of a warp, the registers of a warpgroup (PTX ISA, "bar", "elect",
// "setmaxnreg").
#pragma once
#include "device.cuh"

namespace ptx {

// Waits until `threads` threads, a multiple of 32, have come to barrier `id` of the block's sixteen; 0 is
// ptx::barrier's.
DEVICE void named_barrier_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Comes to barrier `id` and goes on.
DEVICE void named_barrier_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// True in one lane of a full warp.
DEVICE bool elect() {
  u32 elected;
  asm volatile(
      "{.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(elected));
  return elected != 0;
}

// This warpgroup goes on with REGISTERS registers a thread, a multiple of 8 from 24 to 256: fewer than before, which
// frees the others, or more, for which it waits.
template <int REGISTERS>
DEVICE void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace ptx
