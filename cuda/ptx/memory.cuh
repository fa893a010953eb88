// Shared memory: the block's one dynamic allocation, and its addresses as the 32-bit numbers that PTX instructions
// take.
#pragma once
#include "device.cuh"

namespace ptx {

// The block's dynamic shared memory, seen as one struct.
template <class S>
DEVICE S &shared() {
  extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
  return *reinterpret_cast<S *>(dynamic_shared_memory);
}

// PTX ISA, "cvta": address in the shared window of a generic pointer.
DEVICE u32 smem_address(const void *pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

}  // namespace ptx
