// Bounds of pages in e4m3 numbers, which stay bounds: rust/core/src/ops/fp8_bounds.rs defines them.
#pragma once

#include "fp8.cuh"

// The bits of the least power of two of which 448 is no less than `greatest`.
__device__ __forceinline__ uint8_t covering_scale(float greatest) {
  const uint32_t bits = __float_as_uint(greatest);
  const int carry = (bits & 0x7fffffu) > 0x600000u ? 1 : 0;
  const int power = static_cast<int>(bits >> 23) - 127 - 8 + carry;
  return static_cast<uint8_t>(min(max(power, -126), 127 - 8) + 127);
}

// The next e4m3 number above the one with these bits, NaN of the largest.
__device__ __forceinline__ uint8_t above(uint8_t bits) {
  if ((bits & 0x7f) == 0) return 1;
  return (bits & 0x80) == 0 ? bits + 1 : bits - 1;
}

enum class Rounding { kDown, kUp, kNearest };

// The e4m3 number for x / factor, a power of two, rounded one way. What no number is on the right
// side of is NaN, and zero has no sign.
template <Rounding kWay>
__device__ __forceinline__ Fp8 round_bound(float x, float factor) {
  Fp8 kept;
  kept.__x = 0x7f;
  if (!isfinite(x)) return kept;
  uint8_t bits = divide_to_fp8(x, factor).__x;
  kept.__x = bits;
  const float back = static_cast<float>(kept) * factor;
  if (kWay == Rounding::kUp && back < x) bits = above(bits);
  // Below a number lies what is above its negative.
  if (kWay == Rounding::kDown && back > x) bits = above(bits ^ 0x80) ^ 0x80;
  const uint8_t size = bits & 0x7f;
  kept.__x = size == 0 || size == 0x7f ? size : bits;
  return kept;
}
