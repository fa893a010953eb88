// Who wrote and who read each word of shared memory, and whether a barrier stands between: finds a missing barrier also
// when the threads happened to run in an order that hides it. Plain accesses are seen in units that are compiled with
// watched accesses (accesses.cpp), instructions in all. Internal to the runtime.
#pragma once
#include <cstdint>
#include <vector>

#include "runtime.h"

namespace emu {

struct Thread;
struct Warp;

// Vector clocks: entry w of a warp's clock is the time of warp w up to which it knows everything
// that w did. A warp's own time passes at every barrier of the warp or the block. Times go on from block to block, so
// that nothing of an earlier block is ever new.
struct Clock {
  static constexpr int WARPS = 32;
  uint32_t time[WARPS] = {};

  // Of a warp that knows all that happened up to `now`, and whose next deeds are later.
  void start(uint32_t now, int warp) {
    for (uint32_t &t : time) t = now;
    time[warp] = now + 1;
  }
  void join(const Clock &other) {
    for (int w = 0; w < WARPS; ++w) time[w] = time[w] < other.time[w] ? other.time[w] : time[w];
  }
};

// An access of a thread, or of all lanes of its warp together.
struct Access {
  const Thread &thread;
  const char *name;  // "ldmatrix"
  Loc loc;
  bool whole_warp = false;
};

// Offsets are in shared memory, sizes in bytes.
class Shadow {
 public:
  Shadow() = default;
  Shadow(size_t bytes, int warps)
      : words_((bytes + 3) / 4), reads_(words_.size() * static_cast<size_t>(warps)), warps_(warps) {}

  void read(uint32_t offset, uint32_t bytes, const Access &access);
  void write(uint32_t offset, uint32_t bytes, const Access &access);
  // A copy of whole words overwrites from its issue until its thread has waited for it.
  void begin_copy(uint32_t offset, uint32_t bytes, const Access &access);
  void end_copy(uint32_t offset, uint32_t bytes, const Access &access);

 private:
  struct Word {
    uint32_t time = 0;  // of the last write, by the clock of the writer's warp
    uint16_t writer = 0;
    uint8_t bytes = 0;  // that it wrote, a bit each
    bool in_flight = false;
  };
  struct Read {
    uint32_t time = 0;
    uint8_t lane = 0;  // or MANY
    uint8_t bytes = 0;
  };
  static constexpr uint8_t MANY = 32;

  std::vector<Word> words_;
  std::vector<Read> reads_;  // [warp][word]: the warp's last
  int warps_ = 0;

  void check_after_write(size_t word, uint8_t bytes, const Access &access, const char *verb) const;
  void check_after_reads(size_t word, uint8_t bytes, const Access &access) const;
  void set_written(size_t word, uint8_t bytes, const Access &access);
};

}  // namespace emu
