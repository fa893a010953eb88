// The happens-before relation of instructions on shared memory, warp by warp: two accesses of which one writes must
// have a barrier between them.
#include "shadow.h"

#include <algorithm>

#include "state.h"

namespace emu {

namespace {

// A copy of fewer than 16 bytes writes some words of a chunk.
uint8_t words_of(uint32_t offset, int bytes) {
  return static_cast<uint8_t>(((1u << bytes / 4) - 1) << offset % 16 / 4);
}

bool known(const Warp &warp, int other, uint32_t time) { return time <= warp.clock.time[other]; }

}  // namespace

void Shadow::check_read_before(uint32_t chunk, const Warp &warp, const char *instruction, Loc loc) const {
  for (int other = 0; other < warps_; ++other)
    if (other != warp.number && !known(warp, other, reads_[chunk * warps_ + other]))
      fail(loc, "%s overwrites shared memory %+d, which warp %d has read, and no barrier stands between", instruction,
           chunk * 16, other);
}

void Shadow::begin_copy(uint32_t offset, int bytes, const Warp &warp, const char *instruction, Loc loc) {
  const uint32_t number = offset / 16;
  Chunk &chunk = chunks_[number];
  const uint8_t words = words_of(offset, bytes);
  if (chunk.in_flight & words)
    fail(loc, "%s overwrites shared memory %+d, into which another copy is in flight", instruction, offset);
  if (chunk.words & words && chunk.writer != warp.number && !known(warp, chunk.writer, chunk.written))
    fail(loc, "%s overwrites shared memory %+d, which warp %d has written, and no barrier stands between", instruction,
         offset, chunk.writer);
  check_read_before(number, warp, instruction, loc);
  chunk.in_flight |= words;
}

void Shadow::end_copy(uint32_t offset, int bytes, const Warp &warp) {
  Chunk &chunk = chunks_[offset / 16];
  const uint8_t words = words_of(offset, bytes);
  const uint32_t now = warp.clock.time[warp.number];
  const bool more = chunk.writer == warp.number && chunk.written == now;
  chunk.words = more ? chunk.words | words : words;
  chunk.writer = static_cast<uint8_t>(warp.number);
  chunk.written = now;
  chunk.in_flight &= ~words;
}

void Shadow::read(uint32_t offset, const Warp &warp, const char *instruction, Loc loc) {
  const uint32_t number = offset / 16;
  const Chunk &chunk = chunks_[number];
  if (chunk.in_flight) fail(loc, "%s reads shared memory %+d, into which a copy is in flight", instruction, offset);
  if (chunk.writer != warp.number && !known(warp, chunk.writer, chunk.written))
    fail(loc, "%s reads shared memory %+d, which warp %d has written, and no barrier stands between", instruction,
         offset, chunk.writer);
  reads_[number * warps_ + warp.number] = warp.clock.time[warp.number];
}

}  // namespace emu
