// Where the parts of a top-r page lie: rust/core/src/ops/top_r.rs says it, and this file mirrors
// that.
#pragma once

#include <cstdint>

#include "api.h"
#include "fp8.cuh"
#include "packed.cuh"

constexpr float kCodeMiddle = 7.5f;  // codes stand for what is beyond this, times the scale
constexpr float kFp8Reach = 448.0f;

// Bytes of one vector: its bitmap, numbers and scale. Of one side: where numbers and scales begin,
// and where the side ends.
struct TopRPlaces {
  int bitmap, row, scale;
  int numbers, scales, side;
};

__device__ __forceinline__ TopRPlaces top_r_places(const TopRParams& of, int tokens) {
  const int bitmap = (of.channels / of.group + 7) / 8, row = of.kept * of.bits / 8;
  const int scale = of.bits == 16 ? 0 : 2;
  const int numbers = tokens * bitmap, scales = numbers + tokens * row;
  return {bitmap, row, scale, numbers, scales, scales + tokens * scale};
}

// The least scale of which `reach` are not below `largest`; NaN where there is none.
template <typename S>
__device__ __forceinline__ S scale_of(float largest, float reach) {
  const float size = __fdiv_rn(largest, reach);
  const S scale = isfinite(size) ? Scales<S>::above(size) : Scales<S>::nan();
  return isfinite(Scales<S>::widen(scale)) ? scale : Scales<S>::nan();
}

// How many of at most four a lane has there are in the lanes before it, and in all.
struct Before {
  int lanes, all;

  __device__ explicit Before(int own) : lanes(0), all(0) {
    const uint32_t below = (1u << (threadIdx.x % 32)) - 1;
#pragma unroll
    for (int bit = 0; bit < 3; ++bit) {
      const uint32_t set = __ballot_sync(~0u, own >> bit & 1);
      lanes += __popc(set & below) << bit;
      all += __popc(set) << bit;
    }
  }
};

// Kept number i of a vector, in units of its scale.
__device__ __forceinline__ float kept_number(int bits, const unsigned char* numbers, int i) {
  if (bits == 16) {
    const uint32_t high = reinterpret_cast<const uint16_t*>(numbers)[i];
    return __uint_as_float(high << 16);
  }
  if (bits == 8) {
    Fp8 x;
    x.__x = numbers[i];
    return static_cast<float>(x);
  }
  const uint32_t code = numbers[i / 2] >> (4 * (i % 2)) & largest_code(4);
  return static_cast<float>(code) - kCodeMiddle;
}

// Calls put(channel, numbers, kept) with a vector's numbers along four channels, in units of its
// scale and 0 where bit i does not say that number i is kept: by a warp, of all channels below
// `end`, in each lane of every 32nd four.
template <int kGroup, typename Put>
__device__ __forceinline__ void spread_groups(const TopRParams& of, const unsigned char* bitmap,
                                              const unsigned char* numbers, int end, Put put) {
  constexpr int kOf = 4 / kGroup;
  const int groups = of.channels / kGroup;
  int first = 0;  // kept group of these channels
  for (int begin = 0; begin < end; begin += 128) {
    const int channel = begin + threadIdx.x % 32 * 4, group = channel / kGroup;
    const int there = min(max(groups - group, 0), kOf);
    uint32_t marked = 0;
    if (there > 0) marked = bitmap[group / 8] >> (group % 8) & ((1u << there) - 1);
    const Before before(__popc(marked));
    int nth = (first + before.lanes) * kGroup;
    float four[4];
    uint32_t kept = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool is_kept = (marked >> (e / kGroup) & 1) != 0 && nth < static_cast<int>(of.kept);
      four[e] = is_kept ? kept_number(of.bits, numbers, nth) : 0.0f;
      kept |= static_cast<uint32_t>(is_kept) << e;
      nth += is_kept;
    }
    if (channel < end) put(channel, four, kept);
    first += before.all;
  }
}

template <typename Put>
__device__ __forceinline__ void spread_numbers(const TopRParams& of, const unsigned char* bitmap,
                                               const unsigned char* numbers, int end, Put put) {
  if (of.group == 1) spread_groups<1>(of, bitmap, numbers, end, put);
  if (of.group == 2) spread_groups<2>(of, bitmap, numbers, end, put);
  if (of.group == 4) spread_groups<4>(of, bitmap, numbers, end, put);
}
