// Numbers of top-r vectors as a lane takes them, of bf16 or fp8: eight channels at a time, zeros
// where nothing is kept, as operands of products.
#pragma once

#include <cstdint>

#include "codes.cuh"
#include "fp8.cuh"
#include "packed.cuh"

// What numbers are stored as, that are no codes; `bits` of TopRParams.
constexpr int kBf16Numbers = 16, kFp8Numbers = 8;

// A lane's numbers of `kEights` times eight channels of a vector, of whole bytes, which are kept by
// the bits of a mask. `take<i>` has eight of them, as `Eight`; `channels` are two of T of channels
// 2i and 2i + 1, `tokens` of the same channel of two vectors, for channels 2i and 2i + 1. All are
// numbers over the scale.
template <typename T, int kBits, int kEights>
class Numbers {
  static constexpr int kBytes = kBits / 8;

 public:
  struct Eight {
    uint32_t two[4];
  };

  __device__ __forceinline__ Numbers(uint32_t kept, const unsigned char* page, int row, int first)
      : mask(kept), next(page + row + kBytes * first) {}

  template <int kEight>
  __device__ __forceinline__ Eight take() {
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
