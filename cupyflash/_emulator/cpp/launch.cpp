// A launch: its blocks, in an order of the seed's and as many at a time as the seed says, each from fresh memory to its
// last thread.
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <mutex>

#include "precise.h"
#include "state.h"
#include "warpgroup.h"

namespace emu {

Machine machine;

Thread::~Thread() {
  for (tsan::Fiber *fiber : {&copies.fiber, &context.fiber}) {
    fiber->join();
    fiber->destroy();
  }
}

namespace {

// CUDA C++ Programming Guide, of compute capability 9.0. Residents are together on one multiprocessor.
constexpr unsigned MAX_THREADS = 1024, MAX_SHARED_BYTES = 227 << 10, MAX_RESIDENT_THREADS = 2048, MAX_RESIDENTS = 3;

// After the last thread of a block, in that thread: the launcher lets the next one begin in its place.
void finish(Block &block) {
  ++machine.stats.blocks;
  ptrdiff_t offset;
  if (block.shared.memory.trampled(offset))
    fail_with({{},
               {{{},
                 format("block (%u,%u,%u) wrote beside shared memory: %+ld of %zu bytes", block.index.x, block.index.y,
                        block.index.z, static_cast<long>(offset), block.shared.memory.bytes()),
                 {}}}});
  if (!machine.waiting.empty()) change(machine.thread->context, machine.launcher);
}

// What a fiber runs.
void thread_main() {
  Thread &self = *machine.thread;
  machine.kernel(machine.params);
  leave_copies();
  leave_stores();
  leave_warpgroup();
  leave_warp();
  self.exited = true;
  if (--machine.block->alive == 0) {
    leave_loads();
    leave_named_barriers();
  }
  leave_barrier();
  if (!self.block->alive) finish(*self.block);
  run_next();
  __builtin_unreachable();
}

// The stacks stay for the next launch.
std::vector<Stack> stacks;

// Its stacks begin with the first that no other block has.
void make_block(Block &block, size_t first, unsigned threads, size_t shared_bytes) {
  while (stacks.size() < first + threads) stacks.push_back(Stack::allocate());
  block.shared.memory = Guarded(shared_bytes);
  block.shadow = Shadow(shared_bytes, static_cast<int>(threads / 32));
  block.proxy = Proxy(shared_bytes);
  for (unsigned w = 0; w < threads / 32; ++w) {
    block.warps.push_back(std::make_unique<Warp>());
    block.warps.back()->number = static_cast<int>(w);
  }
  for (unsigned g = 0; g < threads / 128; ++g)
    block.warpgroups.push_back(std::make_unique<Warpgroup>(static_cast<int>(g), shared_bytes));
  for (unsigned t = 0; t < threads; ++t) {
    auto thread = std::make_unique<Thread>();
    thread->block = &block;
    thread->stack = stacks[first + t];
    thread->index = {t, 0, 0};
    thread->number = static_cast<int>(t);
    thread->warp = block.warps[t / 32].get();
    thread->copies.thread = thread->stores.thread = thread.get();
    block.threads.push_back(std::move(thread));
  }
}

// For ThreadSanitizer: the threads of a block know of all that happened where an earlier one was.
void start_fibers(const Block &block) {
  if (!tsan::present()) return;
  for (const auto &thread : block.threads) {
    thread->context.fiber.join();
    thread->copies.fiber.join();
  }
  for (const auto &thread : block.threads) {
    const std::string name = subject(*thread);
    thread->context.fiber.begin();
    thread->context.fiber.name(name.c_str());
    thread->copies.fiber.begin();
    thread->copies.fiber.name(("cp.async of " + name).c_str());
  }
}

// Everything as at the start of a block: memory and stacks are NaN, nothing has been done.
void start(Block &block) {
  block.index = machine.waiting.back();
  machine.waiting.pop_back();
  block.alive = static_cast<int>(block.threads.size());
  memset(block.shared.memory.begin(), NAN_BYTE, block.shared.memory.bytes());
  block.proxy.clear();
  block.mbarriers.clear();
  for (NamedBarrier &barrier : block.named_barriers) barrier = {};
  block.registers.start(block.alive);
  uint32_t now = 0;
  for (const auto &warp : block.warps) now = std::max(now, warp->clock.time[warp->number]);
  for (const auto &warp : block.warps) {
    warp->exited = 0;
    warp->clock.start(now, block.mbarriers.ended, warp->number);
    warp->synced = now;
  }
  for (const auto &group : block.warpgroups) group->reset();
  reorder(block);
  start_fibers(block);
  for (const auto &thread : block.threads) {
    thread->exited = false;
    thread->acquired = {};
    thread->copies.committed = thread->stores.committed = 0;
    thread->copies.known = 0;
    thread->stack.refill();
    prepare(thread->context, thread->stack, thread_main);
    make_ready(*thread);
  }
}

// The indices of a grid's blocks.
std::vector<Index> shuffled(Index grid) {
  std::vector<Index> blocks;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) blocks.push_back({x, y, z});
  for (size_t i = blocks.size(); i > 1; --i) std::swap(blocks[i - 1], blocks[machine.random.below(i)]);
  return blocks;
}

void run_grid(Index grid, unsigned threads, size_t shared_bytes, size_t residents) {
  machine.waiting = shuffled(grid);
  residents = std::min({residents, machine.waiting.size(), size_t{MAX_RESIDENT_THREADS / threads}});
  for (size_t i = 0; i < residents; ++i) {
    machine.residents.push_back(std::make_unique<Block>());
    make_block(*machine.residents.back(), i * threads, threads, shared_bytes);
  }
  clear_ready();
  for (const auto &block : machine.residents) start(*block);
  const FlushingFloats floats;
  const FaultHandlers handlers;
  start_first(machine.launcher);
  while (!machine.failure.happened() && !machine.waiting.empty()) {
    start(*machine.block);
    start_first(machine.launcher);
  }
  machine.thread = nullptr;
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
  machine.constants = {machine.params, params_bytes, machine.kernel};
  machine.seed = seed;
  machine.random = {seed};
  machine.order = static_cast<Order>(seed % 4);
  machine.pace = static_cast<Pace>(seed / 4 % 3);
  machine.stats = {};
  machine.failure = {};
  machine.pending.clear();
  machine.values.clear();
  gridDim = grid;
  blockDim = {block, 1, 1};
  run_grid(grid, block, shared_bytes, MAX_RESIDENTS - (seed + seed / 12) % MAX_RESIDENTS);
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
    emu::machine.block = nullptr;
    emu::machine.residents.clear();
  }
  if (message_bytes) snprintf(message, message_bytes, "%s", text.c_str());
  return !text.empty();
} catch (const std::bad_alloc &) {
  snprintf(message, message_bytes, "no memory for a launch");
  return 1;
}
