// A fault of the running thread: a page that it must not touch, a trap, a division by zero. The handler, on a stack of
// its own, leaves for the launcher and never returns.
#include <signal.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>

#include "invalid.h"
#include "state.h"

namespace emu {

namespace {

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
constexpr int COUNT = sizeof SIGNALS / sizeof *SIGNALS;
struct sigaction before[COUNT];
stack_t stack_before;
alignas(16) unsigned char stack[256 << 10];

std::string sentence(int signal, const siginfo_t &info, bool write) {
  if (signal == SIGFPE && info.si_code == FPE_FLTINV)
    return "arithmetic with an accumulator that a wgmma in flight owns";
  if (signal == SIGFPE) return "division by zero";
  if (signal == SIGILL) return "a trap";
  const Thread &self = *machine.thread;
  if (self.stack.guards(info.si_addr)) return "stack overflow";
  return format("%s at %s", write ? "write" : "read", describe_address(info.si_addr).c_str());
}

void handle(int signal, siginfo_t *info, void *context) {
  if (!machine.thread) {  // not a kernel's: the next time it is handled as before
    for (int i = 0; i < COUNT; ++i)
      if (SIGNALS[i] == signal) sigaction(signal, &before[i], nullptr);
    return;
  }
  if (signal == SIGFPE && info->si_code == FPE_FLTINV && !reads_accumulator_in_flight(context))
    return mask_invalid(context);
  bool write = false;
  Trace trace = trace_here();
#if defined(__x86_64__)
  const auto &registers = static_cast<ucontext_t *>(context)->uc_mcontext.gregs;
  write = registers[REG_ERR] & 2;  // of a page fault
  // The trace begins with this handler. Its counters stand after a call, that of a fault at the instruction.
  const auto counter = reinterpret_cast<void *>(registers[REG_RIP]);
  trace.erase(trace.begin(), std::find(trace.begin(), trace.end(), counter));
  if (trace.empty()) trace.push_back(counter);
  trace[0] = static_cast<char *>(counter) + 1;
#endif
  fail_for(*machine.thread, {}, sentence(signal, *info, write), std::move(trace));
}

}  // namespace

FaultHandlers::FaultHandlers() {
  stack_t mine{};
  mine.ss_sp = stack;
  mine.ss_size = sizeof stack;
  sigaltstack(&mine, &stack_before);
  struct sigaction action{};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < COUNT; ++i) sigaction(SIGNALS[i], &action, &before[i]);
}

FaultHandlers::~FaultHandlers() {
  for (int i = 0; i < COUNT; ++i) sigaction(SIGNALS[i], &before[i], nullptr);
  sigaltstack(&stack_before, nullptr);
}

}  // namespace emu
