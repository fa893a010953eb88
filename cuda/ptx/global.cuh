// Global memory that nothing writes while the kernel runs (PTX ISA, "ld.global.nc"), read where a condition holds; 0
// where it does not.
#pragma once
#include "device.cuh"

namespace ptx {

#define CUPYFLASH_LOAD_IF(TYPE, BITS, LETTER)             \
  DEVICE TYPE load_if(bool condition, const TYPE *from) { \
    TYPE x;                                               \
    asm("{\n"                                             \
        ".reg .pred there;\n"                             \
        "setp.ne.u32 there, %1, 0;\n"                     \
        "mov.b" #BITS                                     \
        " %0, 0;\n"                                       \
        "@there ld.global.nc.b" #BITS                     \
        " %0, [%2];\n"                                    \
        "}"                                               \
        : "=&" LETTER(x)                                  \
        : "r"(static_cast<u32>(condition)), "l"(from));   \
    return x;                                             \
  }

CUPYFLASH_LOAD_IF(u16, 16, "h")
CUPYFLASH_LOAD_IF(u32, 32, "r")
CUPYFLASH_LOAD_IF(u64, 64, "l")

// Two bytes in the low half of a word; the high half is 0.
DEVICE u32 load_u16(const void *from) {
  u32 x;
  asm("ld.global.nc.u16 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}

}  // namespace ptx
