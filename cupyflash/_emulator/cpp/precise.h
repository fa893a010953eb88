// Subnormals: plain fp32 arithmetic of a kernel makes them zero (NVRTC's -ftz=true), tensor cores keep them. Internal
// to the runtime.
#pragma once
#include <cstdint>

namespace emu {

#if defined(__x86_64__)
inline uint32_t float_mode() { return __builtin_ia32_stmxcsr(); }
inline void set_float_mode(uint32_t mode) { __builtin_ia32_ldmxcsr(mode); }
constexpr uint32_t FLUSHING = 1u << 15 | 1u << 6;  // flush to zero, denormals are zero
constexpr uint32_t INVALID_MASKED = 1u << 7;       // inf - inf or a signalling NaN makes NaN, and no trap
#else                                              // subnormals are kept
inline uint32_t float_mode() { return 0; }
inline void set_float_mode(uint32_t) {}
constexpr uint32_t FLUSHING = 0, INVALID_MASKED = 0;
#endif

// Until it is destroyed floats are as a kernel sees them, or as they are on the host.
class FloatMode {
 public:
  explicit FloatMode(uint32_t mode) : before_(float_mode()) { set_float_mode(mode); }
  ~FloatMode() { set_float_mode(before_); }
  FloatMode(const FloatMode &) = delete;
  FloatMode &operator=(const FloatMode &) = delete;

 private:
  uint32_t before_;
};

struct FlushingFloats : FloatMode {
  FlushingFloats() : FloatMode(float_mode() | FLUSHING) {}
};
struct PreciseFloats : FloatMode {
  PreciseFloats() : FloatMode((float_mode() & ~FLUSHING) | INVALID_MASKED) {}
};

inline void trap_invalid(bool on) {
  set_float_mode(on ? float_mode() & ~INVALID_MASKED : float_mode() | INVALID_MASKED);
}

}  // namespace emu
