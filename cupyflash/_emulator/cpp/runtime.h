// What the twins of ptx/ call: one function for each kind of instruction, on behalf of the running thread.
#pragma once
#include <stddef.h>

#include <cstdint>

namespace emu {

// A place in the sources. Every twin has a last parameter `Loc loc = Loc::here()`: the line that called it.
struct Loc {
  const char *file = "";
  int line = 0;
  static constexpr Loc here(const char *file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

// Ends the launch with a message about the running thread.
[[noreturn]] void fail(Loc loc, const char *format, ...) __attribute__((format(printf, 2, 3)));

// Shared memory: the block's one allocation, and its addresses as numbers.
void *shared_memory(size_t bytes, size_t alignment, Loc loc);
uint32_t shared_address(const void *pointer, Loc loc);

uint32_t lane();
void block_barrier(Loc loc);

// An instruction that the lanes of a warp execute together. Each lane gives a pointer to its operands; the last one to
// come runs it for all.
struct Lanes {
  void *operands[32];  // null for a lane outside the mask
  uint32_t mask;
  Loc loc;
  const void *counter;  // where the unit called, of the first

  template <class Operands>
  Operands &of(uint32_t lane) {
    return *static_cast<Operands *>(operands[lane]);
  }
};
struct Instruction {
  const char *name;
  void (*run)(Lanes &lanes);  // as the last lane to come
};
void together(const Instruction &instruction, void *operands, Loc loc, uint32_t mask = 0xffffffffu);

struct Shuffle {
  uint32_t value;
  uint32_t source;  // lane
};
struct Vote {
  bool mine, any;
};
extern const Instruction SYNC, SHUFFLE, VOTE;

// cp.async: a copy of this thread, its groups, and waiting until at most `pending` groups are in flight. ALL also waits
// for copies that no group has.
constexpr int ALL = -1;
void copy_async(uint32_t shared, const void *global, int bytes, bool present, Loc loc);
void copy_commit();
void copy_wait(int pending, Loc loc);

// Barriers in shared memory, by their address.
void mbarrier_init(uint32_t address, uint32_t arrivals, Loc loc);
void mbarrier_fence_init();
void mbarrier_arrive(uint32_t address, Loc loc);
void mbarrier_arrive_expect_tx(uint32_t address, uint32_t bytes, Loc loc);
void mbarrier_wait(uint32_t address, uint32_t parity, Loc loc);

// Copies by the bulk engine: loads arrive at a barrier, stores are in groups of their thread. Boxes of tensors are at
// four coordinates. A wait is for the reading of the source, or also for the writing.
void tensor_prefetch(const void *map, Loc loc);
void tensor_load(uint32_t shared, const void *map, uint32_t barrier, const int (&at)[4], Loc loc);
void tensor_store(const void *map, uint32_t shared, const int (&at)[4], Loc loc);
void tensor_reduce_add(const void *map, uint32_t shared, const int (&at)[4], Loc loc);
void bulk_load(uint32_t shared, const void *global, uint32_t bytes, uint32_t barrier, Loc loc);
void bulk_store(void *global, uint32_t shared, uint32_t bytes, Loc loc);
void bulk_reduce_add(float *global, uint32_t shared, uint32_t bytes, Loc loc);
void bulk_commit();
void bulk_wait(int pending, bool until_written, Loc loc);
void fence_proxy();
void fence_proxy_global();

// Barriers of some threads of a block, by number; the lane that is elected; the registers of a thread.
void named_barrier_sync(uint32_t id, uint32_t threads, Loc loc);
void named_barrier_arrive(uint32_t id, uint32_t threads, Loc loc);
extern const Instruction ELECT;  // of a bool
void set_registers(int registers, bool increase, Loc loc);

// Numbers in global memory that blocks share.
uint32_t atomic_add(uint32_t *global, uint32_t x, Loc loc);
uint32_t atomic_inc(uint32_t *global, uint32_t last, Loc loc);
void reduce_add(float *global, const float *x, uint32_t count, Loc loc);
void release_add(uint32_t *global, uint32_t x, Loc loc);
void acquire_when(const uint32_t *global, uint32_t value, Loc loc);  // parks until it is

// Four 8 x 8 matrices of 16-bit elements: this lane's row, and what it receives.
struct MatrixLoad {
  uint32_t *d;
  uint32_t row;
};
extern const Instruction LDMATRIX_X4, LDMATRIX_X4_TRANS;

// The way back.
struct MatrixStore {
  uint32_t row;
  const uint32_t *d;
};
extern const Instruction STMATRIX_X4, STMATRIX_X4_TRANS;

// D += A B of m16n8k16, or of m16n8k32 with 8-bit elements.
struct Product {
  float *d;
  const uint32_t *a;
  uint32_t b[2];
};
extern const Instruction MMA_BF16, MMA_F16, MMA_E4M3, MMA_E5M2;

// x with subnormals made zero, as instructions marked ftz do.
inline float flushed(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  return bits & 0x7f800000u ? x : __builtin_bit_cast(float, bits & 0x80000000u);
}

}  // namespace emu
