// Barriers with names, and the registers of warpgroups. Internal to the runtime.
#pragma once
#include <cstdint>
#include <vector>

#include "clock.h"
#include "object.h"
#include "runtime.h"
#include "tsan.h"

namespace emu {

struct NamedBarrier : Object {
  static constexpr int COUNT = 16;  // of a block; the first is __syncthreads'

  int id;
  uint32_t threads;  // that it waits for
  uint32_t arrived = 0;
  Loc loc;                                // of the first
  uint32_t waiting_warps = 0;             // a bit each
  uint8_t visits[Clock::WARPS][32] = {};  // by lane
  Clock clock;
  tsan::Phases phases;

  std::string state() const override;
};

// setmaxnreg: a block's registers, those of one thread standing for its warpgroup's. All threads of a warpgroup come
// to it together, the last of them waits until there are enough.
struct RegisterPool : Object {
  struct Warpgroup : Object {
    int registers;  // of a thread
    int arrived = 0, wanted = 0;
    bool increase = false;
    Loc loc;

    std::string state() const override;
  };

  std::vector<Warpgroup> warpgroups;
  int free = 0;

  void start(int threads);
  std::string state() const override;
};

}  // namespace emu
