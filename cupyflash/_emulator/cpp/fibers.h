// Fibers: a stack for every thread of a block, and the switch between them. All of them run on one thread of the host.
#pragma once
#include <stddef.h>

#include "tsan.h"

// EMU_PORTABLE chooses what other machines than x86-64 have.
#if !defined(__x86_64__) || defined(EMU_PORTABLE)
#define EMU_UCONTEXT
#include <ucontext.h>
#endif

namespace emu {

// A fiber that is not running.
#if !defined(EMU_UCONTEXT)
struct Context {
  void *stack_pointer = nullptr;
  tsan::Fiber fiber;
};
#else
struct Context {
  ucontext_t registers;
  tsan::Fiber fiber;
};
#endif

struct Stack {
  static constexpr size_t BYTES = 128 << 10, GUARD = 64 << 10;
  static constexpr size_t REFILLED = 12 << 10;  // bytes at the top

  unsigned char *begin = nullptr;

  static Stack allocate();
  void refill();  // with NaN: what variables hold that a kernel does not initialise
  bool holds(const void *address) const { return address >= begin && address < begin + BYTES; }
  bool guards(const void *address) const;  // an overflow of this stack
};

// The same for the functions that the running fiber is about to call.
void refill_below();

// Makes a context that runs `main`, which never returns, on a stack.
void prepare(Context &context, const Stack &stack, void (*main)());

// Leaves the running fiber in `from` and continues `to`.
void change(Context &from, Context &to);

}  // namespace emu
