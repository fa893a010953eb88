// Numbers in global memory that blocks share. A launch runs on one thread of the host, so every access is atomic.
#include "state.h"

namespace emu {

uint32_t atomic_add(uint32_t *global, uint32_t x, Loc loc) {
  check_global(global, sizeof x, "atom.add", loc);
  const uint32_t before = *global;
  *global = before + x;
  wake_values();
  return before;
}

uint32_t atomic_inc(uint32_t *global, uint32_t last, Loc loc) {
  check_global(global, sizeof last, "atom.inc", loc);
  const uint32_t before = *global;
  *global = before >= last ? 0 : before + 1;
  tsan::acquire(global);
  tsan::release(global);
  wake_values();
  return before;
}

void reduce_add(float *global, const float *x, uint32_t count, Loc loc) {
  check_global(global, count * sizeof *x, "red.add", loc);
  machine.stats.global_written_bytes += count * sizeof *x;
  for (uint32_t i = 0; i < count; ++i) global[i] += x[i];
}

void release_add(uint32_t *global, uint32_t x, Loc loc) {
  check_global(global, sizeof x, "red.release.add", loc);
  *global += x;
  tsan::release(global);
  wake_values();
}

}  // namespace emu
