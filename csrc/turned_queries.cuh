// Query fragments of a decode step turned back to where a segment's keys were.
#pragma once

#include "api.h"
#include "rotation.cuh"
#include "tensor_core.cuh"

// This is rare, so it is not inlined and has loops: from cold memory, instructions cost as much as
// data.

// The fragments of a turned query (null for none), [D / 8], with the columns of `Operand`.
template <typename T, typename Operand, int D>
__device__ __noinline__ void turned_queries(uint32_t* to, const T* query, int delta,
                                            const PagedKv& kv) {
  const auto turned = [&](int d) {
    return turned_element(query, d, static_cast<int>(kv.pairs), kv.interleaved != 0, [&](int pair) {
      float2 angle;
      cos_sin(half_turns(-delta, kv.inv_freq[pair]), angle.x, angle.y);
      return angle;
    });
  };
#pragma unroll 1
  for (int i = 0; i < D / 8; ++i) {
    const int d = 16 * (i / 2) + Operand::key_column(threadIdx.x % 32, i % 2);
    to[i] = query == nullptr ? 0u : pack<T>(turned(d), turned(d + 1));
  }
}
