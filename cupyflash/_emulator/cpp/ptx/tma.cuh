// Twin of cuda/ptx/tma.cuh.
#pragma once
#include "device.cuh"
#include "runtime.h"

namespace ptx {

struct alignas(64) TensorMap {
  u64 opaque[16];
};

DEVICE void prefetch_tensor_map(const TensorMap &map, emu::Loc loc = emu::Loc::here()) {
  emu::tensor_prefetch(&map, loc);
}

DEVICE void tma_load_4d(u32 shared, const TensorMap &map, u32 barrier, int c0, int c1, int c2, int c3,
                        emu::Loc loc = emu::Loc::here()) {
  emu::tensor_load(shared, &map, barrier, {c0, c1, c2, c3}, loc);
}

DEVICE void tma_store_4d(const TensorMap &map, u32 shared, int c0, int c1, int c2, int c3,
                         emu::Loc loc = emu::Loc::here()) {
  emu::tensor_store(&map, shared, {c0, c1, c2, c3}, loc);
}

DEVICE void tma_reduce_add_4d(const TensorMap &map, u32 shared, int c0, int c1, int c2, int c3,
                              emu::Loc loc = emu::Loc::here()) {
  emu::tensor_reduce_add(&map, shared, {c0, c1, c2, c3}, loc);
}

}  // namespace ptx
