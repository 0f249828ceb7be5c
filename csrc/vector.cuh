// Short vectors of elements that move in one 16-byte access, and arithmetic on their elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fp8.cuh"

// N elements that are loaded and stored together.
template <typename T, int N>
struct alignas(sizeof(T) * N >= 16 ? 16 : sizeof(T) * N) Pack {
  T at[N];
};

template <typename T, int N>
__device__ __forceinline__ Pack<T, N> load(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

// Stores to global memory. A plain assignment would be split: CUDA's half types have constructors,
// so the compiler copies such a pack element by element. The intrinsic takes a whole 16-byte word,
// and marks it as not to be read again soon.
template <typename T, int N>
__device__ __forceinline__ void store(T* to, const Pack<T, N>& values) {
  if constexpr (sizeof(values) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(values) / 16); ++i) {
      __stcs(reinterpret_cast<uint4*>(to) + i, reinterpret_cast<const uint4*>(&values)[i]);
    }
  } else {
    *reinterpret_cast<Pack<T, N>*>(to) = values;
  }
}

// What an element is computed in, and the one rounding back. f32 elements are rotated in f64: with
// f32 products a rotation that cancels would lose bits that the element can hold.
template <typename T>
struct Arithmetic;

template <>
struct Arithmetic<float> {
  using Wide = double;
  static __device__ __forceinline__ double widen(float x) { return x; }
  static __device__ __forceinline__ float round(double x) { return static_cast<float>(x); }
};

template <>
struct Arithmetic<__half> {
  using Wide = float;
  static __device__ __forceinline__ float widen(__half x) { return __half2float(x); }
  static __device__ __forceinline__ __half round(float x) { return __float2half_rn(x); }
};

template <>
struct Arithmetic<__nv_bfloat16> {
  using Wide = float;
  static __device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
  static __device__ __forceinline__ __nv_bfloat16 round(float x) { return __float2bfloat16_rn(x); }
};

// Rounding saturates.
template <>
struct Arithmetic<Fp8> {
  using Wide = float;
  static __device__ __forceinline__ float widen(Fp8 x) { return static_cast<float>(x); }
  static __device__ __forceinline__ Fp8 round(float x) { return Fp8(x); }
};
