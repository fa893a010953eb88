// A ring of slots in shared memory between a producer, which fills them, and consumers, which empty them in the same
// order: two barriers a slot.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"

template <int SLOTS>
struct Ring {
  u64 full[SLOTS], empty[SLOTS];

  // A slot is full when each of `producers` has arrived and all announced bytes have landed, empty after `releases`.
  DEVICE void init(u32 releases, u32 producers = 1) {
    for (int slot = 0; slot < SLOTS; ++slot) {
      ptx::mbarrier_init(ptx::smem_address(&full[slot]), producers);
      ptx::mbarrier_init(ptx::smem_address(&empty[slot]), releases);
    }
  }
};

// A place on a ring: the slot, and the parity of the phase that it is in.
template <int SLOTS>
struct Cursor {
  u32 slot = 0, parity = 0;

  Cursor() = default;
  // After `number` advances.
  DEVICE explicit Cursor(u32 number) : slot(number % SLOTS), parity(number / SLOTS % 2) {}

  DEVICE void advance() {
    if (++slot == SLOTS) slot = 0, parity ^= 1;
  }

  DEVICE u32 full(const Ring<SLOTS> &ring) const { return ptx::smem_address(ring.full) + slot * 8; }
  DEVICE u32 empty(const Ring<SLOTS> &ring) const { return ptx::smem_address(ring.empty) + slot * 8; }

  // The producer's wait for a slot to fill, which at first are all empty; the consumers' wait for what it brings.
  DEVICE void wait_empty(const Ring<SLOTS> &ring) const { ptx::mbarrier_wait(empty(ring), parity ^ 1); }
  DEVICE void wait_full(const Ring<SLOTS> &ring) const { ptx::mbarrier_wait(full(ring), parity); }
};
