// Query fragments of a decode step turned back to where a segment's keys were.
#pragma once

#include "api.h"
#include "rotation.cuh"
#include "tensor_core.cuh"

// This is rare, so it is not inlined and has loops: from cold memory, instructions cost as much as
// data.

// One element of a query, turned back by delta.
template <typename T>
__device__ __forceinline__ float turned_element(const T* query, int d, int delta,
                                                const PagedKv& kv) {
  const int pairs = static_cast<int>(kv.pairs);
  const float raw = static_cast<float>(query[d]);
  if (delta == 0 || d >= 2 * pairs) return raw;
  const bool interleaved = kv.interleaved != 0;
  const int i = interleaved ? d / 2 : d % pairs;
  const bool is_first = interleaved ? d % 2 == 0 : d < pairs;
  const int other = interleaved ? d ^ 1 : (is_first ? d + pairs : d - pairs);
  const float rest = static_cast<float>(query[other]);
  float cosine, sine;
  cos_sin(half_turns(-delta, kv.inv_freq[i]), cosine, sine);
  return raw * cosine + (is_first ? -rest : rest) * sine;
}

// The fragments of a turned query (null for none), [D / 8], with the columns of `Operand`.
template <typename T, typename Operand, int D>
__device__ __noinline__ void turned_queries(uint32_t* to, const T* query, int delta,
                                            const PagedKv& kv) {
#pragma unroll 1
  for (int i = 0; i < D / 8; ++i) {
    const int d = 16 * (i / 2) + Operand::key_column(threadIdx.x % 32, i % 2);
    to[i] = query == nullptr ? 0u : pack<T>(turned_element(query, d, delta, kv),
                                            turned_element(query, d + 1, delta, kv));
  }
}
