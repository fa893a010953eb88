// The operands of a faulting SSE or AVX instruction (Intel 64 and IA-32 Architectures Software Developer's Manual,
// volume 2, chapter 2, "Instruction Format"). inf - inf traps like a signalling NaN, so the operands have to be looked
// at.
#include "invalid.h"

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "precise.h"
#include "wgmma.h"

namespace emu {

#if defined(__x86_64__)

namespace {

// What precedes ModRM.
struct Encoding {
  const uint8_t *modrm = nullptr;  // null: no instruction that is known here
  bool scalar = false;
  int reg = 0, index = 0, base = 0;  // the high bits of these registers' numbers
  int second = -1;                   // the register that AVX adds
};

Encoding decode(const uint8_t *at) {
  Encoding found;
  for (; *at == 0x66 || *at == 0xf2 || *at == 0xf3; ++at) found.scalar |= *at != 0x66;
  if (*at == 0xc4 || *at == 0xc5) {  // VEX of three bytes or two: the bits are inverted
    const bool three = *at == 0xc4;
    const uint8_t first = ~at[1], last = three ? at[2] : at[1];
    found.reg = first >> 7 & 1;
    if (three) found.index = first >> 6 & 1, found.base = first >> 5 & 1;
    found.second = ~last >> 3 & 15;
    found.scalar = last & 2;
    // The scalar ones among the fused products differ by their opcode.
    const uint8_t opcode = at[three ? 3 : 2];
    if (three && (at[1] & 31) == 2 && opcode >= 0x96) found.scalar = opcode & 1;
    found.modrm = at + (three ? 4 : 3);
    return found;
  }
  if ((*at & 0xf0) == 0x40) {  // REX
    found.reg = *at >> 2 & 1, found.index = *at >> 1 & 1, found.base = *at & 1;
    ++at;
  }
  if (*at == 0x0f) found.modrm = at + (at[1] == 0x38 || at[1] == 0x3a ? 3 : 2);
  return found;
}

uint64_t general(const ucontext_t &context, int number) {
  constexpr int OF[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                        REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return static_cast<uint64_t>(context.uc_mcontext.gregs[OF[number]]);
}

// The address of a memory operand, or null for one relative to the instruction, a constant.
const void *address(const ucontext_t &context, const Encoding &encoding) {
  const uint8_t *at = encoding.modrm;
  const int mode = *at >> 6, rm = *at & 7;
  ++at;
  if (mode == 0 && rm == 5) return nullptr;
  uint64_t sum = 0;
  bool wide = mode == 2;
  if (rm == 4) {  // SIB
    const int index = (*at >> 3 & 7) + 8 * encoding.index, base = *at & 7;
    if (index != 4) sum += general(context, index) << (*at >> 6);
    if (mode == 0 && base == 5) {
      wide = true;
    } else {
      sum += general(context, base + 8 * encoding.base);
    }
    ++at;
  } else {
    sum += general(context, rm + 8 * encoding.base);
  }
  int32_t displacement = 0;
  if (wide) {
    memcpy(&displacement, at, sizeof displacement);
  } else if (mode == 1) {
    displacement = static_cast<int8_t>(*at);
  }
  return reinterpret_cast<const void *>(sum + static_cast<int64_t>(displacement));
}

}  // namespace

bool reads_accumulator_in_flight(const void *fault) {
  const auto &context = *static_cast<const ucontext_t *>(fault);
  const Encoding encoding = decode(reinterpret_cast<const uint8_t *>(context.uc_mcontext.gregs[REG_RIP]));
  if (!encoding.modrm) return false;
  const auto in_flight = [&](const void *lanes) {
    for (int i = 0; i < (encoding.scalar ? 1 : 4); ++i)
      if (!memcmp(static_cast<const char *>(lanes) + 4 * i, &IN_FLIGHT_BITS, 4)) return true;
    return false;
  };
  const auto *registers = context.uc_mcontext.fpregs->_xmm;
  const uint8_t modrm = *encoding.modrm;
  if (in_flight(&registers[(modrm >> 3 & 7) + 8 * encoding.reg])) return true;
  if (encoding.second >= 0 && in_flight(&registers[encoding.second])) return true;
  if (modrm >> 6 == 3) return in_flight(&registers[(modrm & 7) + 8 * encoding.base]);
  const void *operand = address(context, encoding);
  return operand && in_flight(operand);
}

void mask_invalid(void *fault) { static_cast<ucontext_t *>(fault)->uc_mcontext.fpregs->mxcsr |= INVALID_MASKED; }

#else  // nothing traps

bool reads_accumulator_in_flight(const void *) { return false; }
void mask_invalid(void *) {}

#endif

}  // namespace emu
