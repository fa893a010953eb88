// Asynchronous copies from global to shared memory (PTX ISA, "cp.async").
#pragma once
#include "device.cuh"

namespace ptx {

// Copies `valid` bytes (0 <= valid <= BYTES) and fills the rest of the BYTES at `shared` with zeros. Nothing is read
// from `global` when valid is 0. Sixteen bytes bypass L1: a tile is read once.
template <int BYTES>
DEVICE void cp_async(u32 shared, const void *global, int valid) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(BYTES), "r"(valid)
                 : "memory");
  }
}

// Closes the group of this thread's copies issued since the last commit.
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's groups are in flight.
template <int PENDING>
DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

}  // namespace ptx
