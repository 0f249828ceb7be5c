// Where the parts of a packed page lie: rust/core/src/ops/packed_format.rs says it, and this file
// mirrors that. All offsets count bytes of a page of P tokens and D channels.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// The largest code of so many bits.
__host__ __device__ constexpr int largest_code(int bits) { return (1 << bits) - 1; }

struct PackedPlaces {
  int value_codes, key_scales, key_zeros, value_steps, bytes;
};

// Of a page of codes of so many bits.
template <int kBits>
__host__ __device__ __forceinline__ PackedPlaces places_of(int tokens, int dim) {
  const int value_codes = tokens * dim * kBits / 8, key_scales = 2 * value_codes;
  const int key_zeros = key_scales + 2 * dim, value_steps = key_zeros + 2 * dim;
  return {value_codes, key_scales, key_zeros, value_steps, value_steps + 4 * tokens};
}

// Scales and zeros as they are stored.
template <typename S>
struct Scales;

template <>
struct Scales<__nv_bfloat16> {
  static __device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ __forceinline__ __nv_bfloat16 below(float x) { return __float2bfloat16_rd(x); }
  static __device__ __forceinline__ __nv_bfloat16 above(float x) { return __float2bfloat16_ru(x); }
  static __device__ __forceinline__ __nv_bfloat16 nan() {
    return __ushort_as_bfloat16(static_cast<unsigned short>(0x7FC0));
  }
};

template <>
struct Scales<__half> {
  static __device__ __forceinline__ float widen(__half x) { return __half2float(x); }
  static __device__ __forceinline__ __half below(float x) { return __float2half_rd(x); }
  static __device__ __forceinline__ __half above(float x) { return __float2half_ru(x); }
  static __device__ __forceinline__ __half nan() {
    return __ushort_as_half(static_cast<unsigned short>(0x7E00));
  }
};

// Least and greatest of numbers; neither once one of them is NaN or infinite.
struct Spread {
  float least, greatest;

  __device__ __forceinline__ void take_in(float x) {
    const bool finite = isfinite(x) && !isnan(least);
    least = finite ? fminf(least, x) : NAN;
    greatest = fmaxf(greatest, x);
  }
  __device__ __forceinline__ void take_in(const Spread& other) {
    least = isnan(least) || isnan(other.least) ? NAN : fminf(least, other.least);
    greatest = fmaxf(greatest, other.greatest);
  }
};
__device__ __forceinline__ Spread no_spread() { return {INFINITY, -INFINITY}; }

// `Step` of rust/core/src/ops/step.rs, with the same arithmetic in the same order.
template <typename S>
struct Step {
  S scale, zero;
};

template <typename S>
__device__ __forceinline__ Step<S> step_of(const Spread& spread, int largest) {
  const Step<S> nan = {Scales<S>::nan(), Scales<S>::nan()};
  if (!(isfinite(spread.least) && isfinite(spread.greatest))) return nan;
  const S zero = Scales<S>::below(__fadd_rn(spread.least, 0.0f));
  const float wide = Scales<S>::widen(zero);
  const float size =
      __fdiv_rn(__fsub_rn(__fadd_rn(spread.greatest, 0.0f), wide), static_cast<float>(largest));
  if (!(isfinite(wide) && isfinite(size))) return nan;
  const S scale = Scales<S>::above(size);
  return isfinite(Scales<S>::widen(scale)) ? Step<S>{scale, zero} : nan;
}

// The same as numbers: x is scale, y is zero.
template <typename S>
__device__ __forceinline__ float2 widen(const Step<S>& step) {
  return {Scales<S>::widen(step.scale), Scales<S>::widen(step.zero)};
}

// The code nearest to a number of steps, of two the even one.
__device__ __forceinline__ uint32_t nearest_code(float steps, int largest) {
  return static_cast<uint32_t>(fminf(fmaxf(rintf(steps), 0.0f), static_cast<float>(largest)));
}

__device__ __forceinline__ uint32_t code_of(float x, const float2& step, int largest) {
  if (!(step.x > 0)) return 0;
  return nearest_code(__fdiv_rn(__fsub_rn(x, step.y), step.x), largest);
}

__device__ __forceinline__ float number_of(uint32_t code, const float2& step) {
  return __fmaf_rn(step.x, static_cast<float>(code), step.y);
}

// Words that a lane finds beside each other among the values' codes of four bits.
__host__ __device__ __forceinline__ int value_run(int dim) {
  const int tiles = dim / 16;
  return tiles % 4 == 0 ? 4 : 2 - tiles % 2;
}
