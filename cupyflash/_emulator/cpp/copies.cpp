// cp.async: a copy is in flight from its issue until its thread has waited for it, whenever its bytes land. Until they
// do the destination holds NaN.
#include <algorithm>
#include <cstring>

#include "state.h"

namespace emu {

namespace {

constexpr const char *NAME = "cp.async";

void land(Copy &copy, const Thread &thread) {
  Block &block = *machine.block;
  unsigned char *to = block.shared.memory.begin() + (copy.shared - Shared::BASE);
  for (int i = 0; i < copy.bytes; ++i)
    if (to[i] != NAN_BYTE)
      fail_for(thread, copy.loc,
               format("%s: shared memory %+ld was written while this copy into it was in flight", NAME,
                      static_cast<long>(to + i - block.shared.memory.begin())));
  if (copy.present) {
    memcpy(to, copy.global, copy.bytes);
  } else {
    memset(to, 0, copy.bytes);
  }
  copy.landed = true;
}

// For ThreadSanitizer: copies are deeds of a fiber that learns what their thread knows at each issue, and of whose
// groups the thread learns by waiting for them.
void touch(Copies &copies, const unsigned char *to, const void *from, int bytes, const void *counter) {
  copies.fiber.begin();
  const tsan::As as(copies.fiber);
  if (from) tsan::read(from, bytes, counter);
  tsan::write(to, bytes, counter);
}

void end_group(Copies &copies) {
  const tsan::As as(copies.fiber);
  tsan::release(&copies.written[copies.committed % Copies::GROUPS]);
}

}  // namespace

void copy_async(uint32_t shared, const void *global, int bytes, bool present, Loc loc) {
  Thread &self = *machine.thread;
  Block &block = *machine.block;
  unsigned char *to = block.shared.at(shared, bytes, bytes, NAME, loc);
  if (present) check_global(global, bytes, NAME, loc);
  block.shadow.begin_copy(shared - Shared::BASE, bytes, {self, NAME, loc});
  if (tsan::present()) touch(self.copies, to, present ? global : nullptr, bytes, __builtin_return_address(0));
  memset(to, NAN_BYTE, bytes);
  ++machine.stats.cp_async;
  machine.stats.tiles_loaded_bytes += bytes;
  if (present) machine.stats.global_read_bytes += bytes;

  Copy copy{shared, global, bytes, present, false, self.copies.committed, loc};
  if (machine.pace == Pace::EAGER || (machine.pace == Pace::RANDOM && machine.random.below(2))) land(copy, self);
  self.copies.in_flight.push_back(copy);
}

void copy_commit() {
  Copies &copies = machine.thread->copies;
  end_group(copies);
  ++copies.committed;
}

void copy_wait(int pending, Loc loc) {
  Thread &self = *machine.thread;
  Copies &copies = self.copies;
  copies.awaited = pending == ALL ? copies.committed + 1 : copies.committed - pending;
  const auto end = std::find_if(copies.in_flight.begin(), copies.in_flight.end(),
                                [&](const Copy &copy) { return copy.group >= copies.awaited; });
  if (std::any_of(copies.in_flight.begin(), end, [](const Copy &copy) { return !copy.landed; })) {
    submit(copies);
    wait_for(copies, loc);
  }
  for (auto copy = copies.in_flight.begin(); copy != end; ++copy)
    machine.block->shadow.end_copy(copy->shared - Shared::BASE, copy->bytes, {self, NAME, loc});
  copies.in_flight.erase(copies.in_flight.begin(), end);
  if (pending == ALL) end_group(copies);
  for (; copies.known < copies.awaited; ++copies.known) tsan::acquire(&copies.written[copies.known % Copies::GROUPS]);
  copies.known = std::min(copies.known, copies.committed);  // the open group may get more
}

std::string Copies::state() const {
  return format("cp.async, %zu copies in flight, %d groups committed", in_flight.size(), committed);
}

// The awaited copies land, in any order.
void Copies::run() {
  std::vector<Copy *> awaited_copies;
  for (Copy &copy : in_flight)
    if (copy.group < awaited && !copy.landed) awaited_copies.push_back(&copy);
  while (!awaited_copies.empty()) {
    std::swap(awaited_copies[machine.random.below(awaited_copies.size())], awaited_copies.back());
    land(*awaited_copies.back(), *thread);
    awaited_copies.pop_back();
  }
  wake(*this);
}

void leave_copies() {
  const Thread &self = *machine.thread;
  if (self.copies.in_flight.empty()) return;
  fail(self.copies.in_flight.front().loc, "exited with %zu %s in flight, of which this is the first",
       self.copies.in_flight.size(), NAME);
}

}  // namespace emu
