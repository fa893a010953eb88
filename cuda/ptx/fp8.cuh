// 8-bit floats (PTX ISA, "cvt", "mma.sync", "prmt"; sm_89 and newer): e4m3 has no infinity, its NaN is 0x7f.
#pragma once
#include "device.cuh"

namespace ptx {

// Pairs from fp32, to nearest even; the low byte is the first element. What is beyond the range, infinities included,
// becomes the largest number.
DEVICE u16 e4m3x2(float low, float high) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

DEVICE u16 e5m2x2(float low, float high) {
  u16 pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Pairs of fp16, which has every number of both formats.
DEVICE u32 f16x2_of_e4m3x2(u16 pair) {
  u32 wide;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"(pair));
  return wide;
}

DEVICE u32 f16x2_of_e5m2x2(u16 pair) {
  u32 wide;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(wide) : "h"(pair));
  return wide;
}

// Two pairs, the first in the low half.
DEVICE u32 word_of(u16 low, u16 high) {
  u32 word;
  asm("mov.b32 %0, {%1, %2};" : "=r"(word) : "h"(low), "h"(high));
  return word;
}

// Four bytes of the eight of (low, high): byte i of the result is the one that the i-th nibble of `selector` names.
DEVICE u32 permute_bytes(u32 low, u32 high, u32 selector) {
  u32 bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

// D += A B of m16n8k32: the layout of ptx/mma.cuh with four elements of K in place of two.
DEVICE void mma_m16n8k32_e4m3(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void mma_m16n8k32_e5m2(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace ptx
