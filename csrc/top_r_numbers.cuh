// Vectors of top-r pages as a lane takes them: eight channels at a time, zeros where nothing is
// kept, two of T a register.
#pragma once

#include <cstdint>

#include "fp8.cuh"
#include "packed.cuh"

// What numbers are stored as; `bits` of TopRParams.
constexpr int kBf16Numbers = 16, kFp8Numbers = 8, kInt4Numbers = 4;

// The bits of a vector's next channels, and where its next number lies: bits of the page for codes
// of four, bytes for others.
struct Kept {
  uint32_t mask;
  int at;
};

// By the bits of eight channels: of the eight codes that follow, which one each channel has, as two
// selectors of a permutation of bytes. Even codes are bytes 0 to 3 there and odd ones 4 to 7; what
// is not kept selects the last, which is free then.
__device__ __forceinline__ uint32_t selectors_of(int mask) {
  uint32_t selectors = 0;
  int nth = 0;
#pragma unroll 1
  for (int channel = 0; channel < 8; ++channel) {
    const bool kept = (mask >> channel & 1) != 0;
    const uint32_t from = kept ? nth % 2 * 4 + nth / 2 : 7;
    selectors |= from << (4 * channel);
    nth += kept ? 1 : 0;
  }
  return selectors;
}
constexpr int kSelectors = 256;

// How bytes become numbers of T: what is more than a power of two is the byte.
template <typename T>
struct Bytes;

template <>
struct Bytes<__nv_bfloat16> {
  static constexpr uint32_t kHigh = 0x43434343u;  // of 128
  static constexpr float kAdded = 128;
  static __device__ __forceinline__ uint32_t less(uint32_t two, float number) {
    const __nv_bfloat162 x = __hsub2(reinterpret_cast<const __nv_bfloat162&>(two),
                                     __float2bfloat162_rn(number));
    return reinterpret_cast<const uint32_t&>(x);
  }
};

template <>
struct Bytes<__half> {
  static constexpr uint32_t kHigh = 0x64646464u;  // of 1024
  static constexpr float kAdded = 1024;
  static __device__ __forceinline__ uint32_t less(uint32_t two, float number) {
    const __half2 x =
        __hsub2(reinterpret_cast<const __half2&>(two), __float2half2_rn(number));
    return reinterpret_cast<const uint32_t&>(x);
  }
};

// to[i]: channels 2i and 2i + 1 of the next eight, each times `kUnit`.
template <typename T, int kBits>
struct Numbers;

// Codes as odd numbers from −15 to 15; 0 is what lies between.
template <typename T>
struct Numbers<T, kInt4Numbers> {
  static constexpr float kUnit = 0.5f;
  static constexpr int kPlaces = 8;  // of a byte, that `at` counts
  static constexpr int kSize = 4;

  static __device__ __forceinline__ void next(uint32_t (&to)[4], Kept& of,
                                              const unsigned char* page,
                                              const uint32_t* selectors) {
    const uint32_t mask = of.mask & 0xFF, select = selectors[mask];
    const auto* words = reinterpret_cast<const uint32_t*>(page) + (of.at >> 5);
    const uint32_t codes = __funnelshift_r(words[0], words[1], of.at);
    // Twice each code.
    const uint32_t even = codes << 1 & 0x1E1E1E1Eu;
    uint32_t odd = codes >> 3 & 0x1E1E1E1Eu;
    if (mask != 0xFF) odd = (odd & 0x00FFFFFFu) | 0x0F000000u;
    const uint32_t first = __byte_perm(even, odd, select);
    const uint32_t second = __byte_perm(even, odd, select >> 16);
    constexpr uint32_t kHigh = Bytes<T>::kHigh;
    constexpr float kMiddle = Bytes<T>::kAdded + 15;
    to[0] = Bytes<T>::less(__byte_perm(first, kHigh, 0x4140), kMiddle);
    to[1] = Bytes<T>::less(__byte_perm(first, kHigh, 0x4342), kMiddle);
    to[2] = Bytes<T>::less(__byte_perm(second, kHigh, 0x4140), kMiddle);
    to[3] = Bytes<T>::less(__byte_perm(second, kHigh, 0x4342), kMiddle);
    of.mask >>= 8;
    of.at += 4 * __popc(mask);
  }
};

template <>
struct Numbers<__nv_bfloat16, kBf16Numbers> {
  static constexpr float kUnit = 1;
  static constexpr int kPlaces = 1;
  static constexpr int kSize = 2;

  static __device__ __forceinline__ void next(uint32_t (&to)[4], Kept& of,
                                              const unsigned char* page, const uint32_t*) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t low = 0, high = 0;
      if (of.mask >> (2 * i) & 1) {
        low = *reinterpret_cast<const uint16_t*>(page + of.at);
        of.at += 2;
      }
      if (of.mask >> (2 * i + 1) & 1) {
        high = *reinterpret_cast<const uint16_t*>(page + of.at);
        of.at += 2;
      }
      to[i] = low | high << 16;
    }
    of.mask >>= 8;
  }
};

template <typename T>
struct Numbers<T, kFp8Numbers> {
  static constexpr float kUnit = 1;
  static constexpr int kPlaces = 1;
  static constexpr int kSize = 1;

  static __device__ __forceinline__ void next(uint32_t (&to)[4], Kept& of,
                                              const unsigned char* page, const uint32_t*) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t low = 0, high = 0;
      if (of.mask >> (2 * i) & 1) low = page[of.at++];
      if (of.mask >> (2 * i + 1) & 1) high = page[of.at++];
      to[i] = widen_two<T>(low | high << 8);
    }
    of.mask >>= 8;
  }
};

// Bits of groups as bits of channels: each bit becomes 1 << shift of them.
__device__ __forceinline__ uint32_t channel_bits(uint32_t groups, int shift) {
  uint32_t x = groups;
  if (shift == 1) {
    x = (x | x << 8) & 0x00FF00FFu;
    x = (x | x << 4) & 0x0F0F0F0Fu;
    x = (x | x << 2) & 0x33333333u;
    x = (x | x << 1) & 0x55555555u;
    x |= x << 1;
  } else if (shift == 2) {
    x = (x | x << 12) & 0x000F000Fu;
    x = (x | x << 6) & 0x03030303u;
    x = (x | x << 3) & 0x11111111u;
    x *= 15;
  }
  return x;
}

// The lowest bits, no more than so many. Sound bitmaps have no others.
__device__ __forceinline__ uint32_t lowest_bits(uint32_t bits, int most) {
#pragma unroll 1
  while (__popc(bits) > most) bits &= ~(0x80000000u >> __clz(bits));
  return bits;
}
