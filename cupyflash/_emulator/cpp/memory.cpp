// Guarded memory, the table of allocations, addresses of shared memory.
#include "memory.h"

#include <link.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <new>
#include <utility>

#include "abi.h"
#include "report.h"
#include "state.h"

namespace emu {

static size_t rounded_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

Guarded::Guarded(size_t bytes, size_t alignment) : bytes_(bytes) {
  const size_t inside = rounded_up(bytes + alignment, PAGE);
  span_ = inside + 2 * PAGE;
  void *pages = mmap(nullptr, span_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  pages_ = static_cast<unsigned char *>(pages);
  mprotect(pages_, PAGE, PROT_NONE);
  mprotect(pages_ + span_ - PAGE, PAGE, PROT_NONE);
  memset(pages_ + PAGE, CANARY_BYTE, inside);
  begin_ = pages_ + span_ - PAGE - rounded_up(bytes, alignment);
}

Guarded::Guarded(Guarded &&other) noexcept { swap(other); }

Guarded &Guarded::operator=(Guarded &&other) noexcept {
  swap(other);
  return *this;
}

Guarded::~Guarded() {
  if (pages_) munmap(pages_, span_);
}

void Guarded::swap(Guarded &other) noexcept {
  std::swap(pages_, other.pages_);
  std::swap(begin_, other.begin_);
  std::swap(span_, other.span_);
  std::swap(bytes_, other.bytes_);
}

bool Guarded::holds(const void *address, size_t count) const {
  return address >= begin_ && count <= bytes_ && address <= begin_ + (bytes_ - count);
}

bool Guarded::reaches(const void *address) const { return address >= pages_ && address < pages_ + span_; }

bool Guarded::trampled(ptrdiff_t &offset) const {
  const auto canary = [&](const unsigned char *from, const unsigned char *to) {
    for (; from < to; ++from)
      if (*from != CANARY_BYTE) return offset = from - begin_, true;
    return false;
  };
  return canary(pages_ + PAGE, begin_) || canary(begin_ + bytes_, pages_ + span_ - PAGE);
}

unsigned char *Shared::at(uint32_t address, size_t bytes, size_t alignment, const char *instruction, Loc loc) const {
  const int64_t offset = static_cast<int64_t>(address) - BASE;
  if (offset < 0 || offset + bytes > memory.bytes())
    fail(loc, "%s at shared memory %+ld, which has %zu bytes", instruction, static_cast<long>(offset), memory.bytes());
  if (offset % alignment)
    fail(loc, "%s at shared memory %+ld, which is not %zu-byte aligned", instruction, static_cast<long>(offset),
         alignment);
  return memory.begin() + offset;
}

void *shared_memory(size_t bytes, size_t alignment, Loc loc) {
  const Guarded &memory = machine.block->shared.memory;
  if (bytes > memory.bytes()) fail(loc, "%zu bytes of shared memory, and the launch gave %zu", bytes, memory.bytes());
  if (reinterpret_cast<uintptr_t>(memory.begin()) % alignment)
    fail(loc, "shared memory of %zu bytes is not %zu-byte aligned: its size is no multiple", memory.bytes(), alignment);
  return memory.begin();
}

uint32_t shared_address(const void *pointer, Loc loc) {
  const Guarded &memory = machine.block->shared.memory;
  const ptrdiff_t offset = static_cast<const unsigned char *>(pointer) - memory.begin();
  if (offset < 0 || static_cast<size_t>(offset) > memory.bytes())
    fail(loc, "the address in shared memory of %s", describe_address(pointer).c_str());
  return Shared::BASE + static_cast<uint32_t>(offset);
}

// The library that holds an address.
struct Library {
  uintptr_t address, begin, end;

  static int look(dl_phdr_info *info, size_t, void *wanted) {
    auto &self = *static_cast<Library *>(wanted);
    uintptr_t begin = UINTPTR_MAX, end = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto &segment = info->dlpi_phdr[i];
      if (segment.p_type != PT_LOAD) continue;
      begin = std::min<uintptr_t>(begin, info->dlpi_addr + segment.p_vaddr);
      end = std::max<uintptr_t>(end, info->dlpi_addr + segment.p_vaddr + segment.p_memsz);
    }
    if (self.address < begin || self.address >= end) return 0;
    self.begin = begin, self.end = end;
    return 1;
  }
};

Constants::Constants(const void *params, size_t params_bytes, void (*kernel)(const void *)) {
  const auto first = reinterpret_cast<uintptr_t>(params);
  ranges_[0] = {first, first + params_bytes};
  const uintptr_t inside[] = {reinterpret_cast<uintptr_t>(kernel), reinterpret_cast<uintptr_t>(&machine)};
  for (int i = 0; i < 2; ++i) {
    Library library{inside[i], 0, 0};
    dl_iterate_phdr(Library::look, &library);
    ranges_[1 + i] = {library.begin, library.end};
  }
}

bool Constants::holds(const void *address) const {
  const auto at = reinterpret_cast<uintptr_t>(address);
  return std::any_of(ranges_, std::end(ranges_),
                     [at](const Range &range) { return at >= range.begin && at < range.end; });
}

namespace {

struct Allocation {
  std::string name;
  Guarded memory;
};

std::mutex mutex;
std::map<const void *, Allocation> allocations;  // by the first byte

// The allocation whose pages, the guards among them, hold an address.
const Allocation *find(const void *address) {
  auto next = allocations.upper_bound(address);
  if (next != allocations.end() && next->second.memory.reaches(address)) return &next->second;
  if (next == allocations.begin()) return nullptr;
  const Allocation &before = std::prev(next)->second;
  return before.memory.reaches(address) ? &before : nullptr;
}

std::string offset_in(const char *name, const Guarded &memory, const void *address) {
  const ptrdiff_t offset = static_cast<const unsigned char *>(address) - memory.begin();
  return format("%s %+ld of %zu bytes", name, static_cast<long>(offset), memory.bytes());
}

}  // namespace

std::string describe_address(const void *address) {
  if (machine.block && machine.block->shared.memory.reaches(address))
    return offset_in("shared memory", machine.block->shared.memory, address);
  if (const Allocation *found = find(address)) return offset_in(found->name.c_str(), found->memory, address);
  return format("%p, which is in no allocation", address);
}

void check_range(const void *address, size_t bytes, const char *instruction, Loc loc) {
  const Allocation *found = find(address);
  if (!found || !found->memory.holds(address, bytes))
    fail(loc, "%s of %zu bytes at %s", instruction, bytes, describe_address(address).c_str());
}

void check_global(const void *address, size_t bytes, const char *instruction, Loc loc) {
  check_range(address, bytes, instruction, loc);
  if (reinterpret_cast<uintptr_t>(address) % bytes)
    fail(loc, "%s at %s, which is not %zu-byte aligned", instruction, describe_address(address).c_str(), bytes);
}

void check_canaries() {
  ptrdiff_t offset;
  for (const auto &[begin, allocation] : allocations)
    if (allocation.memory.trampled(offset))
      machine.failure.notes.push_back(
          {{},
           format("something was written beside %s: %+ld of %zu bytes", allocation.name.c_str(),
                  static_cast<long>(offset), allocation.memory.bytes()),
           {}});
}

}  // namespace emu

void *emu_alloc(size_t bytes, const char *name, int fill_nan) try {
  emu::Guarded memory(bytes);
  memset(memory.begin(), fill_nan ? emu::NAN_BYTE : 0, bytes);
  unsigned char *begin = memory.begin();
  const std::lock_guard lock(emu::mutex);
  emu::allocations.emplace(begin, emu::Allocation{name, std::move(memory)});
  return begin;
} catch (const std::bad_alloc &) {
  return nullptr;
}

void emu_free(void *pointer) {
  const std::lock_guard lock(emu::mutex);
  emu::allocations.erase(pointer);
}
