// The happens-before relation of accesses to shared memory: two of different threads, of which one writes, must have a
// barrier between them. Lanes of a warp are ordered by barriers of the warp or the block, warps by those of the block.
#include "shadow.h"

#include <algorithm>

#include "state.h"

namespace emu {

namespace {

// f(word, mask of bytes) for the words of a range.
template <class F>
void each_word(uint32_t offset, uint32_t bytes, F f) {
  for (uint32_t at = offset, end = offset + bytes; at < end;) {
    const uint32_t next = std::min(at / 4 * 4 + 4, end);
    f(at / 4, static_cast<uint8_t>(((1u << (next - at)) - 1) << at % 4));
    at = next;
  }
}

// Whether what `lane` of a warp did at a time came before this access, by barriers.
bool ordered(const Access &access, int warp, int lane, uint32_t time) {
  const Thread &self = access.thread;
  if (warp != self.warp->number) return time <= self.warp->clock.time[warp];
  return time < self.warp->clock.time[warp] || (!access.whole_warp && lane == self.number % 32);
}

[[noreturn]] void race(const Access &access, const char *verb, size_t word, const char *other, const char *deed) {
  fail(access.loc, "%s %s shared memory %+zd, which %s has %s, and no barrier stands between", access.name, verb,
       static_cast<ssize_t>(word * 4), other, deed);
}

}  // namespace

void Shadow::check_after_write(size_t number, uint8_t bytes, const Access &access, const char *verb) const {
  const Word &word = words_[number];
  if (word.in_flight)
    fail(access.loc, "%s %s shared memory %+zd, into which a copy is in flight", access.name, verb,
         static_cast<ssize_t>(number * 4));
  if (word.bytes & bytes && !ordered(access, word.writer / 32, word.writer % 32, word.time))
    race(access, verb, number, format("thread %d", word.writer).c_str(), "written");
}

void Shadow::check_after_reads(size_t number, uint8_t bytes, const Access &access) const {
  for (int warp = 0; warp < warps_; ++warp) {
    const Read &read = reads_[static_cast<size_t>(warp) * words_.size() + number];
    if (!(read.bytes & bytes) || ordered(access, warp, read.lane, read.time)) continue;
    const bool many = read.lane == MANY;
    race(access, "overwrites", number,
         format(many ? "warp %d" : "thread %d", many ? warp : warp * 32 + read.lane).c_str(), "read");
  }
}

void Shadow::set_written(size_t number, uint8_t bytes, const Access &access) {
  const Thread &self = access.thread;
  Word &word = words_[number];
  const uint32_t now = self.warp->clock.time[self.warp->number];
  const bool more = word.writer == self.number && word.time == now;
  word = {now, static_cast<uint16_t>(self.number), static_cast<uint8_t>(more ? word.bytes | bytes : bytes), false};
}

void Shadow::read(uint32_t offset, uint32_t bytes, const Access &access) {
  const Warp &warp = *access.thread.warp;
  const uint32_t now = warp.clock.time[warp.number];
  const uint8_t lane = access.whole_warp ? MANY : access.thread.number % 32;
  each_word(offset, bytes, [&](size_t number, uint8_t mask) {
    check_after_write(number, mask, access, "reads");
    Read &read = reads_[static_cast<size_t>(warp.number) * words_.size() + number];
    const bool more = read.bytes && read.time == now;
    read = {now, more && read.lane != lane ? MANY : lane, static_cast<uint8_t>(more ? read.bytes | mask : mask)};
  });
}

void Shadow::write(uint32_t offset, uint32_t bytes, const Access &access) {
  each_word(offset, bytes, [&](size_t number, uint8_t mask) {
    check_after_write(number, mask, access, "overwrites");
    check_after_reads(number, mask, access);
    set_written(number, mask, access);
  });
}

void Shadow::begin_copy(uint32_t offset, uint32_t bytes, const Access &access) {
  each_word(offset, bytes, [&](size_t number, uint8_t mask) {
    check_after_write(number, mask, access, "overwrites");
    check_after_reads(number, mask, access);
    words_[number].in_flight = true;
  });
}

void Shadow::end_copy(uint32_t offset, uint32_t bytes, const Access &access) {
  each_word(offset, bytes, [&](size_t number, uint8_t mask) { set_written(number, mask, access); });
}

}  // namespace emu
