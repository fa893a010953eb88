// Element types of Q, K, V and O, and of what joins the scores (`single` is an element in fp32, `narrow` the way back).
// Tensor cores multiply 16-bit floats: an element is the sum of PLANES of them. A fp32 number is exactly b0 + b1 + b2
// with 8-bit bfloat16 significands, and of the nine products of two such numbers the six above 2^-27 are kept, which is
// below half an ulp of fp32: fp32 accuracy at a sixth of the bfloat16 rate.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"

constexpr float INFINITE = __builtin_bit_cast(float, 0x7f800000u);
constexpr float LARGEST = 3.40282347e38f;  // finite fp32

struct Bfloat16 {
  using Storage = u16;  // as it lies in global memory
  using Output = Bfloat16;
  using Plane = Bfloat16;
  static constexpr int PLANES = 1;
  DEVICE static u32 pair(float low, float high) { return ptx::bf16x2(low, high); }
  DEVICE static void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { ptx::mma_m16n8k16_bf16(d, a, b0, b1); }
  DEVICE static float single(Storage x) { return ptx::bits_float(static_cast<u32>(x) << 16); }
  DEVICE static Storage narrow(float x) { return static_cast<u16>(pair(x, 0.0f)); }
};

struct Float16 {
  using Storage = u16;
  using Output = Float16;
  using Plane = Float16;
  static constexpr int PLANES = 1;
  DEVICE static u32 pair(float low, float high) { return ptx::f16x2(low, high); }
  DEVICE static void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { ptx::mma_m16n8k16_f16(d, a, b0, b1); }
  DEVICE static float single(Storage x) { return ptx::float_of_f16(x); }
  DEVICE static Storage narrow(float x) { return static_cast<u16>(pair(x, 0.0f)); }
};

struct Float32 {
  using Storage = float;
  using Plane = Bfloat16;
  static constexpr int PLANES = 3;
  DEVICE static float single(Storage x) { return x; }
  DEVICE static Storage narrow(float x) { return x; }
};

struct Float64 {  // of a bias or a sink
  using Storage = double;
  DEVICE static float single(Storage x) { return static_cast<float>(x); }
  DEVICE static Storage narrow(float x) { return x; }
};

// Far enough from overflow for split: NaN and infinities are not.
DEVICE bool tame(float x) { return fabsf(x) < 1.70141183e38f; }  // 2^127

// The planes of two neighbouring elements, packed. Each is rounded to nearest, which leaves the smallest rest. Elements
// are tame, or NaN.
template <class T>
DEVICE void split(float low, float high, u32 (&planes)[T::PLANES]) {
#pragma unroll
  for (int i = 0; i < T::PLANES - 1; ++i) {
    planes[i] = T::Plane::pair(low, high);
    low -= ptx::bits_float(planes[i] << 16);
    high -= ptx::bits_float(planes[i] & 0xffff0000u);
  }
  planes[T::PLANES - 1] = T::Plane::pair(low, high);
}

// The leading plane of any element. One that would round to infinity is truncated, infinities and NaN stay what they
// are.
DEVICE float leading_plane(float x) {
  const float rounded = ptx::bits_float(ptx::bf16x2(0.0f, x) & 0xffff0000u);
  const bool overflowed = (ptx::float_bits(rounded) & 0x7fffffffu) == 0x7f800000u;
  return overflowed ? ptx::bits_float(ptx::float_bits(x) & 0xffff0000u) : rounded;
}

// What a plane leaves over: nothing when it is not finite, so that infinity times zero cannot make a NaN of an
// infinity.
DEVICE float rest(float x, float plane) {
  return (ptx::float_bits(plane) & 0x7f800000u) == 0x7f800000u ? 0.0f : x - plane;
}

// The planes of two elements of which one is not tame.
template <class T>
DEVICE void split_wild(float low, float high, u32 (&planes)[T::PLANES]) {
#pragma unroll
  for (int i = 0; i < T::PLANES; ++i) {
    const float l = leading_plane(low), h = leading_plane(high);
    planes[i] = T::Plane::pair(l, h);
    low = rest(low, l);
    high = rest(high, h);
  }
}
