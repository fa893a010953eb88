// Twin of cuda/ptx/warp.cuh.
#pragma once
#include "device.cuh"
#include "runtime.h"

namespace ptx {

DEVICE void barrier(emu::Loc loc = emu::Loc::here()) { emu::block_barrier(loc); }
DEVICE void warp_barrier(emu::Loc loc = emu::Loc::here()) { emu::together(emu::SYNC, nullptr, loc); }

DEVICE u32 lane(emu::Loc = emu::Loc::here()) { return emu::lane(); }

DEVICE float shfl_xor(float x, int mask, emu::Loc loc = emu::Loc::here()) {
  emu::Shuffle shuffle{__builtin_bit_cast(u32, x), emu::lane() ^ mask};
  emu::together(emu::SHUFFLE, &shuffle, loc);
  return __builtin_bit_cast(float, shuffle.value);
}

DEVICE u32 shfl_xor(u32 x, int mask, emu::Loc loc = emu::Loc::here()) {
  emu::Shuffle shuffle{x, emu::lane() ^ mask};
  emu::together(emu::SHUFFLE, &shuffle, loc);
  return shuffle.value;
}

DEVICE int uniform(int x, emu::Loc loc = emu::Loc::here()) {
  emu::Shuffle shuffle{static_cast<u32>(x), 0};
  emu::together(emu::SHUFFLE, &shuffle, loc);
  return static_cast<int>(shuffle.value);
}

DEVICE bool any(bool predicate, emu::Loc loc = emu::Loc::here()) {
  emu::Vote vote{predicate, false};
  emu::together(emu::VOTE, &vote, loc);
  return vote.any;
}

DEVICE u32 opaque(u32 x, emu::Loc = emu::Loc::here()) { return x; }
DEVICE i64 opaque(i64 x, emu::Loc = emu::Loc::here()) { return x; }

}  // namespace ptx
