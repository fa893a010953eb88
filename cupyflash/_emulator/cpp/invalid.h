// Invalid operations of floats in a thread that has wgmma in flight: they trap, for one of them may read an accumulator
// that it must not. Internal to the runtime.
#pragma once

namespace emu {

// Whether the instruction at a fault has an operand that belongs to a product in flight. `context` is a ucontext_t.
bool reads_accumulator_in_flight(const void *context);

// Lets the thread go on with the instruction, which makes NaN, and with others until it waits or other threads run.
void mask_invalid(void *context);

}  // namespace emu
