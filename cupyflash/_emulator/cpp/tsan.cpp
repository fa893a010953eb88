#include "tsan.h"

extern "C" {
void *__tsan_get_current_fiber() __attribute__((weak));
void *__tsan_create_fiber(unsigned flags) __attribute__((weak));
void __tsan_destroy_fiber(void *fiber) __attribute__((weak));
void __tsan_switch_to_fiber(void *fiber, unsigned flags) __attribute__((weak));
void __tsan_set_fiber_name(void *fiber, const char *name) __attribute__((weak));
void __tsan_acquire(void *address) __attribute__((weak));
void __tsan_release(void *address) __attribute__((weak));
void __tsan_read_range_pc(void *address, unsigned long bytes, void *counter) __attribute__((weak));
void __tsan_write_range_pc(void *address, unsigned long bytes, void *counter) __attribute__((weak));
}

namespace emu::tsan {

namespace {

constexpr unsigned ORDERED = 0, UNORDERED = 1;  // what a switch means to the fiber that continues

}  // namespace

bool present() { return __tsan_create_fiber; }

Fiber Fiber::running() {
  Fiber self;
  if (present()) self.handle_ = __tsan_get_current_fiber();
  return self;
}

void Fiber::begin() {
  if (!present()) return;
  if (!handle_) {
    handle_ = __tsan_create_fiber(0);
  } else {
    void *self = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(handle_, ORDERED);
    __tsan_switch_to_fiber(self, UNORDERED);
  }
}

void Fiber::join() const {
  if (!handle_) return;
  void *self = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(handle_, UNORDERED);
  __tsan_switch_to_fiber(self, ORDERED);
}

void Fiber::continued() const {
  if (handle_) __tsan_switch_to_fiber(handle_, UNORDERED);
}

void Fiber::name(const char *name) const {
  if (handle_) __tsan_set_fiber_name(handle_, name);
}

void Fiber::destroy() {
  if (handle_) __tsan_destroy_fiber(handle_);
  handle_ = nullptr;
}

void release(const void *address) {
  if (present()) __tsan_release(const_cast<void *>(address));
}

void acquire(const void *address) {
  if (present()) __tsan_acquire(const_cast<void *>(address));
}

void read(const void *address, size_t bytes, const void *counter) {
  if (present()) __tsan_read_range_pc(const_cast<void *>(address), bytes, const_cast<void *>(counter));
}

void write(const void *address, size_t bytes, const void *counter) {
  if (present()) __tsan_write_range_pc(const_cast<void *>(address), bytes, const_cast<void *>(counter));
}

}  // namespace emu::tsan
