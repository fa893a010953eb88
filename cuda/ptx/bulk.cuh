// Copies of contiguous bytes by the bulk copy engine (PTX ISA, "cp.async.bulk"), and the groups that wait for those
// that leave shared memory. Addresses and sizes are multiples of 16 bytes. One thread issues a copy.
#pragma once
#include "device.cuh"

namespace ptx {

// Global to shared; the bytes count towards the barrier's phase.
DEVICE void bulk_load(u32 shared, const void *global, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// Shared to global, in this thread's open group.
DEVICE void bulk_store(void *global, u32 shared, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}

// The same, adding fp32 numbers to those that are there.
DEVICE void bulk_reduce_add_f32(float *global, u32 shared, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}

// Closes the group of this thread's copies from shared memory, tensor copies included, since the last commit.
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's groups have not read their shared memory yet.
template <int PENDING>
DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Waits until at most PENDING of this thread's groups are in flight.
template <int PENDING>
DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Lets copies and matrix products, which reach shared memory through the asynchronous proxy, see what this thread has
// stored there and what it knows to be stored.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same of global memory. What copies have written needs no fence to be seen by who knows that they are complete.
DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace ptx
