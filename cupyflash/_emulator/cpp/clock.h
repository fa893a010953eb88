// Vector clocks: what a warp knows of the others' deeds, by the barriers between them. Internal to the runtime.
#pragma once
#include <cstdint>

namespace emu {

// Entry w is the time of warp w up to which everything that w did is known. A warp's own time passes whenever others
// may learn of its deeds: at barriers and arrivals. Entry WARPS + b is the number of completed phases of mbarrier b
// that are known. Times and phases go on from block to block, so that nothing of an earlier block is ever new.
struct Clock {
  static constexpr int WARPS = 32, BARRIERS = 64;
  uint32_t time[WARPS + BARRIERS] = {};
  uint32_t fenced[WARPS] = {};  // the same of warps, for the asynchronous proxy: a fence came after that was known

  // Of a warp that knows all that happened up to `now` and `phases`, and whose next deeds are later.
  void start(uint32_t now, uint32_t phases, int warp) {
    for (int i = 0; i < WARPS + BARRIERS; ++i) time[i] = i < WARPS ? now : phases;
    for (uint32_t &known : fenced) known = now;
    time[warp] = now + 1;
  }
  void join(const Clock &other) {
    for (int i = 0; i < WARPS + BARRIERS; ++i) time[i] = time[i] < other.time[i] ? other.time[i] : time[i];
    for (int i = 0; i < WARPS; ++i) fenced[i] = fenced[i] < other.fenced[i] ? other.fenced[i] : fenced[i];
  }
};

}  // namespace emu
