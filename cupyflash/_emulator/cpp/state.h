// The state of a launch: the machine, the blocks that are on it, their warps and threads. Internal to the runtime.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"
#include "emu.h"
#include "fibers.h"
#include "group.h"
#include "mbarrier.h"
#include "memory.h"
#include "object.h"
#include "proxy.h"
#include "report.h"
#include "runtime.h"
#include "shadow.h"
#include "transfer.h"
#include "tsan.h"

namespace emu {

struct Thread;
struct Warp;
struct Warpgroup;

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
  static constexpr int GROUPS = 16;  // that ThreadSanitizer tells from each other

  Thread *thread = nullptr;
  std::vector<Copy> in_flight;  // in order of issue
  int committed = 0;
  int awaited = 0;       // the thread waits for copies of groups below
  tsan::Fiber fiber;     // whose deeds they are
  char written[GROUPS];  // addresses of releases, when all copies of a group are issued
  int known = 0;         // groups that the thread has acquired

  void run() override;
  std::string state() const override;
};

struct Thread {
  Context context;
  Stack stack;
  Index index;
  int number;  // in the block
  Warp *warp;
  Block *block;
  Copies copies;
  Stores stores;
  Object *waits_for = nullptr;
  Loc waits_at;
  bool exited = false;
  bool traps_invalid = false;  // operations of floats: it has wgmma in flight
  uint32_t fences = 0;         // of the asynchronous proxy, so far
  Loc acquired;                // where it read a number of global memory that no such fence has followed; or no line

  ~Thread();
};

// The meeting of a warp's lanes at one instruction.
struct Meeting : Object {
  const Instruction *instruction = nullptr;
  Lanes lanes;
  uint32_t present = 0;  // lanes that have come
  tsan::Phases phases;

  std::string state() const override;
};

struct Warp {
  int number;
  int rank = 0;  // among those of all residents, where the order of threads is one of warps
  uint32_t exited = 0;
  Meeting meeting;
  Clock clock;
  uint32_t synced = 0;  // its time at the last barrier of all lanes

  // What was done before is known to all lanes, after a barrier of all of them.
  void sync() { synced = clock.time[number]++; }
};

// __syncthreads.
struct Barrier : Object {
  int arrived = 0;
  Loc loc;
  Clock clock;
  tsan::Phases phases;

  std::string state() const override;
};

struct Block {
  Index index;
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<std::unique_ptr<Warpgroup>> warpgroups;
  Barrier barrier;
  NamedBarrier named_barriers[NamedBarrier::COUNT];
  RegisterPool registers;
  Shared shared;
  Shadow shadow;  // of shared memory
  Proxy proxy;
  MBarriers mbarriers;
  std::list<Load> loads;  // in flight
  int alive = 0;
};

// A value of a number in global memory that threads of any block wait for.
struct Value : Object {
  const uint32_t *number = nullptr;
  uint32_t value = 0;

  bool there() const { return *number == value; }
  std::string state() const override;
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
  Constants constants;
  uint64_t seed;
  Random random;
  Order order;
  Pace pace;
  EmuStats stats;
  Failure failure;
  Context launcher;          // of emu_launch, which continues when a block can begin or the launch is over
  Thread *thread = nullptr;  // that runs
  Block *block = nullptr;    // of that thread
  std::vector<std::unique_ptr<Block>> residents;                  // that are on the machine together
  std::vector<Index> waiting;                                     // blocks that have not begun, the next one last
  std::map<std::pair<const uint32_t *, uint32_t>, Value> values;  // that somebody has waited for
  std::vector<Operation *> pending;
  Context *inspector = nullptr;  // asks a waiting thread for its trace, see deadlock
  Trace inspected;
};
extern Machine machine;

// The scheduler.
void clear_ready();                // and ranks the warps of all residents
void reorder(const Block &block);  // ranks its warps anew among themselves
void make_ready(Thread &thread);
void start_first(Context &launcher);     // until a block can begin or the launch is over
void run_next();                         // leaves the running thread, which waits or has exited
void wait_for(Object &object, Loc loc);  // until wake
void wake(Object &object);
void wake_values();                 // who waits for one that is there
void submit(Operation &operation);  // to happen at the machine's pace

// Of a thread that ends: who waited for the others only goes on, and what it left undone fails.
void leave_barrier();
void leave_warp();
void leave_copies();
void leave_stores();
void leave_loads();           // of the block, with its last thread
void leave_named_barriers();  // likewise
void leave_warpgroup();

}  // namespace emu
