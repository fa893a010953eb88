// A phase ends when no arrival is pending and no byte is announced. Who waits for its end then knows what was known to
// all who arrived, and the copies that landed.
#include "mbarrier.h"

#include <algorithm>
#include <cstring>

#include "state.h"

namespace emu {

namespace {

constexpr uint32_t BYTES = 8, MAX_COUNT = (1u << 20) - 1;  // PTX ISA, "mbarrier", of arrivals and of bytes
constexpr uint64_t MARK = 0xfff8badbadba77e5;              // what the memory of a barrier holds: NaN

void end_if_complete(MBarrier &barrier) {
  if (barrier.pending || barrier.tx) return;
  const uint32_t parity = barrier.phase++ % 2;
  ++barrier.ended;
  barrier.pending = barrier.arrivals;
  barrier.phases.pass();
  barrier.released = barrier.arrived;
  barrier.released.time[Clock::WARPS + barrier.number] = barrier.ended;
  wake(barrier.waiters[parity]);
}

void arrive(uint32_t address, uint32_t bytes, const char *name, Loc loc) {
  MBarrier &barrier = find_barrier(address, name, loc);
  Warp &warp = *machine.thread->warp;
  if (bytes > MAX_COUNT || barrier.tx + bytes > MAX_COUNT)
    fail(loc, "%s announces %u bytes to %s, %s: a barrier counts to %u", name, bytes, barrier.name().c_str(),
         barrier.counts().c_str(), MAX_COUNT);
  if (barrier.pending == 0)
    fail(loc, "%s at %s: more arrivals than its %d in one phase, %s", name, barrier.name().c_str(), barrier.arrivals,
         barrier.counts().c_str());
  barrier.tx += bytes;
  --barrier.pending;
  barrier.arrived.join(warp.clock);
  barrier.phases.come();
  ++warp.clock.time[warp.number];
  end_if_complete(barrier);
}

}  // namespace

std::string MBarrier::name() const {
  return format("the mbarrier at %+ld (made at %s)", static_cast<long>(offset), place(made_at).c_str());
}

std::string MBarrier::counts() const {
  return format("phase %u, pending arrivals %d of %d, tx bytes %lld", phase, pending, arrivals,
                static_cast<long long>(tx));
}

std::string MBarrier::Waiters::state() const {
  const auto parity = static_cast<int>(this - barrier->waiters);
  return format("parity %d of %s; %s", parity, barrier->name().c_str(), barrier->counts().c_str());
}

void MBarriers::clear() {
  for (const auto &[offset, barrier] : made) ended = std::max(ended, barrier.ended);
  made.clear();
}

MBarrier &find_barrier(uint32_t address, const char *instruction, Loc loc) {
  Block &block = *machine.block;
  const unsigned char *memory = block.shared.at(address, BYTES, BYTES, instruction, loc);
  const uint32_t offset = address - Shared::BASE;
  const auto found = block.mbarriers.made.find(offset);
  if (found == block.mbarriers.made.end())
    fail(loc, "%s at shared memory %+ld, which is no mbarrier: used before its init", instruction,
         static_cast<long>(offset));
  block.shadow.read(offset, BYTES, {*machine.thread, instruction, loc});
  if (memcmp(memory, &MARK, BYTES)) fail(loc, "%s: %s was overwritten", instruction, found->second.name().c_str());
  return found->second;
}

void complete_tx(MBarrier &barrier, uint32_t bytes) {
  barrier.tx -= bytes;
  barrier.copied = barrier.phase + 1;
  end_if_complete(barrier);
}

void mbarrier_init(uint32_t address, uint32_t arrivals, Loc loc) {
  constexpr const char *NAME = "mbarrier.init";
  Block &block = *machine.block;
  const Thread &self = *machine.thread;
  unsigned char *memory = block.shared.at(address, BYTES, BYTES, NAME, loc);
  const uint32_t offset = address - Shared::BASE;
  if (arrivals < 1 || arrivals > MAX_COUNT) fail(loc, "%s with %u arrivals: from 1 to %u", NAME, arrivals, MAX_COUNT);
  auto &made = block.mbarriers.made;
  if (const auto found = made.find(offset); found != made.end())
    fail(loc, "%s: %s was made before", NAME, found->second.name().c_str());
  if (made.size() == Clock::BARRIERS) fail(loc, "%s: the emulator has %d of a block", NAME, Clock::BARRIERS);
  block.shadow.write(offset, BYTES, {self, NAME, loc});
  memcpy(memory, &MARK, BYTES);
  MBarrier &barrier = made[offset];
  barrier.offset = offset;
  barrier.number = static_cast<int>(made.size()) - 1;
  barrier.arrivals = barrier.pending = static_cast<int>(arrivals);
  barrier.made_at = loc;
  barrier.maker = self.number;
  barrier.ended = block.mbarriers.ended;
  for (auto &waiters : barrier.waiters) waiters.barrier = &barrier;
}

void mbarrier_fence_init() {
  for (auto &[offset, barrier] : machine.block->mbarriers.made)
    if (barrier.maker == machine.thread->number) barrier.fenced = true;
}

void mbarrier_arrive(uint32_t address, Loc loc) { arrive(address, 0, "mbarrier.arrive", loc); }

void mbarrier_arrive_expect_tx(uint32_t address, uint32_t bytes, Loc loc) {
  arrive(address, bytes, "mbarrier.arrive.expect_tx", loc);
}

void mbarrier_wait(uint32_t address, uint32_t parity, Loc loc) {
  constexpr const char *NAME = "mbarrier.wait";
  MBarrier &barrier = find_barrier(address, NAME, loc);
  if (parity > 1) fail(loc, "%s with parity %u: 0 or 1", NAME, parity);
  while (barrier.phase % 2 == parity) {
    const uint32_t awaited = barrier.phase;
    wait_for(barrier.waiters[parity], loc);
    if (barrier.phase % 2 == parity)
      fail(loc, "%s for phase %u of %s: the phase after it has ended too, before this thread looked", NAME, awaited,
           barrier.name().c_str());
  }
  barrier.known = barrier.phase;
  machine.thread->warp->clock.join(barrier.released);
  tsan::acquire(barrier.phases.of(parity));
}

}  // namespace emu
