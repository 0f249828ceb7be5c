// e4m3 numbers, as caches of fp8 hold them: one byte each, NaN but no infinity. f16 and bf16 hold
// every one of them, so widening is exact.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

using Fp8 = __nv_fp8_e4m3;

// The two e4m3 numbers in the low half of `bytes` as two of T, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t widen_two(uint32_t bytes);

template <>
__device__ __forceinline__ uint32_t widen_two<__half>(uint32_t bytes) {
  const __half2_raw two =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bytes), __NV_E4M3);
  return reinterpret_cast<const uint32_t&>(two);
}

template <>
__device__ __forceinline__ uint32_t widen_two<__nv_bfloat16>(uint32_t bytes) {
  const uint32_t two = widen_two<__half>(bytes);
  const __nv_bfloat162 wide = __float22bfloat162_rn(__half22float2(
      reinterpret_cast<const __half2&>(two)));
  return reinterpret_cast<const uint32_t&>(wide);
}

// The e4m3 number nearest to x / scale, rounded once: the quotient is rounded to odd before, which
// keeps what decides a tie. What is too large becomes the largest, 448.
__device__ __forceinline__ Fp8 divide_to_fp8(float x, float scale) {
  float quotient = __fdiv_rz(x, scale);
  if (isfinite(quotient) && fmaf(-quotient, scale, x) != 0.0f) {
    quotient = __uint_as_float(__float_as_uint(quotient) | 1u);
  }
  return Fp8(quotient);  // saturates
}

// A power of two as PageScale of rust/core/src/ops/page_scale.rs keeps it: 2^(bits − 127).
__device__ __forceinline__ float power_of(uint8_t bits) { return ldexpf(1.0f, bits - 127); }
