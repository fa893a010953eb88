// Stacks and switches. On x86-64 a switch is a dozen instructions, elsewhere ucontext's, which asks the kernel for the
// signal mask and is thirty times slower.
#include "fibers.h"

#include <string.h>
#include <sys/mman.h>

#include <new>

// AddressSanitizer's, in a process that has it: what a unit's functions did to a stack and did not undo is forgotten.
extern "C" void __asan_unpoison_memory_region(const volatile void *begin, size_t bytes) __attribute__((weak));

namespace emu {

Stack Stack::allocate() {
  void *memory =
      mmap(nullptr, GUARD + BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, GUARD, PROT_NONE);
  return {static_cast<unsigned char *>(memory) + GUARD};
}

void Stack::refill() {
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(begin, BYTES);
  memset(begin + BYTES - REFILLED, 0xff, REFILLED);
}

__attribute__((noinline)) void refill_below() {
  unsigned char dead[8 << 10];
  memset(dead, 0xff, sizeof dead);
  asm volatile("" ::"r"(dead) : "memory");  // the stores happen, though nobody reads them
}

bool Stack::guards(const void *address) const { return address < begin && address >= begin - GUARD; }

#if !defined(EMU_UCONTEXT)

// The registers that a call preserves go to the stack, and the stack is exchanged.
asm(R"(
  .text
  .type emu_change, @function
emu_change:
  .cfi_startproc
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq (%rsi), %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .cfi_endproc
  .size emu_change, . - emu_change
)");
extern "C" void emu_change(Context *from, Context *to);

void prepare(Context &context, const Stack &stack, void (*main)()) {
  void **top = reinterpret_cast<void **>(stack.begin + Stack::BYTES);
  *--top = nullptr;  // the return address of main: a backtrace ends here
  *--top = reinterpret_cast<void *>(main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack_pointer = top;
}

static void exchange(Context &from, Context &to) { emu_change(&from, &to); }

#else

void prepare(Context &context, const Stack &stack, void (*main)()) {
  getcontext(&context.registers);
  context.registers.uc_stack.ss_sp = stack.begin;
  context.registers.uc_stack.ss_size = Stack::BYTES;
  context.registers.uc_link = nullptr;
  makecontext(&context.registers, main, 0);
}

static void exchange(Context &from, Context &to) { swapcontext(&from.registers, &to.registers); }

#endif

void change(Context &from, Context &to) {
  from.fiber = tsan::Fiber::running();
  to.fiber.continued();
  exchange(from, to);
}

}  // namespace emu
