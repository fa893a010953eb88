// The happens-before relation of accesses to shared memory: two of different threads, of which one writes, must have a
// barrier between them. Lanes of a warp are ordered by barriers of the warp or the block, warps by those of the block,
// copies and those who use them by the barriers that the copies arrive on.
#include "shadow.h"

#include <algorithm>

#include "state.h"

namespace emu {

namespace {

// f(word, mask of bytes) for the words of a range.
template <class F>
void each_word(uint32_t offset, uint32_t bytes, F f) {
  if (tsan::present()) return;  // looks in our place
  for (uint32_t at = offset, end = offset + bytes; at < end;) {
    const uint32_t next = std::min(at / 4 * 4 + 4, end);
    f(at / 4, static_cast<uint8_t>(((1u << (next - at)) - 1) << at % 4));
    at = next;
  }
}

[[noreturn]] void race(const Access &access, const char *verb, size_t word, const std::string &deed,
                       const char *lacking = "no barrier stands between") {
  fail(access.loc, "%s %s shared memory %+zd, which %s, and %s", access.name, verb, static_cast<ssize_t>(word * 4),
       deed.c_str(), lacking);
}

}  // namespace

// Whether what `lane` of a warp did at a time came before this access.
bool Shadow::ordered(const Access &access, int warp, int lane, uint32_t time) {
  const Thread &self = access.thread;
  if (time == IN_FLIGHT) return false;
  if (warp != self.warp->number) return time <= self.warp->clock.time[warp];
  return time <= self.warp->synced || lane == ALL || (!access.whole_warp && lane == self.number % 32);
}

// Whether a plain store, which came before, is seen by the asynchronous proxy: its thread has fenced since, or one that
// knew of the store has before this access.
bool Shadow::fenced(const Access &access, const Word &word) {
  if (word.writer >= COPY || !word.bytes) return true;
  const Thread &writer = *machine.block->threads[word.writer];
  return writer.fences > word.fences || word.time <= access.thread.warp->clock.fenced[writer.warp->number];
}

Shadow::Read &Shadow::read_by(const Warp &warp, size_t word) {
  return reads_[static_cast<size_t>(warp.number) * words_.size() + word];
}

void Shadow::check_after_write(size_t number, uint8_t bytes, const Access &access, const char *verb) const {
  const Word &word = words_[number];
  if (word.in_flight)
    fail(access.loc, "%s %s shared memory %+zd, into which a copy is in flight", access.name, verb,
         static_cast<ssize_t>(number * 4));
  if (!(word.bytes & bytes)) return;
  if (word.writer >= COPY) {
    if (word.time > access.thread.warp->clock.time[Clock::WARPS + word.writer - COPY])
      race(access, verb, number, "a copy has written", "its barrier was not waited for");
    return;
  }
  if (!ordered(access, word.writer / 32, word.writer % 32, word.time))
    race(access, verb, number, format("thread %d has written", word.writer));
  if (access.proxy && !fenced(access, word))
    race(access, verb, number, format("thread %d has written", word.writer), "no fence.proxy.async stands between");
}

void Shadow::check_after_reads(size_t number, uint8_t bytes, const Access &access) const {
  for (int warp = 0; warp < warps_; ++warp) {
    const Read &read = reads_[static_cast<size_t>(warp) * words_.size() + number];
    if (!(read.bytes & bytes) || ordered(access, warp, read.lane, read.time)) continue;
    if (read.time == IN_FLIGHT)
      fail(access.loc, "%s overwrites shared memory %+zd, which an instruction of warp %d in flight reads", access.name,
           static_cast<ssize_t>(number * 4), warp);
    const bool many = read.lane >= MANY;
    race(access, "overwrites", number,
         format(many ? "warp %d has read" : "thread %d has read", many ? warp : warp * 32 + read.lane));
  }
}

void Shadow::set_written(size_t number, uint8_t bytes, const Access &access) {
  const Thread &self = access.thread;
  Word &word = words_[number];
  const uint32_t now = self.warp->clock.time[self.warp->number];
  const bool more = word.writer == self.number && word.time == now;
  word = {now, self.fences, static_cast<uint16_t>(self.number), static_cast<uint8_t>(more ? word.bytes | bytes : bytes),
          false};
}

uint8_t Shadow::lane_of(const Access &access) {
  return access.whole_warp ? MANY : static_cast<uint8_t>(access.thread.number % 32);
}

void Shadow::set_read(size_t number, uint8_t bytes, const Access &access, uint32_t time, uint8_t lane) {
  Read &read = read_by(*access.thread.warp, number);
  const bool more = read.bytes && read.time == time;
  read = {time, more && read.lane != lane ? MANY : lane, static_cast<uint8_t>(more ? read.bytes | bytes : bytes)};
}

void Shadow::read(uint32_t offset, uint32_t bytes, const Access &access) {
  const Warp &warp = *access.thread.warp;
  each_word(offset, bytes, [&](size_t number, uint8_t mask) {
    check_after_write(number, mask, access, "reads");
    if (read_by(warp, number).time != IN_FLIGHT)
      set_read(number, mask, access, warp.clock.time[warp.number], lane_of(access));
  });
}

void Shadow::begin_read(uint32_t offset, uint32_t bytes, const Access &access) {
  const Word *last = nullptr;  // the word before: what was written together needs one look
  each_word(offset, bytes, [&](size_t number, uint8_t mask) {
    const Word &word = words_[number];
    if (!last || word != *last) check_after_write(number, mask, access, "reads");
    last = &word;
    set_read(number, mask, access, IN_FLIGHT, lane_of(access));
  });
}

void Shadow::end_read(uint32_t offset, uint32_t bytes, const Access &access) {
  const uint32_t now = access.thread.warp->clock.time[access.thread.warp->number];
  const uint8_t lane = access.whole_warp ? ALL : lane_of(access);
  each_word(offset, bytes, [&](size_t number, uint8_t mask) { set_read(number, mask, access, now, lane); });
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

void Shadow::end_copy(uint32_t offset, uint32_t bytes, int barrier, uint32_t phase) {
  each_word(offset, bytes, [&](size_t number, uint8_t mask) {
    words_[number] = {phase, 0, static_cast<uint16_t>(COPY + barrier), mask, false};
  });
}

}  // namespace emu
