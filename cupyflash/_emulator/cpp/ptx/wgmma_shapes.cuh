// Twin of cuda/ptx/wgmma_shapes.cuh.
#pragma once

#define CUPYFLASH_WGMMA_16_BITS(NAME, ELEMENT, N)                                                                  \
  template <int TRANS_A, int TRANS_B>                                                                              \
  DEVICE void NAME(float (&d)[N / 2], u64 a, u64 b, bool keep, emu::Loc loc = emu::Loc::here()) {                  \
    static_assert((TRANS_A | TRANS_B | 1) == 1, "0 or 1");                                                         \
    emu::wgmma({#NAME, emu::Element::ELEMENT, emu::Element::ELEMENT, N, false, TRANS_A, TRANS_B}, {a, b, keep}, d, \
               nullptr, loc);                                                                                      \
  }                                                                                                                \
  template <int TRANS_B>                                                                                           \
  DEVICE void NAME(float (&d)[N / 2], const u32(&a)[4], u64 b, bool keep, emu::Loc loc = emu::Loc::here()) {       \
    static_assert((TRANS_B | 1) == 1, "0 or 1");                                                                   \
    emu::wgmma({#NAME, emu::Element::ELEMENT, emu::Element::ELEMENT, N, true, false, TRANS_B}, {0, b, keep}, d, a, \
               loc);                                                                                               \
  }

#define CUPYFLASH_WGMMA_8_BITS(NAME, A, B, N)                                                                     \
  DEVICE void NAME(float (&d)[N / 2], u64 a, u64 b, bool keep, emu::Loc loc = emu::Loc::here()) {                 \
    emu::wgmma({#NAME, emu::Element::A, emu::Element::B, N, false, false, false}, {a, b, keep}, d, nullptr, loc); \
  }                                                                                                               \
  DEVICE void NAME(float (&d)[N / 2], const u32(&a)[4], u64 b, bool keep, emu::Loc loc = emu::Loc::here()) {      \
    emu::wgmma({#NAME, emu::Element::A, emu::Element::B, N, true, false, false}, {0, b, keep}, d, a, loc);        \
  }

#define CUPYFLASH_WGMMA(N)                          \
  CUPYFLASH_WGMMA_16_BITS(wgmma_bf16, BF16, N)      \
  CUPYFLASH_WGMMA_16_BITS(wgmma_f16, F16, N)        \
  CUPYFLASH_WGMMA_8_BITS(wgmma_e4m3, E4M3, E4M3, N) \
  CUPYFLASH_WGMMA_8_BITS(wgmma_e5m2, E5M2, E5M2, N) \
  CUPYFLASH_WGMMA_8_BITS(wgmma_e4m3_e5m2, E4M3, E5M2, N)

namespace ptx {

CUPYFLASH_WGMMA(16)
CUPYFLASH_WGMMA(32)
CUPYFLASH_WGMMA(48)
CUPYFLASH_WGMMA(64)
CUPYFLASH_WGMMA(80)
CUPYFLASH_WGMMA(96)
CUPYFLASH_WGMMA(112)
CUPYFLASH_WGMMA(128)
CUPYFLASH_WGMMA(144)
CUPYFLASH_WGMMA(160)
CUPYFLASH_WGMMA(176)
CUPYFLASH_WGMMA(192)
CUPYFLASH_WGMMA(208)
CUPYFLASH_WGMMA(224)
CUPYFLASH_WGMMA(240)
CUPYFLASH_WGMMA(256)

}  // namespace ptx
