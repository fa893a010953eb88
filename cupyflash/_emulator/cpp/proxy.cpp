// The second view of shared memory, and the fence that brings plain stores into it. The values are coarse: a fence of
// any thread publishes all. Whether it was the right thread's is known to the shadow.
#include "proxy.h"

#include <algorithm>
#include <cstring>

#include "state.h"

namespace emu {

void Proxy::clear() {
  std::fill(view_.begin(), view_.end(), NAN_BYTE);
  std::fill(changed_.begin(), changed_.end(), 0);
}

void Proxy::stamp(uint32_t offset, uint32_t bytes) {
  const uint64_t time = time_++;
  for (uint32_t chunk = offset / CHUNK; chunk * CHUNK < offset + bytes; ++chunk) changed_[chunk] = time;
}

void Proxy::change(uint32_t offset, const unsigned char *from, uint32_t bytes) {
  memcpy(view_.data() + offset, from, bytes);
  stamp(offset, bytes);
}

void Proxy::set_unknown(uint32_t offset, uint32_t bytes) {
  memset(view_.data() + offset, NAN_BYTE, bytes);
  stamp(offset, bytes);
}

void Proxy::publish(const unsigned char *plain) {
  constexpr size_t STEP = 1024;
  for (size_t begin = 0; begin < view_.size(); begin += STEP) {
    const size_t end = std::min(begin + STEP, view_.size());
    if (!memcmp(plain + begin, view_.data() + begin, end - begin)) continue;
    for (size_t at = begin; at < end; at += CHUNK) {
      const auto bytes = static_cast<uint32_t>(std::min<size_t>(CHUNK, end - at));
      if (memcmp(plain + at, view_.data() + at, bytes)) change(static_cast<uint32_t>(at), plain + at, bytes);
    }
  }
}

const unsigned char *begin_proxy_read(uint32_t address, uint32_t bytes, uint32_t alignment, const Access &access) {
  Block &block = *machine.block;
  block.shared.at(address, bytes, alignment, access.name, access.loc);
  const uint32_t offset = address - Shared::BASE;
  block.shadow.begin_read(offset, bytes, access);
  const unsigned char *seen = block.proxy.bytes(offset), *plain = block.shared.memory.begin() + offset;
  if (memcmp(seen, plain, bytes))
    fail(access.loc, "%s reads shared memory %+ld, which was stored to, and no fence.proxy.async stands between",
         access.name, static_cast<long>(std::mismatch(seen, seen + bytes, plain).first - seen + offset));
  for (uint32_t at = offset / Proxy::CHUNK * Proxy::CHUNK; at < offset + bytes; at += Proxy::CHUNK)
    if (!block.proxy.changed(at))
      fail(access.loc, "%s reads shared memory %+ld, which nobody wrote", access.name, static_cast<long>(at));
  return seen;
}

void end_proxy_read(uint32_t address, uint32_t bytes, const Access &access) {
  machine.block->shadow.end_read(address - Shared::BASE, bytes, access);
}

void fence_proxy() {
  Thread &self = *machine.thread;
  machine.block->proxy.publish(machine.block->shared.memory.begin());
  ++self.fences;
  const Warp &warp = *self.warp;
  Clock known = warp.clock;
  known.time[warp.number] = warp.synced;  // of the other lanes
  std::copy_n(known.time, Clock::WARPS, known.fenced);
  self.warp->clock.join(known);
}

void fence_proxy_global() { machine.thread->acquired = {}; }

void begin_proxy_access_of_global(const char *name, Loc loc) {
  const Loc &acquired = machine.thread->acquired;
  if (acquired.line)
    fail(loc, "%s: no fence.proxy.async.global has followed what this thread acquired at %s:%d", name, acquired.file,
         acquired.line);
}

}  // namespace emu
