// The shapes of wgmma.cuh, included by it: one function for each element type, width N and place of A.
//
// The functions are made by macros, for an asm statement has to spell out the N / 2 registers of D. `keep` false drops
// what D held: D = A B.
//
//   wgmma_bf16<TRANS_A, TRANS_B>(d, a, b, keep)   A in shared memory; wgmma_f16 likewise
//   wgmma_bf16<TRANS_B>(d, a, b, keep)            A in registers; wgmma_f16 likewise
//   wgmma_e4m3, wgmma_e5m2, wgmma_e4m3_e5m2       either; K runs along the rows of both. The last has an A of e4m3
#pragma once

// D's registers in the instruction, eight at a time.
#define CUPYFLASH_REGISTERS_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CUPYFLASH_REGISTERS_2 CUPYFLASH_REGISTERS_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CUPYFLASH_REGISTERS_3 CUPYFLASH_REGISTERS_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CUPYFLASH_REGISTERS_4 CUPYFLASH_REGISTERS_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define CUPYFLASH_REGISTERS_5 CUPYFLASH_REGISTERS_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CUPYFLASH_REGISTERS_6 CUPYFLASH_REGISTERS_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CUPYFLASH_REGISTERS_7 CUPYFLASH_REGISTERS_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CUPYFLASH_REGISTERS_8 CUPYFLASH_REGISTERS_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define CUPYFLASH_REGISTERS_9 CUPYFLASH_REGISTERS_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define CUPYFLASH_REGISTERS_10 CUPYFLASH_REGISTERS_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define CUPYFLASH_REGISTERS_11 CUPYFLASH_REGISTERS_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define CUPYFLASH_REGISTERS_12 CUPYFLASH_REGISTERS_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define CUPYFLASH_REGISTERS_13 CUPYFLASH_REGISTERS_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define CUPYFLASH_REGISTERS_14 CUPYFLASH_REGISTERS_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define CUPYFLASH_REGISTERS_15 CUPYFLASH_REGISTERS_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define CUPYFLASH_REGISTERS_16 CUPYFLASH_REGISTERS_15 ", %120, %121, %122, %123, %124, %125, %126, %127"

// The same as operands of the asm statement.
#define CUPYFLASH_OPERANDS_1 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define CUPYFLASH_OPERANDS_2                                                                                     \
  CUPYFLASH_OPERANDS_1, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), \
      "+f"(d[15])
#define CUPYFLASH_OPERANDS_3                                                                                       \
  CUPYFLASH_OPERANDS_2, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), \
      "+f"(d[23])
#define CUPYFLASH_OPERANDS_4                                                                                       \
  CUPYFLASH_OPERANDS_3, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), \
      "+f"(d[31])
#define CUPYFLASH_OPERANDS_5                                                                                       \
  CUPYFLASH_OPERANDS_4, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), \
      "+f"(d[39])
#define CUPYFLASH_OPERANDS_6                                                                                       \
  CUPYFLASH_OPERANDS_5, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), \
      "+f"(d[47])
#define CUPYFLASH_OPERANDS_7                                                                                       \
  CUPYFLASH_OPERANDS_6, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), \
      "+f"(d[55])
#define CUPYFLASH_OPERANDS_8                                                                                       \
  CUPYFLASH_OPERANDS_7, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), \
      "+f"(d[63])
#define CUPYFLASH_OPERANDS_9                                                                                       \
  CUPYFLASH_OPERANDS_8, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), \
      "+f"(d[71])
#define CUPYFLASH_OPERANDS_10                                                                                      \
  CUPYFLASH_OPERANDS_9, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), \
      "+f"(d[79])
#define CUPYFLASH_OPERANDS_11                                                                                       \
  CUPYFLASH_OPERANDS_10, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), \
      "+f"(d[87])
#define CUPYFLASH_OPERANDS_12                                                                                       \
  CUPYFLASH_OPERANDS_11, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), \
      "+f"(d[95])
#define CUPYFLASH_OPERANDS_13                                                                                          \
  CUPYFLASH_OPERANDS_12, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), \
      "+f"(d[103])
#define CUPYFLASH_OPERANDS_14                                                                                \
  CUPYFLASH_OPERANDS_13, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), \
      "+f"(d[110]), "+f"(d[111])
#define CUPYFLASH_OPERANDS_15                                                                                \
  CUPYFLASH_OPERANDS_14, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), \
      "+f"(d[118]), "+f"(d[119])
#define CUPYFLASH_OPERANDS_16                                                                                \
  CUPYFLASH_OPERANDS_15, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), \
      "+f"(d[126]), "+f"(d[127])

// N, the EIGHTHS of D's registers, and the numbers of the operands that follow them.
#define CUPYFLASH_WGMMA_16_BITS(NAME, TYPE, N, EIGHTHS, P0, P1, P2, P3, P4, P5, P6)                                 \
  template <int TRANS_A, int TRANS_B>                                                                               \
  DEVICE void NAME(float (&d)[N / 2], u64 a, u64 b, bool keep) {                                                    \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #P2                                                              \
                 ", 0;\n"                                                                                           \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" CUPYFLASH_REGISTERS_##EIGHTHS \
                 "}, %" #P0 ", %" #P1 ", p, 1, 1, %" #P3 ", %" #P4 ";}"                                             \
                 : CUPYFLASH_OPERANDS_##EIGHTHS                                                                     \
                 : "l"(a), "l"(b), "r"(static_cast<u32>(keep)), "n"(TRANS_A), "n"(TRANS_B));                        \
  }                                                                                                                 \
  template <int TRANS_B>                                                                                            \
  DEVICE void NAME(float (&d)[N / 2], const u32(&a)[4], u64 b, bool keep) {                                         \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #P5                                                              \
                 ", 0;\n"                                                                                           \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" CUPYFLASH_REGISTERS_##EIGHTHS \
                 "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1, %" #P6 ";}"                       \
                 : CUPYFLASH_OPERANDS_##EIGHTHS                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(keep)), "n"(TRANS_B));  \
  }

#define CUPYFLASH_WGMMA_8_BITS(NAME, TYPES, N, EIGHTHS, P0, P1, P2, P3, P4, P5)                             \
  DEVICE void NAME(float (&d)[N / 2], u64 a, u64 b, bool keep) {                                            \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #P2                                                      \
                 ", 0;\n"                                                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPES " {" CUPYFLASH_REGISTERS_##EIGHTHS \
                 "}, %" #P0 ", %" #P1 ", p, 1, 1;}"                                                         \
                 : CUPYFLASH_OPERANDS_##EIGHTHS                                                             \
                 : "l"(a), "l"(b), "r"(static_cast<u32>(keep)));                                            \
  }                                                                                                         \
  DEVICE void NAME(float (&d)[N / 2], const u32(&a)[4], u64 b, bool keep) {                                 \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #P5                                                      \
                 ", 0;\n"                                                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPES " {" CUPYFLASH_REGISTERS_##EIGHTHS \
                 "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1;}"                         \
                 : CUPYFLASH_OPERANDS_##EIGHTHS                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(keep)));        \
  }

#define CUPYFLASH_WGMMA(N, EIGHTHS, P0, P1, P2, P3, P4, P5, P6)                       \
  CUPYFLASH_WGMMA_16_BITS(wgmma_bf16, "bf16", N, EIGHTHS, P0, P1, P2, P3, P4, P5, P6) \
  CUPYFLASH_WGMMA_16_BITS(wgmma_f16, "f16", N, EIGHTHS, P0, P1, P2, P3, P4, P5, P6)   \
  CUPYFLASH_WGMMA_8_BITS(wgmma_e4m3, "e4m3.e4m3", N, EIGHTHS, P0, P1, P2, P3, P4, P5) \
  CUPYFLASH_WGMMA_8_BITS(wgmma_e5m2, "e5m2.e5m2", N, EIGHTHS, P0, P1, P2, P3, P4, P5) \
  CUPYFLASH_WGMMA_8_BITS(wgmma_e4m3_e5m2, "e4m3.e5m2", N, EIGHTHS, P0, P1, P2, P3, P4, P5)

namespace ptx {

CUPYFLASH_WGMMA(16, 1, 8, 9, 10, 11, 12, 13, 14)
CUPYFLASH_WGMMA(32, 2, 16, 17, 18, 19, 20, 21, 22)
CUPYFLASH_WGMMA(48, 3, 24, 25, 26, 27, 28, 29, 30)
CUPYFLASH_WGMMA(64, 4, 32, 33, 34, 35, 36, 37, 38)
CUPYFLASH_WGMMA(80, 5, 40, 41, 42, 43, 44, 45, 46)
CUPYFLASH_WGMMA(96, 6, 48, 49, 50, 51, 52, 53, 54)
CUPYFLASH_WGMMA(112, 7, 56, 57, 58, 59, 60, 61, 62)
CUPYFLASH_WGMMA(128, 8, 64, 65, 66, 67, 68, 69, 70)
CUPYFLASH_WGMMA(144, 9, 72, 73, 74, 75, 76, 77, 78)
CUPYFLASH_WGMMA(160, 10, 80, 81, 82, 83, 84, 85, 86)
CUPYFLASH_WGMMA(176, 11, 88, 89, 90, 91, 92, 93, 94)
CUPYFLASH_WGMMA(192, 12, 96, 97, 98, 99, 100, 101, 102)
CUPYFLASH_WGMMA(208, 13, 104, 105, 106, 107, 108, 109, 110)
CUPYFLASH_WGMMA(224, 14, 112, 113, 114, 115, 116, 117, 118)
CUPYFLASH_WGMMA(240, 15, 120, 121, 122, 123, 124, 125, 126)
CUPYFLASH_WGMMA(256, 16, 128, 129, 130, 131, 132, 133, 134)

}  // namespace ptx
