// fp32 to and from 16-bit floats, by integers: the same whether or not the processor flushes subnormals.
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

}  // namespace emu
