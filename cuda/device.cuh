// What every layer shares: the function qualifier and the integer names. A host compiler that tests the policies
// defines DEVICE itself.
#pragma once

#ifndef DEVICE
#define DEVICE __device__ __forceinline__
#endif

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;
