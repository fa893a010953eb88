// The CUDA language on the host: included before a unit, so that g++ compiles the sources of cuda/ as they are.
#pragma once
#include <stddef.h>
#include <string.h>

#include <initializer_list>  // NVRTC has it built in

// So it has these. <math.h> would declare them too, but takes g++ as long as half a kernel does.
extern "C" {
float fabsf(float) noexcept;
float fminf(float, float) noexcept;
float fmaxf(float, float) noexcept;
float fmaf(float, float, float) noexcept;
float floorf(float) noexcept;
float ceilf(float) noexcept;
float rintf(float) noexcept;
float sqrtf(float) noexcept;
float expf(float) noexcept;
float exp2f(float) noexcept;
float logf(float) noexcept;
float log2f(float) noexcept;
float tanhf(float) noexcept;
}

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

// Of the running thread: the scheduler sets them.
namespace emu {
struct Index {
  unsigned x, y, z;
};
}  // namespace emu
extern emu::Index threadIdx, blockIdx, blockDim, gridDim;

// CUDA has them for mixed types too, which convert to unsigned; here those do not compile.
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a < b ? b : a; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

namespace emu {

// Calls a kernel, which takes one struct by value.
template <class Params>
void enter(void (*kernel)(Params), const void *params) {
  kernel(*static_cast<const Params *>(params));
}

template <class Params>
constexpr size_t params_bytes(void (*)(Params)) {
  return sizeof(Params);
}

}  // namespace emu

// At the end of a unit: what emu_launch calls, and the size of the struct that it has to be given.
#define EMU_ENTRY(KERNEL)                                                       \
  extern "C" void emu_entry(const void *params) { emu::enter(KERNEL, params); } \
  extern "C" size_t emu_params_bytes() { return emu::params_bytes(KERNEL); }
