// What the scheduler knows of things: threads wait for some, others happen by themselves. Internal to the runtime.
#pragma once
#include <string>
#include <vector>

namespace emu {

struct Thread;
struct Block;

// What threads may wait for.
struct Object {
  std::vector<Thread *> waiters;
  virtual std::string state() const = 0;  // for the report of a deadlock
};

// Something that happens by itself, some time after it was issued.
struct Operation {
  Block *block = nullptr;  // of the thread that submitted it; it is the machine's block while the operation runs
  virtual void run() = 0;
};

}  // namespace emu
