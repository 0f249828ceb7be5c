// The bases of texts on the device: rust/core/src/ops/bases.rs says what they are.
#pragma once

#include <cstdint>

#include "api.h"

constexpr int kKeySide = 0, kValueSide = 1;

// What a page's keys, or its values, are packed in: rows of D numbers, of which the first is their
// mean.
__device__ __forceinline__ const float* basis_at(const BasesParams& of, int number, int rank,
                                                 int side, int dim) {
  const int64_t half = int64_t{of.rows} * dim;
  return of.bases + (2 * (int64_t{number} * of.pages + rank) + side) * half;
}

// The number of the basis of the block that begins at a page; −1 where there is none, or none with
// a page of this rank. The table may lie on the device alone, where no host has looked at it.
__device__ __forceinline__ int basis_number(const BasesParams& of, int64_t block, int rank) {
  const int number = __ldg(of.basis_of + block);
  const bool there = number >= 0 && number < static_cast<int>(of.count) &&
                     rank < static_cast<int>(of.pages);
  return there ? number : -1;
}
