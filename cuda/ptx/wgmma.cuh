// Matrix products D += A B of a warpgroup, asynchronous, with fp32 accumulation (PTX ISA, "wgmma.mma_async"): D is
// 64 x N in registers, B is K x N in shared memory, A is 64 x K there or in registers; K is 32 bytes of elements.
//
// With t the thread of the warpgroup, D's element i is at row t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, column i / 4 *
// 8 + t % 4 * 2 + i % 2; a register of A holds the pair of 16-bit elements (four 8-bit ones) that a D of 16-bit
// elements would have there: a[0] rows + 0, a[1] rows + 8, a[2] and a[3] the same of the second half of K. A descriptor
// names a matrix in shared memory (see "Matrix Descriptor"); TRANS marks one whose K runs down its rows instead of
// along them.
//
// Between wgmma_fence and the wait that ends a product, the registers of D and A belong to it: no read, no write, no
// copy.
#pragma once
#include "device.cuh"

namespace ptx {

// Orders this warpgroup's accesses of registers before the products that follow.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of the products issued since the last commit.
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING groups are in flight.
template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// A value that is about to be overwritten without being read: the compiler need not keep what it held.
DEVICE void undefined(float &x) { asm volatile("" : "=f"(x)); }

// Keeps x in its register across asynchronous use.
DEVICE void pin(float &x) { asm volatile("" : "+f"(x)::"memory"); }

}  // namespace ptx

#include "ptx/wgmma_shapes.cuh"
