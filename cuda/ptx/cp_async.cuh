// Asynchronous copies from global to shared memory (PTX ISA, "cp.async").
#pragma once
#include "device.cuh"

namespace ptx {

// Copies BYTES bytes, or fills them with zeros and reads nothing when they are not `present`. Sixteen bytes bypass L1:
// a tile is read once.
template <int BYTES>
DEVICE void cp_async(u32 shared, const void *global, bool present) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  if constexpr (BYTES == 16) {
    asm volatile(
        "{.reg .pred absent; setp.eq.u32 absent, %2, 0; cp.async.cg.shared.global.L2::128B [%0], [%1], 16, absent;}" ::
            "r"(shared),
        "l"(global), "r"(static_cast<u32>(present))
        : "memory");
  } else {
    asm volatile(
        "{.reg .pred absent; setp.eq.u32 absent, %3, 0; cp.async.ca.shared.global [%0], [%1], %2, absent;}" ::"r"(
            shared),
        "l"(global), "n"(BYTES), "r"(static_cast<u32>(present))
        : "memory");
  }
}

// Closes the group of this thread's copies issued since the last commit.
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all of this thread's copies, committed or not.
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Waits until at most PENDING of this thread's groups are in flight.
template <int PENDING>
DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

}  // namespace ptx
