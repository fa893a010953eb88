// Memory that a kernel may touch, and the proof that it touched no other: pages that fault on both sides, canaries in
// what is left of a page. Internal to the runtime.
#pragma once
#include <stddef.h>

#include <cstdint>
#include <string>

#include "runtime.h"

namespace emu {

constexpr size_t PAGE = 4096;
constexpr unsigned char NAN_BYTE = 0xff;     // NaN in every float type
constexpr unsigned char CANARY_BYTE = 0xfd;  // NaN too

// Pages of which the first and the last fault; the bytes in use end where the last begins.
class Guarded {
 public:
  Guarded() = default;
  explicit Guarded(size_t bytes, size_t alignment = 16);
  Guarded(Guarded &&other) noexcept;
  Guarded &operator=(Guarded &&other) noexcept;
  ~Guarded();

  unsigned char *begin() const { return begin_; }
  size_t bytes() const { return bytes_; }
  bool holds(const void *address, size_t count = 1) const;
  bool reaches(const void *address) const;  // in the memory, its canaries or its guard pages
  // Whether something was written beside the memory, and at which offset.
  bool trampled(ptrdiff_t &offset) const;

 private:
  unsigned char *pages_ = nullptr, *begin_ = nullptr;
  size_t span_ = 0, bytes_ = 0;  // span: with the guards

  void swap(Guarded &other) noexcept;
};

// A block's shared memory. Its addresses begin at BASE, so that an offset is no address.
struct Shared {
  static constexpr uint32_t BASE = 1024;
  Guarded memory;

  // The memory at an address of the shared window.
  unsigned char *at(uint32_t address, size_t bytes, size_t alignment, const char *instruction, Loc loc) const;
};

// What a kernel reads beside its memory: its Params, and what is constant in its unit and in the runtime.
class Constants {
 public:
  Constants() = default;
  Constants(const void *params, size_t params_bytes, void (*kernel)(const void *params));

  bool holds(const void *address) const;

 private:
  struct Range {
    uintptr_t begin, end;
  } ranges_[3] = {};
};

// The allocation that an address is in or beside, as a sentence: "o + 51204 of 51200 bytes".
std::string describe_address(const void *address);

// Fails unless bytes of global memory lie in one allocation.
void check_range(const void *address, size_t bytes, const char *instruction, Loc loc);

// The same, aligned to their number.
void check_global(const void *address, size_t bytes, const char *instruction, Loc loc);

// Fails when something was written beside an allocation.
void check_canaries();

}  // namespace emu
