// Where the parts of a top-r page lie, and what the basis of a block is: rust/core/src/ops/top_r.rs
// and bases.rs say it, and this file mirrors them.
#pragma once

#include <cstdint>

#include "api.h"
#include "fp8.cuh"
#include "packed.cuh"

constexpr int kKeySide = 0, kValueSide = 1;
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

// Of one page and side: mean [D], directions [C, D].
struct Basis {
  const float *mean, *directions;
};

__device__ __forceinline__ Basis basis_at(const TopRParams& of, int number, int rank, int side,
                                          int dim) {
  const int64_t half = int64_t{of.channels + 1} * dim;
  const float* from = of.bases + (2 * (int64_t{number} * of.pages + rank) + side) * half;
  return {from, from + dim};
}

// The number of the basis of the block that begins at a page; −1 where there is none, or none with
// a page of this rank. The table may lie on the device alone, where no host has looked at it.
__device__ __forceinline__ int basis_number(const TopRParams& of, int64_t block, int rank) {
  const int number = __ldg(of.basis_of + block);
  const bool there = number >= 0 && number < static_cast<int>(of.count) &&
                     rank < static_cast<int>(of.pages);
  return there ? number : -1;
}

// The least scale of which `reach` are not below `largest`; NaN where there is none.
template <typename S>
__device__ __forceinline__ S scale_of(float largest, float reach) {
  const float size = __fdiv_rn(largest, reach);
  const S scale = isfinite(size) ? Scales<S>::above(size) : Scales<S>::nan();
  return isfinite(Scales<S>::widen(scale)) ? scale : Scales<S>::nan();
}
