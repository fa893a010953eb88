// A launch: its blocks, one after the other in an order of the seed's, each from fresh memory to its last thread.
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <mutex>
#include <numeric>

#include "precise.h"
#include "state.h"

namespace emu {

Machine machine;

namespace {

constexpr unsigned MAX_THREADS = 1024,
                   MAX_SHARED_BYTES = 227 << 10;  // CUDA C++ Programming Guide, of compute capability 9.0

// What a fiber runs.
void thread_main() {
  Thread &self = *machine.thread;
  machine.kernel(machine.params);
  leave_copies();
  leave_warp();
  self.exited = true;
  --machine.block->alive;
  leave_barrier();
  run_next();
  __builtin_unreachable();
}

// The stacks stay for the next launch.
std::vector<Stack> stacks;

void make_block(Block &block, unsigned threads, size_t shared_bytes) {
  block.shared.memory = Guarded(shared_bytes);
  block.shadow = Shadow(shared_bytes, static_cast<int>(threads / 32));
  block.proxy = Proxy(shared_bytes);
  while (stacks.size() < threads) stacks.push_back(Stack::allocate());
  for (unsigned w = 0; w < threads / 32; ++w) {
    block.warps.push_back(std::make_unique<Warp>());
    block.warps.back()->number = static_cast<int>(w);
  }
  for (unsigned t = 0; t < threads; ++t) {
    auto thread = std::make_unique<Thread>();
    thread->stack = stacks[t];
    thread->index = {t, 0, 0};
    thread->number = static_cast<int>(t);
    thread->warp = block.warps[t / 32].get();
    thread->copies.thread = thread.get();
    block.threads.push_back(std::move(thread));
  }
}

// Everything as at the start of a block: memory and stacks are NaN, nothing has been done.
void start(Block &block, Index index) {
  block.index = blockIdx = index;
  block.alive = static_cast<int>(block.threads.size());
  memset(block.shared.memory.begin(), NAN_BYTE, block.shared.memory.bytes());
  block.proxy.clear();
  block.mbarriers.clear();
  uint32_t now = 0;
  for (const auto &warp : block.warps) now = std::max(now, warp->clock.time[warp->number]);
  for (const auto &warp : block.warps) {
    warp->exited = 0;
    warp->clock.start(now, block.mbarriers.ended, warp->number);
    warp->synced = now;
  }
  clear_ready(block.alive);
  for (const auto &thread : block.threads) {
    thread->exited = false;
    thread->copies.committed = 0;
    thread->stack.refill();
    prepare(thread->context, thread->stack, thread_main);
    make_ready(*thread);
  }
}

void run(Block &block, Index index) {
  start(block, index);
  {
    const FlushingFloats floats;
    const FaultHandlers handlers;
    start_first(machine.launcher);
    machine.thread = nullptr;
  }
  ++machine.stats.blocks;
  ptrdiff_t offset;
  if (!machine.failure.happened() && block.shared.memory.trampled(offset))
    machine.failure = {{},
                       {{{},
                         format("block (%u,%u,%u) wrote beside shared memory: %+ld of %zu bytes", index.x, index.y,
                                index.z, static_cast<long>(offset), block.shared.memory.bytes()),
                         {}}}};
}

void run_grid(Index grid) {
  const size_t count = static_cast<size_t>(grid.x) * grid.y * grid.z;
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  for (size_t i = count; i > 1; --i) std::swap(order[i - 1], order[machine.random.below(i)]);
  for (size_t i : order) {
    run(*machine.block, {static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                         static_cast<unsigned>(i / grid.x / grid.y)});
    if (machine.failure.happened()) return;
  }
}

const char *refusal(Index grid, unsigned block, unsigned shared_bytes) {
  if (!grid.x || !grid.y || !grid.z) return "a grid has at least one block";
  if (!block || block % 32 || block > MAX_THREADS) return "a block has 32, 64, ... or 1024 threads";
  if (shared_bytes > MAX_SHARED_BYTES) return "a block has at most 227 KiB of shared memory";
  return nullptr;
}

void launch(Index grid, unsigned block, unsigned shared_bytes, const void *params, size_t params_bytes, uint64_t seed) {
  struct alignas(64) Line {
    unsigned char byte[64];
  };
  std::vector<Line> copy((params_bytes + 63) / 64);
  memcpy(copy.data(), params, params_bytes);
  machine.params = copy.data();
  machine.random = {seed};
  machine.order = static_cast<Order>(seed % 4);
  machine.pace = static_cast<Pace>(seed / 4 % 3);
  machine.stats = {};
  machine.failure = {};
  machine.pending.clear();
  gridDim = grid;
  blockDim = {block, 1, 1};
  machine.block = std::make_unique<Block>();
  make_block(*machine.block, block, shared_bytes);
  run_grid(grid);
  if (!machine.failure.happened()) check_canaries();
}

}  // namespace

}  // namespace emu

int emu_launch(void (*kernel)(const void *), unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block,
               unsigned shared_bytes, const void *params, size_t params_bytes, unsigned long long seed, EmuStats *stats,
               char *message, size_t message_bytes) try {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  std::string text;
  if (const char *reason = emu::refusal({grid_x, grid_y, grid_z}, block, shared_bytes)) {
    text = reason;
  } else {
    emu::machine.kernel = kernel;
    emu::launch({grid_x, grid_y, grid_z}, block, shared_bytes, params, params_bytes, seed);
    text = emu::machine.failure.message();
    if (stats) *stats = emu::machine.stats;
    emu::machine.block.reset();
  }
  if (message_bytes) snprintf(message, message_bytes, "%s", text.c_str());
  return !text.empty();
} catch (const std::bad_alloc &) {
  snprintf(message, message_bytes, "no memory for a launch");
  return 1;
}
