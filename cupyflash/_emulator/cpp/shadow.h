// Who wrote and who read each word of shared memory, and whether a barrier stands between: finds a missing barrier also
// when the threads happened to run in an order that hides it. Plain accesses are seen in units that are compiled with
// watched accesses (accesses.cpp), instructions in all. Internal to the runtime.
#pragma once
#include <cstdint>
#include <vector>

#include "clock.h"
#include "runtime.h"

namespace emu {

struct Thread;
struct Warp;

// An access of a thread, or of all lanes of its warp together.
struct Access {
  const Thread &thread;
  const char *name;  // "ldmatrix"
  Loc loc;
  bool whole_warp = false;
  bool proxy = false;  // the asynchronous proxy's: plain stores before it need a fence
};

// Offsets are in shared memory, sizes in bytes.
class Shadow {
 public:
  Shadow() = default;
  Shadow(size_t bytes, int warps)
      : words_((bytes + 3) / 4), reads_(words_.size() * static_cast<size_t>(warps)), warps_(warps) {}

  void read(uint32_t offset, uint32_t bytes, const Access &access);
  void write(uint32_t offset, uint32_t bytes, const Access &access);
  // Whole words are overwritten from the issue of a copy until its thread has waited for it, or until it arrives on a
  // barrier: those who waited for that phase know of it.
  void begin_copy(uint32_t offset, uint32_t bytes, const Access &access);
  void end_copy(uint32_t offset, uint32_t bytes, const Access &access);
  void end_copy(uint32_t offset, uint32_t bytes, int barrier, uint32_t phase);
  // They are read from the issue of an instruction until its thread, or all of its warp together, has waited for it.
  void begin_read(uint32_t offset, uint32_t bytes, const Access &access);
  void end_read(uint32_t offset, uint32_t bytes, const Access &access);

 private:
  // Of the last write.
  struct Word {
    uint32_t time = 0;    // by the clock of the writer's warp, or a barrier's phase
    uint32_t fences = 0;  // of the writer before
    uint16_t writer = 0;  // thread, or COPY + barrier
    uint8_t bytes = 0;    // a bit each
    bool in_flight = false;

    bool operator==(const Word &) const = default;
  };
  struct Read {
    uint32_t time = 0;  // or IN_FLIGHT
    uint8_t lane = 0;   // or MANY, or ALL: every lane knows
    uint8_t bytes = 0;
  };
  static constexpr uint8_t MANY = 32, ALL = 33;
  static constexpr uint16_t COPY = 1024;
  static constexpr uint32_t IN_FLIGHT = ~0u;

  std::vector<Word> words_;
  std::vector<Read> reads_;  // [warp][word]: the warp's last
  int warps_ = 0;

  Read &read_by(const Warp &warp, size_t word);
  static bool ordered(const Access &access, int warp, int lane, uint32_t time);
  static bool fenced(const Access &access, const Word &word);
  void check_after_write(size_t word, uint8_t bytes, const Access &access, const char *verb) const;
  void check_after_reads(size_t word, uint8_t bytes, const Access &access) const;
  void set_written(size_t word, uint8_t bytes, const Access &access);
  void set_read(size_t word, uint8_t bytes, const Access &access, uint32_t time, uint8_t lane);
  static uint8_t lane_of(const Access &access);
};

}  // namespace emu
