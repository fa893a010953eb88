// The state of a launch: the machine, the block that it runs, its warps and threads. Internal to the runtime.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "abi.h"
#include "emu.h"
#include "fibers.h"
#include "mbarrier.h"
#include "memory.h"
#include "object.h"
#include "proxy.h"
#include "report.h"
#include "runtime.h"
#include "shadow.h"

namespace emu {

struct Thread;
struct Warp;

// A cp.async of a thread that it has not waited for.
struct Copy {
  uint32_t shared;
  const void *global;
  int bytes;
  bool present, landed;
  int group;
  Loc loc;
};

// The copies of one thread: of groups below `committed`, and of the one that is open.
struct Copies : Object, Operation {
  Thread *thread = nullptr;
  std::vector<Copy> in_flight;  // in order of issue
  int committed = 0;
  int awaited = 0;  // the thread waits for copies of groups below

  void run() override;
  std::string state() const override;
};

struct Thread {
  Context context;
  Stack stack;
  Index index;
  int number;  // in the block
  Warp *warp;
  Copies copies;
  Object *waits_for = nullptr;
  Loc waits_at;
  bool exited = false;
  // fence.proxy.async: how many so far, and what the thread knew at the last.
  uint32_t fences = 0, fence_synced = 0;
  Clock fence_clock;
};

// The meeting of a warp's lanes at one instruction.
struct Meeting : Object {
  const Instruction *instruction = nullptr;
  Lanes lanes;
  uint32_t present = 0;  // lanes that have come

  std::string state() const override;
};

struct Warp {
  int number;
  uint32_t exited = 0;
  Meeting meeting;
  Clock clock;
  uint32_t synced = 0;  // its time at the last barrier of all lanes
  int registers = 0;    // of a thread

  // What was done before is known to all lanes, after a barrier of all of them.
  void sync() { synced = clock.time[number]++; }
};

// __syncthreads.
struct Barrier : Object {
  int arrived = 0;
  Loc loc;
  Clock clock;

  std::string state() const override;
};

struct Block {
  Index index;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<std::unique_ptr<Warp>> warps;
  Barrier barrier;
  Shared shared;
  Shadow shadow;  // of shared memory
  Proxy proxy;
  MBarriers mbarriers;
  int alive = 0;
};

// splitmix64 (Steele, Lea and Flood 2014).
struct Random {
  uint64_t state;
  uint64_t next();
  uint32_t below(size_t bound) { return static_cast<uint32_t>((next() >> 32) * bound >> 32); }
};

enum class Order { RANDOM, FIFO, LIFO, PRIORITY };  // of threads
enum class Pace { LAZY, RANDOM, EAGER };            // of asynchronous operations

// One launch at a time.
struct Machine {
  void (*kernel)(const void *params);
  const void *params;
  Random random;
  Order order;
  Pace pace;
  EmuStats stats;
  Failure failure;
  Context launcher;          // of emu_launch, which continues when a block is done or the launch has failed
  Thread *thread = nullptr;  // that runs
  std::unique_ptr<Block> block;
  std::vector<Operation *> pending;
  Context *inspector = nullptr;  // asks a waiting thread for its trace, see deadlock
  Trace inspected;
};
extern Machine machine;

// The scheduler.
void clear_ready(int threads);
void make_ready(Thread &thread);
void start_first(Context &launcher);     // until all have exited or the launch has failed
void run_next();                         // leaves the running thread, which waits or has exited
void wait_for(Object &object, Loc loc);  // until wake
void wake(Object &object);
void submit(Operation &operation);  // to happen at the machine's pace

// Of a thread that ends: who waited for the others only goes on, and what it left undone fails.
void leave_barrier();
void leave_warp();
void leave_copies();

}  // namespace emu
