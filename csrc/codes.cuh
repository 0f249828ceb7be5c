// How codes of few bits become operands of products: two of them come behind a power of two, as the
// lowest bits of its halves.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Two words and a third by a table of bits, which the compiler would often make two steps of.
template <int kTable>
__device__ __forceinline__ uint32_t bits_of(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t all;
  asm("lop3.b32 %0, %1, %2, %3, %4;\n" : "=r"(all) : "r"(a), "r"(b), "r"(c), "n"(kTable));
  return all;
}

// (word & mask) ^ other
__device__ __forceinline__ uint32_t masked_xor(uint32_t word, uint32_t mask, uint32_t other) {
  return bits_of<0x6A>(word, mask, other);
}

// (word & mask) | more
__device__ __forceinline__ uint32_t masked_or(uint32_t word, uint32_t mask, uint32_t more) {
  return bits_of<0xEA>(word, mask, more);
}

// (~word & mask) | more
__device__ __forceinline__ uint32_t masked_not_or(uint32_t word, uint32_t mask, uint32_t more) {
  return bits_of<0xAE>(word, mask, more);
}

// Bytes of two words by the nibbles of a selector's lower half, whose highest bits are 0.
__device__ __forceinline__ uint32_t permuted(uint32_t low, uint32_t high, uint32_t select) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(select));
  return bytes;
}

// Two of T in a register. `kPower` are two powers of two, whose lowest bits count ones.
template <typename T>
struct Halves;

template <>
struct Halves<__nv_bfloat16> {
  using Two = __nv_bfloat162;
  static constexpr uint32_t kPower = 0x43004300u;
  static constexpr int kNumber = 128;  // seven bits
  static __device__ __forceinline__ Two of(float x) { return __float2bfloat162_rn(x); }
};

template <>
struct Halves<__half> {
  using Two = __half2;
  static constexpr uint32_t kPower = 0x64006400u;
  static constexpr int kNumber = 1024;  // ten
  static __device__ __forceinline__ Two of(float x) { return __float2half2_rn(x); }
};

template <typename T>
__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
  using Two = typename Halves<T>::Two;
  const Two product = __hmul2(reinterpret_cast<const Two&>(a), reinterpret_cast<const Two&>(b));
  return reinterpret_cast<const uint32_t&>(product);
}

template <typename T>
__device__ __forceinline__ uint32_t difference(uint32_t a, uint32_t b) {
  using Two = typename Halves<T>::Two;
  const Two rest = __hsub2(reinterpret_cast<const Two&>(a), reinterpret_cast<const Two&>(b));
  return reinterpret_cast<const uint32_t&>(rest);
}

template <typename T>
__device__ __forceinline__ uint32_t less(uint32_t two, float number) {
  using Two = typename Halves<T>::Two;
  const Two both = Halves<T>::of(number);
  return difference<T>(two, reinterpret_cast<const uint32_t&>(both));
}

// The lower or upper two bytes of a word behind powers of two.
template <typename T>
__device__ __forceinline__ uint32_t behind_power(uint32_t bytes, int upper) {
  return permuted(bytes, Halves<T>::kPower, upper == 0 ? 0x5150 : 0x5352);
}

// Codes of so many bits as numbers of T, counted from their middle: exact, and as rounded factors
// meet them, small.
template <typename T, int kBits>
struct Codes {
  static constexpr int kMiddle = 1 << (kBits - 1);
  // 1024 would drown what f16 can tell apart, and behind 128 there is no room for eight bits: what
  // stands before codes is subtracted there at once, and elsewhere left to a product.
  static constexpr bool kAdds = Halves<T>::kNumber == 128 && kBits < 8;
  static constexpr float kAdded = kAdds ? Halves<T>::kNumber + kMiddle : 0;

  // Codes in the lowest bits of either half of a word.
  static __device__ __forceinline__ uint32_t two(uint32_t word) {
    constexpr uint32_t kMask = ((1u << kBits) - 1) * 0x00010001u;
    return counted(masked_or(word, kMask, Halves<T>::kPower));
  }

  // Codes that are the lower or upper two bytes of a word.
  static __device__ __forceinline__ uint32_t two_bytes(uint32_t word, int upper) {
    static_assert(kBits == 8, "bytes");
    return counted(behind_power<T>(word, upper));
  }

 private:
  static __device__ __forceinline__ uint32_t counted(uint32_t both) {
    if constexpr (kAdds) {
      return both;
    } else if constexpr (Halves<T>::kNumber == 128) {
      // The eighth bit says whether 128 is subtracted from what the other seven are, or 256.
      return difference<T>(both & 0x437F437Fu,
                           masked_not_or(both, 0x00800080u, Halves<T>::kPower));
    } else {
      return less<T>(both, static_cast<float>(Halves<T>::kNumber + kMiddle));
    }
  }
};

// The bytes of two tokens by channels: those of channels 0 and 1, or of 2 and 3, of either.
__device__ __forceinline__ uint32_t by_channels(uint32_t one, uint32_t other, int upper) {
  return permuted(one, other, upper == 0 ? 0x5140 : 0x7362);
}

// Of each of four channels the bytes of four tokens, by the four bytes of each token.
__device__ __forceinline__ void transpose_bytes(uint32_t (&channels)[4], const uint32_t (&x)[4]) {
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const uint32_t first = by_channels(x[0], x[1], upper);
    const uint32_t second = by_channels(x[2], x[3], upper);
    channels[2 * upper] = permuted(first, second, 0x5410);
    channels[2 * upper + 1] = permuted(first, second, 0x7632);
  }
}
