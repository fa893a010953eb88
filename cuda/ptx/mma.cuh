// Warp-wide matrix products D += A B with fp32 accumulation (PTX ISA, "mma.sync", shape m16n8k16). With g = lane / 4
// and t = lane % 4: A holds rows g (a[0], a[2]) and g + 8 (a[1], a[3]), columns 2t.. of the halves k < 8 (a[0], a[1])
// and k >= 8; B holds column g, rows 2t.. of the same halves (b0, b1); D holds rows g (d[0], d[1]) and g + 8, columns
// 2t and 2t + 1.
#pragma once
#include "device.cuh"

namespace ptx {

DEVICE void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace ptx
