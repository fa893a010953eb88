// fp32 to and from 16-bit and 8-bit floats, by integers: the same whether or not the processor flushes subnormals.
#pragma once
#include <cstdint>

namespace emu {

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

constexpr uint16_t CANONICAL_NAN = 0x7fff;  // of cvt to either format

// To nearest, ties to even.
inline uint16_t bf16_of(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return CANONICAL_NAN;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

inline uint16_t f16_of(float x) {
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  if (magnitude > 0x7f800000u) return CANONICAL_NAN;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more round to infinity
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  if (exponent < -25) return sign;
  // The significand loses 13 bits, or as many more as a subnormal's exponent is below -14.
  const int lost = exponent < -14 ? -1 - exponent : 13;
  const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t kept = significand >> lost, rest = significand & ((1u << lost) - 1), half = 1u << (lost - 1);
  const uint32_t rounded = kept + (rest > half || (rest == half && kept % 2));
  // A carry out of the significand moves into the exponent by itself.
  return static_cast<uint16_t>(sign |
                               (exponent < -14 ? rounded : rounded + static_cast<uint32_t>(exponent + 14) * 0x400u));
}

inline float from_bf16(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }

inline float from_f16(uint16_t x) {
  const uint32_t sign = (x & 0x8000u) << 16, exponent = x >> 10 & 31, significand = x & 0x3ffu;
  if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(significand) * 0x1p-24f));
  return float_of(sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | significand << 13);
}

// An 8-bit format: the bits of its significand, its smallest normal exponent, the code of its largest number.
struct Fp8 {
  int significand, least;
  uint32_t largest;
  bool infinities;
};
constexpr Fp8 E4M3{3, -6, 0x7e, false}, E5M2{2, -14, 0x7b, true};
constexpr uint8_t FP8_NAN = 0x7f;  // of cvt to either format

// To nearest, ties to even; what is beyond the range becomes the largest number.
template <Fp8 FORMAT>
uint8_t fp8_of(float x) {
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return FP8_NAN;
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  const int below = exponent < FORMAT.least ? FORMAT.least - exponent : 0;  // of a subnormal
  const int lost = 23 - FORMAT.significand + below;
  if (lost > 24) return sign;
  const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t kept = significand >> lost, rest = significand & ((1u << lost) - 1), half = 1u << (lost - 1);
  const uint32_t rounded = kept + (rest > half || (rest == half && kept % 2));
  const uint32_t code =
      below ? rounded : rounded + (static_cast<uint32_t>(exponent - FORMAT.least) << FORMAT.significand);
  return static_cast<uint8_t>(sign | (code < FORMAT.largest ? code : FORMAT.largest));
}

template <Fp8 FORMAT>
float from_fp8(uint8_t x) {
  const uint32_t sign = (x & 0x80u) << 24, code = x & 0x7fu;
  const uint32_t exponent = code >> FORMAT.significand, significand = code & ((1u << FORMAT.significand) - 1);
  if (code > FORMAT.largest) return float_of(sign | 0x7f800000u | (FORMAT.infinities && !significand ? 0 : 0x400000u));
  const uint32_t unit = static_cast<uint32_t>(FORMAT.least - FORMAT.significand + 127) << 23;  // of subnormals
  if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(significand) * float_of(unit)));
  return float_of(sign | (static_cast<uint32_t>(static_cast<int>(exponent) + FORMAT.least - 1 + 127) << 23) |
                  significand << (23 - FORMAT.significand));
}

inline uint8_t e4m3_of(float x) { return fp8_of<E4M3>(x); }
inline uint8_t e5m2_of(float x) { return fp8_of<E5M2>(x); }
inline float from_e4m3(uint8_t x) { return from_fp8<E4M3>(x); }
inline float from_e5m2(uint8_t x) { return from_fp8<E5M2>(x); }

}  // namespace emu
