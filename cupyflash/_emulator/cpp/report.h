// From a fault to a message: what happened, in which thread, at which line, called from where. Internal to the runtime.
#pragma once
#include <string>
#include <vector>

#include "runtime.h"

namespace emu {

using Trace = std::vector<void *>;  // program counters, innermost first

// The calls on this stack. Safe in a signal handler.
Trace trace_here();

// A sentence about one place.
struct Note {
  Loc loc;  // file is empty: only the trace knows
  std::string text;
  Trace trace;
};

struct Failure {
  std::string heading;  // a line before the notes; may be empty
  std::vector<Note> notes;

  bool happened() const { return !notes.empty(); }
  // Runs addr2line.
  std::string message() const;
};

std::string format(const char *text, ...) __attribute__((format(printf, 1, 2)));

// "tile/smem.cuh:46", without the path to cuda/.
std::string place(Loc loc);
bool same(Loc a, Loc b);

// As fail, about a thread that may not be the one that runs.
struct Thread;
[[noreturn]] void fail_for(const Thread &thread, Loc loc, const std::string &text, Trace trace = {});
[[noreturn]] void fail_with(Failure failure);

std::string subject(const Thread &thread);  // "block (0,0,0) thread 5"

// Turns faults of the running thread into failures until it is destroyed.
class FaultHandlers {
 public:
  FaultHandlers();
  ~FaultHandlers();
};

}  // namespace emu
