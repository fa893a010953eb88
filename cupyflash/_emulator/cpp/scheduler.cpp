// Who runs next, and when asynchronous operations happen: as badly for the kernel as the seed asks for. Threads never
// spin: one that waits is parked at an object, and woken by it.
#include <algorithm>
#include <map>

#include "precise.h"
#include "state.h"

namespace emu {

namespace {

// Threads that could run. In a strict order of warps the newest thread of the first warp runs, else one of a ring.
struct Ready {
  std::vector<Thread *> ring;  // a power of two
  size_t first = 0, count = 0;
  std::vector<Thread *> of_rank[64];  // warps of all residents
  uint64_t ranks = 0;                 // that have threads

  void clear(size_t threads) {
    size_t capacity = 32;
    while (capacity < threads) capacity *= 2;
    ring.assign(capacity, nullptr);
    first = count = 0;
    ranks = 0;
    for (auto &stack : of_rank) stack.clear();
  }

  Thread *&slot(size_t i) { return ring[(first + i) & (ring.size() - 1)]; }

  bool empty() const { return count == 0 && ranks == 0; }

  void put(Thread *thread) {
    if (machine.order == Order::PRIORITY) {
      const int rank = thread->warp->rank;
      of_rank[rank].push_back(thread);
      ranks |= uint64_t{1} << rank;
    } else {
      slot(count++) = thread;
    }
  }

  Thread *take() {
    switch (machine.order) {
      case Order::FIFO: {
        Thread *thread = slot(0);
        ++first, --count;
        return thread;
      }
      case Order::RANDOM:
        std::swap(slot(machine.random.below(count)), slot(count - 1));
        [[fallthrough]];
      case Order::LIFO:
        return slot(--count);
      case Order::PRIORITY:
        break;
    }
    const int rank = __builtin_ctzll(ranks);
    Thread *thread = of_rank[rank].back();
    of_rank[rank].pop_back();
    if (of_rank[rank].empty()) ranks &= ~(uint64_t{1} << rank);
    return thread;
  }
} ready;

void run_operation() {
  const size_t chosen = machine.random.below(machine.pending.size());
  Operation *operation = machine.pending[chosen];
  machine.pending[chosen] = machine.pending.back();
  machine.pending.pop_back();
  Block *self = machine.block;
  machine.block = operation->block;
  operation->run();
  machine.block = self;
}

// The numbers of threads, as ranges.
std::string ranges(const std::vector<int> &numbers) {
  std::string text;
  for (size_t i = 0, end; i < numbers.size(); i = end) {
    end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    text += format(end - i > 1 ? "%s%d-%d" : "%s%d", i ? "," : "", numbers[i], numbers[end - 1]);
  }
  return text;
}

// Where a waiting thread stands: it is asked itself, on its own stack.
Trace trace_of(Thread &thread) {
  if (&thread == machine.thread) return trace_here();
  Context here;
  Thread *self = machine.thread;
  machine.inspector = &here;
  change(here, thread.context);
  machine.inspector = nullptr;
  machine.thread = self;
  return machine.inspected;
}

std::string name_of(const Block &block) {
  return format("block (%u,%u,%u)", block.index.x, block.index.y, block.index.z);
}

// Adds to a report where the threads of a block are.
void describe(Block &block, Failure &failure) {
  machine.block = &block;
  std::vector<int> exited;
  struct Group {
    Thread *first;
    std::vector<int> threads;
  };
  std::vector<Group> groups;  // threads that wait at one line for one object
  for (const auto &thread : block.threads) {
    if (thread->exited) {
      exited.push_back(thread->number);
      continue;
    }
    const auto same = [&](const Group &group) {
      return group.first->waits_for == thread->waits_for && group.first->waits_at.line == thread->waits_at.line &&
             group.first->waits_at.file == thread->waits_at.file;
    };
    auto group = std::find_if(groups.begin(), groups.end(), same);
    if (group == groups.end()) group = groups.insert(group, {thread.get(), {}});
    group->threads.push_back(thread->number);
  }
  const std::string name = name_of(block);
  if (!exited.empty()) failure.heading += format("; %s threads %s have exited", name.c_str(), ranges(exited).c_str());
  for (const Group &group : groups)
    failure.notes.push_back({group.first->waits_at,
                             format("%s threads %s wait: %s", name.c_str(), ranges(group.threads).c_str(),
                                    group.first->waits_for->state().c_str()),
                             trace_of(*group.first)});
}

[[noreturn]] void deadlock() {
  Failure failure;
  failure.heading = "DEADLOCK";
  if (!machine.waiting.empty()) failure.heading += format("; blocks that have not begun: %zu", machine.waiting.size());
  for (const auto &block : machine.residents)
    if (block->alive) describe(*block, failure);
  fail_with(std::move(failure));
}

}  // namespace

uint64_t Random::next() {
  state += 0x9e3779b97f4a7c15u;
  uint64_t z = state;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

static void shuffle_ranks(const std::vector<Warp *> &warps) {
  for (size_t w = warps.size(); w > 1; --w) std::swap(warps[w - 1]->rank, warps[machine.random.below(w)]->rank);
}

void clear_ready() {
  std::vector<Warp *> warps;
  for (const auto &block : machine.residents)
    for (const auto &warp : block->warps) {
      warp->rank = static_cast<int>(warps.size());
      warps.push_back(warp.get());
    }
  ready.clear(warps.size() * 32);
  shuffle_ranks(warps);
}

void reorder(const Block &block) {
  std::vector<Warp *> warps;
  for (const auto &warp : block.warps) warps.push_back(warp.get());
  shuffle_ranks(warps);
}

void make_ready(Thread &thread) { ready.put(&thread); }

static void run(Context &from, Thread &thread) {
  machine.thread = &thread;
  threadIdx = thread.index;
  trap_invalid(thread.traps_invalid);
  ++machine.stats.switches;
  machine.block = thread.block;
  blockIdx = thread.block->index;
  change(from, thread.context);
}

void start_first(Context &launcher) { run(launcher, *ready.take()); }

void run_next() {
  Thread *self = machine.thread;
  if (machine.pace == Pace::RANDOM && !machine.pending.empty() && machine.random.below(32) == 0) run_operation();
  if (ready.empty()) wake_values();
  while (ready.empty() && !machine.pending.empty()) {
    run_operation();
    if (ready.empty()) wake_values();
  }
  if (ready.empty()) {
    const auto alive = [](const auto &block) { return block->alive > 0; };
    if (std::any_of(machine.residents.begin(), machine.residents.end(), alive)) deadlock();
    change(self->context, machine.launcher);
  }
  Thread *next = ready.take();
  if (next != self) run(self->context, *next);
}

void wait_for(Object &object, Loc loc) {
  Thread &self = *machine.thread;
  self.waits_for = &object;
  self.waits_at = loc;
  object.waiters.push_back(&self);
  run_next();
  while (machine.inspector) {  // woken only to be looked at
    machine.inspected = trace_here();
    change(self.context, *machine.inspector);
  }
  self.waits_for = nullptr;
}

void wake(Object &object) {
  for (Thread *thread : object.waiters) ready.put(thread);
  object.waiters.clear();
}

void submit(Operation &operation) {
  operation.block = machine.block;
  if (machine.pace == Pace::EAGER) return operation.run();
  machine.pending.push_back(&operation);
}

std::string Value::state() const {
  return format("for %s to be %u, it is %u", describe_address(number).c_str(), value, *number);
}

void wake_values() {
  for (auto at = machine.values.begin(); at != machine.values.end();) {
    Value &value = at->second;
    if (value.there()) {
      wake(value);
      at = machine.values.erase(at);
    } else {
      ++at;
    }
  }
}

void acquire_when(const uint32_t *global, uint32_t value, Loc loc) {
  check_global(global, sizeof *global, "acquire", loc);
  while (*global != value) {
    Value &awaited = machine.values[{global, value}];
    awaited.number = global;
    awaited.value = value;
    wait_for(awaited, loc);
  }
  machine.thread->acquired = loc;
  tsan::acquire(global);
}

}  // namespace emu

emu::Index threadIdx, blockIdx, blockDim, gridDim;
