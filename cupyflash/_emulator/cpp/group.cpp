// What several warps do together, and the election of a lane.
#include "group.h"

#include <algorithm>
#include <cstring>

#include "state.h"

namespace emu {

namespace {

constexpr int WARPGROUP = 128;  // threads
// CUDA C++ Programming Guide, "Compute Capabilities" and "setmaxnreg": of a block, of a thread, and their unit.
constexpr int REGISTERS = 64 << 10, MAX_REGISTERS = 256, UNIT = 8;

// The lanes of a warp come to a barrier together.
void check_visits(const NamedBarrier &barrier) {
  for (int w = 0; w < Clock::WARPS; ++w)
    for (int lane = 1; lane < 32; ++lane)
      if (barrier.visits[w][lane] != barrier.visits[w][0])
        fail(barrier.loc, "named barrier %d: lane %d of warp %d has come %d times, lane 0 %d times", barrier.id, lane,
             w, barrier.visits[w][lane], barrier.visits[w][0]);
}

// Everybody has come: what they did so far is known to those who wait.
void release(Block &block, NamedBarrier &barrier) {
  check_visits(barrier);
  for (const auto &warp : block.warps) {
    if (!(barrier.waiting_warps >> warp->number & 1)) continue;
    warp->clock.join(barrier.clock);
    warp->sync();
  }
  barrier.arrived = barrier.waiting_warps = 0;
  barrier.phases.pass();
  memset(barrier.visits, 0, sizeof barrier.visits);
  wake(barrier);
}

void come(uint32_t id, uint32_t threads, bool wait, Loc loc) {
  const char *name = wait ? "bar.sync" : "bar.arrive";
  Block &block = *machine.block;
  const Thread &self = *machine.thread;
  Warp &warp = *self.warp;
  if (id == 0 || id >= NamedBarrier::COUNT)
    fail(loc, "%s of barrier %u: named barriers are 1 to %d", name, id, NamedBarrier::COUNT - 1);
  if (!threads || threads % 32 || threads > block.threads.size())
    fail(loc, "%s of barrier %u for %u threads: a multiple of 32, and the block has %zu", name, id, threads,
         block.threads.size());
  NamedBarrier &barrier = block.named_barriers[id];
  if (barrier.arrived == 0) {
    barrier.id = static_cast<int>(id);
    barrier.threads = threads;
    barrier.loc = loc;
  }
  if (barrier.threads != threads)
    fail(loc, "%s of barrier %u for %u threads, while others at %s wait for %u", name, id, threads,
         place(barrier.loc).c_str(), barrier.threads);
  ++barrier.visits[warp.number][self.number % 32];
  barrier.clock.join(warp.clock);
  if (wait) {
    barrier.waiting_warps |= 1u << warp.number;
  } else {
    ++warp.clock.time[warp.number];
  }
  const void *phase = barrier.phases.come();
  if (++barrier.arrived < threads) {
    if (wait) wait_for(barrier, loc);
  } else {
    release(block, barrier);
  }
  if (wait) tsan::acquire(phase);
}

// Any lane, the same at every election.
void elect_one(Lanes &lanes) {
  const uint32_t elected = Random{machine.seed}.below(32);
  for (uint32_t lane = 0; lane < 32; ++lane) lanes.of<bool>(lane) = lane == elected;
}

}  // namespace

const Instruction ELECT{"elect", elect_one};

std::string NamedBarrier::state() const {
  return format("named barrier %d, %u of %u threads have come", id, arrived, threads);
}

void named_barrier_sync(uint32_t id, uint32_t threads, Loc loc) { come(id, threads, true, loc); }
void named_barrier_arrive(uint32_t id, uint32_t threads, Loc loc) { come(id, threads, false, loc); }

// Whoever waits at one has not exited, so these arrived without waiting.
void leave_named_barriers() {
  for (const NamedBarrier &barrier : machine.block->named_barriers)
    if (barrier.arrived)
      fail(barrier.loc,
           "the block exits, and %u of %u threads have come to named barrier %d, of which this is the first",
           barrier.arrived, barrier.threads, barrier.id);
}

void RegisterPool::start(int threads) {
  warpgroups.assign(threads / WARPGROUP, {});
  free = 0;
  for (Warpgroup &group : warpgroups) group.registers = std::min(REGISTERS / threads / UNIT * UNIT, MAX_REGISTERS);
}

std::string RegisterPool::state() const {
  std::string text = "setmaxnreg: the warpgroups have";
  for (const Warpgroup &group : warpgroups) text += format(" %d", group.registers);
  return text + format(" registers a thread, and %d are free", free);
}

std::string RegisterPool::Warpgroup::state() const {
  return format("setmaxnreg to %d, %d of %d threads have come", wanted, arrived, WARPGROUP);
}

void set_registers(int registers, bool increase, Loc loc) {
  RegisterPool &pool = machine.block->registers;
  const size_t number = machine.thread->number / WARPGROUP;
  if (number >= pool.warpgroups.size()) fail(loc, "setmaxnreg: this is no warpgroup of %d threads", WARPGROUP);
  RegisterPool::Warpgroup &group = pool.warpgroups[number];
  if (group.arrived == 0) group.wanted = registers, group.increase = increase, group.loc = loc;
  if (group.wanted != registers || group.increase != increase)
    fail(loc, "setmaxnreg to %d, while other threads of the warpgroup are at %s: to %d", registers,
         place(group.loc).c_str(), group.wanted);
  if (increase ? registers < group.registers : registers > group.registers)
    fail(loc, "setmaxnreg.%s to %d registers a thread, and the warpgroup has %d", increase ? "inc" : "dec", registers,
         group.registers);
  if (++group.arrived < WARPGROUP) return wait_for(group, loc);
  while (pool.free < registers - group.registers) wait_for(pool, loc);
  pool.free -= registers - group.registers;
  group.registers = registers;
  group.arrived = 0;
  wake(group);
  if (!increase) wake(pool);
}

}  // namespace emu
