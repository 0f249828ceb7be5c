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

// The greatest of them.
__device__ __forceinline__ float greatest_over_keys(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// Of a lane's queries, lane % 4 · kOwn and those after it: the largest score, in powers of two, and
// the sum of the weights of this lane's keys.
template <int kOwn>
struct Softmax {
  float m[kOwn], l[kOwn];

  // Takes in products of 32 keys, or 64: number i of `s` is of query i % kOwn and of the key
  // 8 · (i / kOwn) + `own`, and bit j of a mask says whether the row sees key j of its 32. Makes
  // scores in powers of two of them, of which the weights are those above `base`; what was added up
  // before counts `shrink` times.
  template <int kRows>
  __device__ __forceinline__ void take_in(float (&s)[kRows][4], int own,
                                          const uint32_t (&masks)[kRows / kOwn],
                                          const AttendParams& p, float (&shrink)[kOwn],
                                          float (&base)[kOwn]) {
    constexpr int kAll = 4 * kRows, kOfMask = 4 * kOwn;
    if (p.softcap > 0) {
#pragma unroll
      for (int i = 0; i < kAll; ++i) s[i / 4][i % 4] = capped(s[i / 4][i % 4] * p.scale, p.softcap);
    }
    const float factor = p.softcap > 0 ? kLog2e : p.scale * kLog2e;
    float largest[kOwn];
#pragma unroll
    for (int q = 0; q < kOwn; ++q) largest[q] = m[q];
#pragma unroll
    for (int i = 0; i < kAll; ++i) {
      float& x = s[i / 4][i % 4];
      const uint32_t mask = masks[i / kOfMask];
      x *= factor;
      if (mask != ~0u && (mask >> own >> (i % kOfMask / kOwn * 8) & 1) == 0) x = -INFINITY;
      largest[i % kOwn] = fmaxf(largest[i % kOwn], x);
    }
#pragma unroll
    for (int q = 0; q < kOwn; ++q) {
      largest[q] = greatest_over_keys(largest[q]);
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
    for (int q = 0; q < kOwn; ++q) {
      l[q] = over_keys(l[q]);
      if (lane < 4) states[kOwn * lane + q] = {m[q], l[q]};
    }
  }
};
