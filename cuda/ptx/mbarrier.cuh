// Barriers in shared memory that count arrivals and bytes (PTX ISA, "mbarrier"). A phase ends when all of its arrivals
// have come and all bytes announced to it have landed; the next begins by itself. A barrier is eight bytes, 8-byte
// aligned, and is named by its shared address.
#pragma once
#include "device.cuh"

namespace ptx {

// Makes a barrier whose phases take `arrivals` arrivals each. By one thread, once.
DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Lets asynchronous copies see the barriers that this thread has made.
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces `bytes` that copies will bring before the phase can end.
DEVICE void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity has ended. The first phase has parity 0; to wait for parity 1 of a new barrier
// is to wait for nothing.
DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace ptx
