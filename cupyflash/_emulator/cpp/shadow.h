// Who wrote and who read each 16 bytes of shared memory, and whether a barrier stands between: finds a missing barrier
// also when the threads happened to run in an order that hides it. Instructions are seen, plain accesses are not.
// Internal to the runtime.
#pragma once
#include <cstdint>
#include <vector>

#include "runtime.h"

namespace emu {

struct Warp;

// Vector clocks (Lamport, Mattern): entry w of a warp's clock is the time of warp w up to which it knows everything
// that w did. Times go on from block to block, so that nothing of an earlier block is ever new.
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

class Shadow {
 public:
  Shadow() = default;
  Shadow(size_t bytes, int warps)
      : chunks_((bytes + 15) / 16), reads_(chunks_.size() * static_cast<size_t>(warps)), warps_(warps) {}

  // The bytes at an offset are about to be overwritten by a copy in flight; have been; are read.
  void begin_copy(uint32_t offset, int bytes, const Warp &warp, const char *instruction, Loc loc);
  void end_copy(uint32_t offset, int bytes, const Warp &warp);
  void read(uint32_t offset, const Warp &warp, const char *instruction, Loc loc);  // 16 bytes

 private:
  struct Chunk {
    uint32_t written = 0;  // when, by the clock of `writer`
    uint8_t writer = 0;
    uint8_t words = 0;      // of 4 bytes, a bit each, that it wrote
    uint8_t in_flight = 0;  // words that copies will write
  };
  std::vector<Chunk> chunks_;
  std::vector<uint32_t> reads_;  // [chunk][warp]: when the warp last read it
  int warps_ = 0;

  void check_read_before(uint32_t chunk, const Warp &warp, const char *instruction, Loc loc) const;
};

}  // namespace emu
