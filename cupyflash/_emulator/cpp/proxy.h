// Shared memory as the asynchronous proxy sees it: through it copies of the bulk engine and matrix products of a
// warpgroup reach shared memory. Plain stores are there after a fence.proxy.async. Internal to the runtime.
#pragma once
#include <cstdint>
#include <vector>

#include "shadow.h"

namespace emu {

struct Block;

class Proxy {
 public:
  static constexpr uint32_t CHUNK = 16;  // bytes that have one time

  Proxy() = default;
  explicit Proxy(size_t bytes) : view_(bytes), changed_((bytes + CHUNK - 1) / CHUNK) {}

  void clear();  // nothing was written

  // Of the chunk at an offset in shared memory: when what the proxy sees there changed last, 0 for never. Times pass at
  // every change and at every call of `now`, so that what changes later has a later time than the one that it returned.
  uint64_t changed(uint32_t offset) const { return changed_[offset / CHUNK]; }
  uint64_t now() { return time_++; }

  // The bytes at an offset, unchecked.
  const unsigned char *bytes(uint32_t offset) const { return view_.data() + offset; }

  void change(uint32_t offset, const unsigned char *from, uint32_t bytes);
  void set_unknown(uint32_t offset, uint32_t bytes);  // NaN, as a copy in flight leaves it
  void publish(const unsigned char *plain);           // all that plain stores have left in shared memory

 private:
  std::vector<unsigned char> view_;
  std::vector<uint64_t> changed_;
  uint64_t time_ = 1;

  void stamp(uint32_t offset, uint32_t bytes);
};

// The bytes that an instruction of the proxy reads from its issue on. Fails when they are out of bounds or not aligned,
// when a copy into them is in flight, when nothing was written there, and when a barrier or fence lacks between a
// write and this access (whose `proxy` is true): also after stores that the shadow has not seen.
const unsigned char *begin_proxy_read(uint32_t address, uint32_t bytes, uint32_t alignment, const Access &access);
// It has read them; until then nobody may write there. Of the warp that began, when it has waited.
void end_proxy_read(uint32_t address, uint32_t bytes, const Access &access);

// Copies reach global memory through the proxy too. Fails where the running thread knows by a number that it acquired
// what other blocks have written, and no fence brought that there.
void begin_proxy_access_of_global(const char *name, Loc loc);

}  // namespace emu
