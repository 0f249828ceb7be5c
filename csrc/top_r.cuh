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
