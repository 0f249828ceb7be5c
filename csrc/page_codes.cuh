// How a lane takes the codes of INT4 and INT8 pages as operands: packed_format.rs says where they
// lie.
#pragma once

#include "codes.cuh"
#include "tensor_core.cuh"

// `key_pair` are channels 2i and 2i + 1 of those that a lane has of a key. `values` calls
// multiply(k, a) with operands of 16 tokens' values, of which row lane / 4 + 8 · half is
// `channel(lane, k, half)`.
template <typename T, int D, int kBits>
struct PageCodes;

// Laid as lanes take them.
template <typename T, int D>
struct PageCodes<T, D, 4> {
  using Code = Codes<T, 4>;
  static constexpr int kWords = D / 32;  // of a lane's channels of a key

  static __device__ __forceinline__ uint32_t key_pair(const uint32_t (&words)[kWords], int i) {
    return Code::two(words[i / 4] >> (4 * (i % 4)));
  }

  static __device__ __forceinline__ int channel(int lane, int k, int half) {
    return 16 * k + 8 * half + lane / 4;
  }

  template <typename Multiply>
  static __device__ __forceinline__ void values(const unsigned char* codes, int lane,
                                                Multiply multiply) {
    const auto* words = reinterpret_cast<const uint4*>(codes) + lane;
#pragma unroll
    for (int four = 0; four < D / 64; ++four) {
      const uint4 x4 = words[32 * four];
      const uint32_t x[4] = {x4.x, x4.y, x4.z, x4.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t a[4] = {Code::two(x[i]), Code::two(x[i] >> 4), Code::two(x[i] >> 8),
                               Code::two(x[i] >> 12)};
        multiply(4 * four + i, a);
      }
    }
  }
};

// Token by token, a byte each.
template <typename T, int D>
struct PageCodes<T, D, 8> {
  using Code = Codes<T, 8>;
  static constexpr int kWords = D / 16;
  static constexpr int kOwn = D / 8;  // channels of a value that a lane takes

  static __device__ __forceinline__ uint32_t key_pair(const uint32_t (&words)[kWords], int i) {
    return Code::two_bytes(words[i / 2], i % 2);
  }

  static __device__ __forceinline__ int channel(int lane, int k, int half) {
    return kOwn * (lane / 4) + 2 * k + half;
  }

  template <typename Multiply>
  static __device__ __forceinline__ void values(const unsigned char* codes, int lane,
                                                Multiply multiply) {
    const unsigned char* own = codes + lane % 4 * 2 * D + kOwn * (lane / 4);
    uint32_t x[4][kOwn / 4];  // of tokens 2t, 2t + 1, 2t + 8 and 2t + 9
#pragma unroll
    for (int i = 0; i < 4; ++i) load_words(x[i], own + (i % 2 + 8 * (i / 2)) * D);
#pragma unroll
    for (int k = 0; k < kOwn / 2; ++k) {
      const uint32_t early = by_channels(x[0][k / 2], x[1][k / 2], k % 2);
      const uint32_t late = by_channels(x[2][k / 2], x[3][k / 2], k % 2);
      const uint32_t a[4] = {Code::two_bytes(early, 0), Code::two_bytes(early, 1),
                             Code::two_bytes(late, 0), Code::two_bytes(late, 1)};
      multiply(k, a);
    }
  }
};
