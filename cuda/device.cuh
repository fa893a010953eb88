// What every layer shares: the function qualifier, the integer names and two constants. A host compiler that tests the
// policies defines DEVICE itself.
#pragma once

#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
