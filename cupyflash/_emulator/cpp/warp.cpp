// What a warp's lanes do together, and the block's barrier.
#include <algorithm>
#include <cstring>

#include "state.h"

namespace emu {

namespace {

void check_meeting(const Meeting &meeting, const Warp &warp, const Instruction &instruction, Loc loc, uint32_t mask) {
  const Lanes &lanes = meeting.lanes;
  const int number = warp.number;
  if (meeting.present == 0) {
    if (warp.exited & mask)
      fail(loc, "%s: lanes %08x of warp %d have exited", instruction.name, warp.exited & mask, number);
    return;
  }
  if (meeting.instruction != &instruction)
    fail(loc, "%s, while other lanes of warp %d are at %s", instruction.name, number, meeting.state().c_str());
  if (!same(lanes.loc, loc))
    fail(loc, "%s, while other lanes of warp %d are at another one: %s", instruction.name, number,
         meeting.state().c_str());
  if (lanes.mask != mask)
    fail(loc, "%s with mask %08x, while other lanes of warp %d gave %08x", instruction.name, mask, number, lanes.mask);
}

void shuffle(Lanes &lanes) {
  ++machine.stats.shuffles;
  uint32_t values[32];
  for (uint32_t lane = 0; lane < 32; ++lane)
    if (lanes.operands[lane]) values[lane] = lanes.of<Shuffle>(lane).value;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if (!lanes.operands[lane]) continue;
    Shuffle &mine = lanes.of<Shuffle>(lane);
    if (mine.source >= 32 || !(lanes.mask >> mine.source & 1))
      fail(lanes.loc, "shuffle: lane %u reads lane %u, which does not take part", lane, mine.source);
    mine.value = values[mine.source];
  }
}

void vote(Lanes &lanes) {
  ++machine.stats.shuffles;
  bool any = false;
  for (uint32_t lane = 0; lane < 32; ++lane)
    if (lanes.operands[lane]) any |= lanes.of<Vote>(lane).mine;
  for (uint32_t lane = 0; lane < 32; ++lane)
    if (lanes.operands[lane]) lanes.of<Vote>(lane).any = any;
}

void sync(Lanes &) { machine.thread->warp->sync(); }

// Everybody has come: what they did so far is known to all.
void release(Block &block) {
  Barrier &barrier = block.barrier;
  ++machine.stats.barriers;
  for (const auto &warp : block.warps) barrier.clock.join(warp->clock);
  for (const auto &warp : block.warps) {
    warp->clock.join(barrier.clock);
    warp->sync();
  }
  barrier.arrived = 0;
  barrier.phases.pass();
  wake(barrier);
}

}  // namespace

const Instruction SYNC{"warp barrier", sync}, SHUFFLE{"shuffle", shuffle}, VOTE{"vote", vote};

std::string Meeting::state() const {
  return format("%s at %s, lanes %08x of %08x have come", instruction->name, place(lanes.loc).c_str(), present,
                lanes.mask);
}

void together(const Instruction &instruction, void *operands, Loc loc, uint32_t mask) {
  Thread &self = *machine.thread;
  Warp &warp = *self.warp;
  Meeting &meeting = warp.meeting;
  const uint32_t lane = self.number % 32;
  if (!(mask >> lane & 1)) fail(loc, "%s: lane %u is not in its own mask %08x", instruction.name, lane, mask);
  check_meeting(meeting, warp, instruction, loc, mask);
  if (meeting.present == 0) {
    meeting.instruction = &instruction;
    meeting.lanes = {{}, mask, loc, __builtin_return_address(0)};
  }
  meeting.lanes.operands[lane] = operands;
  meeting.present |= 1u << lane;
  const void *phase = &instruction == &SYNC ? meeting.phases.come() : nullptr;  // no other one orders memory
  if (meeting.present != mask) {
    wait_for(meeting, loc);
  } else {
    instruction.run(meeting.lanes);
    meeting.present = 0;
    meeting.phases.pass();
    wake(meeting);
  }
  if (phase) tsan::acquire(phase);
}

uint32_t lane() { return machine.thread->number % 32; }

std::string Barrier::state() const {
  return format("barrier, %d of %d threads have arrived", arrived, machine.block->alive);
}

void block_barrier(Loc loc) {
  Block &block = *machine.block;
  Barrier &barrier = block.barrier;
  if (barrier.arrived == 0) barrier.loc = loc;
  if (!same(barrier.loc, loc))
    fail(loc, "barrier, while other threads are at the barrier of %s", place(barrier.loc).c_str());
  const void *phase = barrier.phases.come();
  if (++barrier.arrived < block.alive) {
    wait_for(barrier, loc);
  } else {
    release(block);
  }
  tsan::acquire(phase);
  refill_below();
}

void leave_warp() {
  const Thread &self = *machine.thread;
  Warp &warp = *self.warp;
  const uint32_t bit = 1u << self.number % 32;
  warp.exited |= bit;
  const Meeting &meeting = warp.meeting;
  if (meeting.present && meeting.lanes.mask & bit)
    fail(meeting.lanes.loc, "exited, while other lanes of warp %d are at %s", warp.number, meeting.state().c_str());
}

void leave_barrier() {
  Block &block = *machine.block;
  if (block.alive && block.barrier.arrived == block.alive) release(block);
}

}  // namespace emu
