// Copies of boxes of tensors by the tensor memory accelerator (PTX ISA, "cp.async.bulk.tensor"; CUDA Driver API,
// "cuTensorMapEncodeTiled"). One thread issues a copy. Elements outside the tensor are read as zeros and not written. A
// box starts at a multiple of 16 bytes of a row; that of a store or a sum at no negative coordinate, which a load's may
// have (CUDA Programming Guide, "Tensor Memory Access"). An H200 hangs at any other.
#pragma once
#include "device.cuh"

namespace ptx {

// A tensor of up to five dimensions and its box: made by the driver, read by the copies only.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

DEVICE void prefetch_tensor_map(const TensorMap &map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Global to shared. The box's bytes, also those outside the tensor, count towards the barrier's phase.
DEVICE void tma_load_4d(u32 shared, const TensorMap &map, u32 barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Shared to global, in this thread's open group of bulk copies.
DEVICE void tma_store_4d(const TensorMap &map, u32 shared, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// The same, adding to what is there.
DEVICE void tma_reduce_add_4d(const TensorMap &map, u32 shared, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

}  // namespace ptx
