// Bitmaps of top-r vectors as lanes take them: the bits of so many channels, and no more of them
// than are kept.
#pragma once

#include <cstdint>

#include "api.h"
#include "hopper.cuh"

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

// Leaves the lowest bits of a bitmap, no more than so many. Rare: not inlined.
__device__ __noinline__ void cut_bits(unsigned char* bitmap, int bytes, int most) {
#pragma unroll 1
  for (int i = 0; i < bytes; ++i) {
    uint32_t own = bitmap[i];
#pragma unroll 1
    while (__popc(own) > most) own &= ~(0x80000000u >> __clz(own));
    bitmap[i] = static_cast<unsigned char>(own);
    most -= __popc(own);
  }
#if __CUDA_ARCH__ >= 900
  show_to_async_units();
#endif
  __syncwarp();
}

// Of vectors of D channels. `kWhole`: each channel has a bit of its own.
template <int D, bool kWhole>
class GroupBits {
 public:
  __device__ explicit GroupBits(const TopRParams& params)
      : of(params), log_group(kWhole ? 0 : __ffs(params.group) - 1) {}

  __device__ int shift() const { return kWhole ? 0 : log_group; }
  __device__ int channels() const { return kWhole ? D : static_cast<int>(of.channels); }

  // Of the groups of `kCount` channels from the `nth` such part of a token's on.
  template <int kCount>
  __device__ __forceinline__ uint32_t at(const unsigned char* side, int token, int nth) const {
    if constexpr (kWhole) {
      const unsigned char* own = side + token * (D / 8) + nth * (kCount / 8);
      if constexpr (kCount == 32) return *reinterpret_cast<const uint32_t*>(own);
      else if constexpr (kCount == 16) return *reinterpret_cast<const uint16_t*>(own);
      else return *own;
    } else {
      const int groups = static_cast<int>(of.channels) >> log_group;
      const int first = kCount * nth >> log_group;
      const int left = min(groups - first, kCount >> log_group);
      const int bit = 8 * token * bytes() + first;
      const auto* words = reinterpret_cast<const uint32_t*>(side) + (bit >> 5);
      const uint32_t bits = __funnelshift_r(words[0], words[1], bit);
      return left <= 0 ? 0u : bits & (~0u >> (32 - left));
    }
  }

  // Bits of the `nth` so many eights of a token's channels, as bits of channels.
  template <int kEights>
  __device__ __forceinline__ void take(uint32_t (&masks)[kEights], const unsigned char* side,
                                       int token, int nth) const {
    if constexpr (kWhole) {
#pragma unroll
      for (int i = 0; i < kEights; ++i) masks[i] = side[token * (D / 8) + nth * kEights + i];
    } else {
      const uint32_t all = channels_of(at<8 * kEights>(side, token, nth));
#pragma unroll
      for (int i = 0; i < kEights; ++i) masks[i] = all >> (8 * i) & 0xFF;
    }
  }

  // Takes off what a page's bitmaps say beyond what is kept, of which there are no numbers: by a
  // warp, of a page in shared memory. Sound pages have none.
  __device__ __forceinline__ void mend(unsigned char* side, int tokens) const {
#pragma unroll 1
    for (int first = 0; first < tokens; first += 32) {
      const int token = first + static_cast<int>(threadIdx.x % 32);
      const bool sound = token >= tokens || kept_of(side, token) <= of.kept >> shift();
      if (__all_sync(~0u, sound)) continue;
      cut_bits(side + token * bytes(), token < tokens ? bytes() : 0, of.kept >> shift());
    }
  }

  __device__ __forceinline__ uint32_t channels_of(uint32_t groups) const {
    return kWhole ? groups : channel_bits(groups, log_group);
  }

 private:
  const TopRParams& of;
  const int log_group;

  __device__ __forceinline__ int bytes() const {
    return kWhole ? D / 8 : ((static_cast<int>(of.channels) >> log_group) + 7) / 8;
  }

  // Groups that a token's bitmap says are kept.
  __device__ __forceinline__ uint32_t kept_of(const unsigned char* side, int token) const {
    uint32_t count = 0;
    if constexpr (kWhole) {
      const auto* words = reinterpret_cast<const uint2*>(side + token * (D / 8));
#pragma unroll
      for (int i = 0; i < D / 64; ++i) count += __popc(words[i].x) + __popc(words[i].y);
    } else if (bytes() % 4 == 0) {
      const auto* words = reinterpret_cast<const uint32_t*>(side + token * bytes());
      const int groups = static_cast<int>(of.channels) >> log_group;
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        const int behind = max(32 * (i + 1) - groups, 0);  // bits that no group has
        if (behind < 32) count += __popc(words[i] << behind);
      }
    } else {
#pragma unroll 1
      for (int i = 0; 32 * i < channels(); ++i) count += __popc(at<32>(side, token, i));
    }
    return count;
  }
};
