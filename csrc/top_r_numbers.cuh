// Vectors of top-r pages as a lane takes them: eight channels at a time, zeros where nothing is
// kept, as operands of products.
#pragma once

#include <cstdint>

#include "codes.cuh"
#include "fp8.cuh"
#include "packed.cuh"

// What numbers are stored as; `bits` of TopRParams.
constexpr int kBf16Numbers = 16, kFp8Numbers = 8, kInt4Numbers = 4;

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

// A lane's numbers of `kEights` times eight channels of a vector, which are kept by the bits of a
// mask. `take<i>` has eight of them, as `Eight`; `channels` makes two of T of channels 2i and
// 2i + 1, `tokens` of the same channel of two vectors, for channels 2i and 2i + 1. All are numbers
// over `kUnit` times the scale.
template <typename T, int kBits, int kEights>
class Numbers;

// Codes as odd numbers from −15 to 15; 0 is what lies between.
template <typename T, int kEights>
class Numbers<T, kInt4Numbers, kEights> {
 public:
  static constexpr float kUnit = 0.5f;
  struct Eight {
    uint32_t bytes[2];  // twice each code, by channels
  };

  // `row`: where the vector's numbers begin in the page; `first`: how many come before. Reads a
  // word more than it needs: behind codes lie scales.
  __device__ __forceinline__ Numbers(uint32_t kept, const unsigned char* page, int row, int first)
      : mask(kept) {
    const int at = 8 * row + 4 * first;
    const auto* words = reinterpret_cast<const uint32_t*>(page) + (at >> 5);
    uint32_t word = words[0];
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      const uint32_t after = words[i + 1];
      codes[i] = __funnelshift_r(word, after, at);
      word = after;
    }
  }

  template <int kEight>
  __device__ __forceinline__ Eight take(const uint32_t* selectors) {
    constexpr uint32_t kAll = 0xFFu << (8 * kEight);
    const uint32_t kept = mask & kAll, select = selectors[mask >> (8 * kEight) & 0xFF];
    const uint32_t even = codes[0] << 1 & 0x1E1E1E1Eu, shifted = codes[0] >> 3;
    // What is not kept is the last byte, and that is 15 unless all eight are kept.
    uint32_t odd = (shifted & 0x001E1E1Eu) | 0x0F000000u;
    if (kept == kAll) odd = shifted & 0x1E1E1E1Eu;
    if constexpr (kEight + 1 < kEights) {
      const int bits = 4 * __popc(kept);
#pragma unroll
      for (int i = 0; i < kEights - 1 - kEight; ++i) {
        codes[i] = __funnelshift_rc(codes[i], codes[i + 1], bits);
      }
    }
    return {{permuted(even, odd, select), permuted(even, odd, select >> 16)}};
  }

  static __device__ __forceinline__ uint32_t channels(const Eight& of, int i) {
    return widened(of.bytes[i / 2], i % 2);
  }

  static __device__ __forceinline__ uint2 tokens(const Eight& one, const Eight& other, int i) {
    const uint32_t both = by_channels(one.bytes[i / 2], other.bytes[i / 2], i % 2);
    return {widened(both, 0), widened(both, 1)};
  }

 private:
  const uint32_t mask;
  uint32_t codes[kEights];

  // The lower or upper two bytes.
  static __device__ __forceinline__ uint32_t widened(uint32_t bytes, int upper) {
    return less<T>(behind_power<T>(bytes, upper), Halves<T>::kNumber + 15);
  }
};

// Numbers that are whole bytes: each is read by itself.
template <typename T, int kBits, int kEights>
class Numbers {
  static constexpr int kBytes = kBits / 8;

 public:
  static constexpr float kUnit = 1;
  struct Eight {
    uint32_t two[4];
  };

  __device__ __forceinline__ Numbers(uint32_t kept, const unsigned char* page, int row, int first)
      : mask(kept), next(page + row + kBytes * first) {}

  template <int kEight>
  __device__ __forceinline__ Eight take(const uint32_t*) {
    Eight of;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t low = 0, high = 0;
      if (mask >> (8 * kEight + 2 * i) & 1) low = read();
      if (mask >> (8 * kEight + 2 * i + 1) & 1) high = read();
      of.two[i] = widened(low, high);
    }
    return of;
  }

  static __device__ __forceinline__ uint32_t channels(const Eight& of, int i) { return of.two[i]; }

  static __device__ __forceinline__ uint2 tokens(const Eight& one, const Eight& other, int i) {
    return {permuted(one.two[i], other.two[i], 0x5410),
            permuted(one.two[i], other.two[i], 0x7632)};
  }

 private:
  const uint32_t mask;
  const unsigned char* next;

  __device__ __forceinline__ uint32_t read() {
    const unsigned char* from = next;
    next += kBytes;
    return kBits == kBf16Numbers ? *reinterpret_cast<const uint16_t*>(from) : *from;
  }

  static __device__ __forceinline__ uint32_t widened(uint32_t low, uint32_t high) {
    if constexpr (kBits == kBf16Numbers) return low | high << 16;
    else return widen_two<T>(low | high << 8);
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
