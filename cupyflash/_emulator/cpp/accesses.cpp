// Watched accesses: g++ -fsanitize=thread calls a function at every load and store of a unit that may concern other
// threads. These take the place of the sanitizer's library (the unit is linked without it), and hold plain accesses of
// shared memory to the same rules as instructions; those of global memory are counted.
#include <cstdint>

#include "state.h"

namespace emu {

namespace {

void seen(const void *address, size_t bytes, bool write) {
  const Thread *self = machine.thread;
  if (!self || self->stack.holds(address)) return;
  Block &block = *machine.block;
  const Guarded &shared = block.shared.memory;
  const char *access = write ? "a store" : "a load";
  if (shared.holds(address, bytes)) {
    const auto offset = static_cast<uint32_t>(static_cast<const unsigned char *>(address) - shared.begin());
    if (write) {
      block.shadow.write(offset, bytes, {*self, access, {}});
    } else {
      block.shadow.read(offset, bytes, {*self, access, {}});
    }
  } else if (write || !machine.constants.holds(address)) {
    check_range(address, bytes, access, {});
    (write ? machine.stats.global_written_bytes : machine.stats.global_read_bytes) += bytes;
  }
}

}  // namespace

}  // namespace emu

#define WATCH(SIZE)                                                                    \
  void __tsan_read##SIZE(void *address) { emu::seen(address, SIZE, false); }           \
  void __tsan_write##SIZE(void *address) { emu::seen(address, SIZE, true); }           \
  void __tsan_unaligned_read##SIZE(void *address) { emu::seen(address, SIZE, false); } \
  void __tsan_unaligned_write##SIZE(void *address) { emu::seen(address, SIZE, true); }

extern "C" {
WATCH(1)
WATCH(2)
WATCH(4)
WATCH(8)
WATCH(16)
void __tsan_read_range(void *address, size_t bytes) { emu::seen(address, bytes, false); }
void __tsan_write_range(void *address, size_t bytes) { emu::seen(address, bytes, true); }
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
}
