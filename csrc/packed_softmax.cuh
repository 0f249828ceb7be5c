// What a row sees of a packed page, and its softmax so far: the same for pages of every kind.
#pragma once

#include <cmath>

#include "api.h"
#include "decode_units.cuh"
#include "paged.cuh"
#include "powers.cuh"
#include "tensor_core.cuh"

// A page in shared memory, and what the row sees of it.
struct PackedRun {
  Entry entry;
  Reach reach;
  int position;  // of the row
};

// Whether the row sees all that a page may hold, and that is whole products.
__device__ __forceinline__ bool is_seen_whole(const PackedRun& run, int tokens) {
  const int last = run.entry.position + tokens - 1;
  return tokens % 32 == 0 && run.entry.begin == 0 && run.entry.end == tokens &&
         last <= run.position &&
         (run.reach.window == 0 || run.entry.position > run.position - run.reach.window);
}

// Bit j: the row sees the token in slot `slot` + j, of a page of so many.
__device__ __forceinline__ uint32_t mask_32(const PackedRun& run, int slot, int tokens) {
  const auto mask_16 = [&](int first) {
    return first < tokens ? mask_of(run.entry, run.reach, run.position, first, 16) : 0u;
  };
  return mask_16(slot) | mask_16(slot + 16) << 16;
}

// The sum over lanes whose keys differ and whose queries are the same.
__device__ __forceinline__ float over_keys(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Of queries lane % 4 · 2 and + 1: the largest score, in powers of two, and the sum of the weights
// of this lane's keys.
struct Softmax {
  float m[2], l[2];

  // Takes in products of 32 keys: s[u][2 · half + q] is of key 16 · u + 8 · half + lane / 4, and
  // bit j of the mask says whether the row sees key j. Makes scores in powers of two of them, of
  // which the weights are those above `base`; what was added up before counts `shrink` times.
  __device__ __forceinline__ void take_in(float (&s)[2][4], uint32_t mask, const AttendParams& p,
                                          float (&shrink)[2], float (&base)[2]) {
    if (p.softcap > 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i) s[i / 4][i % 4] = capped(s[i / 4][i % 4] * p.scale, p.softcap);
    }
    const float factor = p.softcap > 0 ? kLog2e : p.scale * kLog2e;
    const uint32_t seen = mask >> (threadIdx.x % 32 / 4);  // bits 0, 8, 16, 24: of this lane's keys
    float largest[2] = {m[0], m[1]};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& x = s[i / 4][i % 4];
      x *= factor;
      if (mask != ~0u && (seen >> (i / 2 * 8) & 1) == 0) x = -INFINITY;
      largest[i % 2] = fmaxf(largest[i % 2], x);
    }
#pragma unroll
    for (int q = 0; q < 2; ++q) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        largest[q] = fmaxf(largest[q], __shfl_xor_sync(~0u, largest[q], step));
      }
      base[q] = largest[q] == -INFINITY ? 0.0f : largest[q];
      shrink[q] = exp2_fast(m[q] - base[q]);
      m[q] = largest[q];
      l[q] *= shrink[q];
    }
  }

  // The sums over all lanes, by query heads.
  __device__ __forceinline__ void leave(State* states) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      l[q] = over_keys(l[q]);
      if (lane < 4) states[2 * lane + q] = {m[q], l[q]};
    }
  }
};
