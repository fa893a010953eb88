// Integers of any width in global memory: lengths, and bounds of sequences.
#pragma once
#include "device.cuh"

struct Integers {
  const void *x;  // may be null
  i64 stride;     // in elements
  int bytes;      // of an element: 1, 2, 4 or 8
  int is_signed;

  // Element i; an unsigned one of 64 bits wraps.
  DEVICE i64 operator[](i64 i) const {
    const i64 at = i * stride;
    if (bytes == 8) return static_cast<const i64 *>(x)[at];
    if (bytes == 4) return is_signed ? static_cast<const int *>(x)[at] : i64{static_cast<const u32 *>(x)[at]};
    if (bytes == 2) return is_signed ? static_cast<const short *>(x)[at] : static_cast<const u16 *>(x)[at];
    return is_signed ? static_cast<const signed char *>(x)[at] : static_cast<const unsigned char *>(x)[at];
  }

  // Element i, or the nearer of the bounds 0 <= low <= high.
  DEVICE i64 clipped(i64 i, i64 low, i64 high) const {
    const i64 value = (*this)[i];
    if (value > high || (value < 0 && !is_signed)) return high;
    return value < low ? low : value;
  }
};
