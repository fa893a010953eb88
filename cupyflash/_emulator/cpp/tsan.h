// ThreadSanitizer, in a process that has loaded it: a second opinion on where a barrier lacks, by clocks that are not
// ours. Every thread of a launch is a fiber of its own to it, and so are the copies of a thread; instructions tell it
// what they read and write, and barriers what they order. The loads and stores of units call its functions then, not
// those of accesses.cpp. Without it nothing here does anything. Internal to the runtime.
#pragma once
#include <stddef.h>

namespace emu::tsan {

// Whether this process has it.
bool present();

// The deeds of one thread, or of the copies that it starts.
class Fiber {
 public:
  static Fiber running();

  void begin();                       // what it does next comes after all that the running one has done
  void join() const;                  // what the running one does next comes after all that it has done
  void continued() const;             // runs, and has learnt nothing
  void name(const char *name) const;  // in reports
  void destroy();

 private:
  void *handle_ = nullptr;
};

// What is done until the end of the scope is another fiber's deed.
class As {
 public:
  explicit As(const Fiber &fiber) : self_(Fiber::running()) { fiber.continued(); }
  ~As() { self_.continued(); }
  As(const As &) = delete;
  As &operator=(const As &) = delete;

 private:
  Fiber self_;
};

// What the running fiber did before a release of an address is known to those who acquire it later.
void release(const void *address);
void acquire(const void *address);

// The order that a barrier makes: who leaves one of its phases knows what was done by those who came to it, but not
// what the quickest of them have done since.
class Phases {
 public:
  const void *come() const {
    release(of(number_));
    return of(number_);
  }
  void pass() { ++number_; }  // everybody has come
  const void *of(unsigned number) const { return &addresses_[number % 2]; }

 private:
  char addresses_[2] = {};
  unsigned number_ = 0;
};

// An access by an instruction; `counter` is where the unit called its twin.
void read(const void *address, size_t bytes, const void *counter);
void write(const void *address, size_t bytes, const void *counter);

}  // namespace emu::tsan
