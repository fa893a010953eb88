// What the twins of ptx/wgmma.cuh call: asynchronous matrix products of a warpgroup, on behalf of the running thread.
#pragma once
#include <cstdint>

#include "runtime.h"

namespace emu {

// What registers hold that nobody may read: signalling NaNs, on which arithmetic traps while products are in flight.
constexpr uint32_t IN_FLIGHT_BITS = 0x7fbfdead;  // an accumulator's, until the wait that ends its products
constexpr uint32_t UNDEFINED_BITS = 0x7fbfbeef;

enum class Element { BF16, F16, E4M3, E5M2 };

// D += A B, of which D is 64 x columns; K is 32 bytes of elements. What all threads of the warpgroup give alike:
struct WgmmaShape {
  const char *name;  // "wgmma_bf16"
  Element a_element, b_element;
  int columns;
  bool a_in_registers, a_transposed, b_transposed;

  bool operator==(const WgmmaShape &other) const = default;
};
struct WgmmaOperands {
  uint64_t a = 0, b = 0;  // descriptors
  bool keep = false;      // what D held

  bool operator==(const WgmmaOperands &other) const = default;
};

// `d` and `a`, the thread's registers, stay where they are until the wait; `a` is null where A is in shared memory.
void wgmma(const WgmmaShape &shape, const WgmmaOperands &operands, float *d, const uint32_t *a, Loc loc);
void wgmma_fence_registers(Loc loc);
void wgmma_commit_group(Loc loc);
void wgmma_wait_group(int pending, Loc loc);

}  // namespace emu
