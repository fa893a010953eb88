// Barriers in shared memory (mbarrier). Their state is beside the memory, which holds a mark; a wait never spins.
// Internal to the runtime.
#pragma once
#include <cstdint>
#include <map>

#include "clock.h"
#include "object.h"
#include "runtime.h"
#include "tsan.h"

namespace emu {

struct Block;

struct MBarrier {
  // Threads that wait for the end of phases of one parity.
  struct Waiters : Object {
    const MBarrier *barrier;
    std::string state() const override;
  };

  uint32_t offset;  // in shared memory
  int number;       // of its entry in clocks
  int arrivals;     // that a phase takes
  Loc made_at;
  int maker;            // thread
  int pending;          // arrivals that this phase still takes
  int64_t tx = 0;       // bytes announced and not landed; below 0 when more have landed
  uint32_t phase = 0;   // since it was made
  uint32_t copied = 0;  // phases that copies arrived in, or that ended before
  uint32_t known = 0;   // phases that somebody has waited for, or that ended before
  uint32_t ended;       // phases, as clocks count them
  bool fenced = false;  // the asynchronous proxy sees it
  Waiters waiters[2];
  tsan::Phases phases;
  Clock arrived, released;  // what was known to those who arrived, and that when the last phase ended

  std::string name() const;    // "the mbarrier at +8192 (made at ring.cuh:11)"
  std::string counts() const;  // of its phase
};

// Of a block, by offset.
struct MBarriers {
  std::map<uint32_t, MBarrier> made;
  uint32_t ended = 0;  // the most phases of a barrier of an earlier block

  void clear();
};

// The barrier at an address that the running thread uses.
MBarrier &find_barrier(uint32_t address, const char *instruction, Loc loc);

// Bytes of a copy have landed.
void complete_tx(MBarrier &barrier, uint32_t bytes);

}  // namespace emu
