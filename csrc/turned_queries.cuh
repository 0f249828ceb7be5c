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

// The query heads of an item as B fragments: rows are elements, columns query heads. Pages of a
// segment in place and the request's own come by turns, so those before are kept.
template <typename T, typename Operand, int D>
struct TurnedQueries {
  static constexpr int kSteps = D / 16;
  uint32_t fragments[kSteps][2];
  int turned_by;  // the delta that they are turned back by
  uint32_t before[2 * kSteps];
  int before_turned_by;

  // Takes the query of this lane's column, or null, as it is.
  __device__ void load(const T* query) {
    turned_by = before_turned_by = 0;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      const int column = 16 * (i / 2) + Operand::key_column(threadIdx.x % 32, i % 2);
      fragments[i / 2][i % 2] =
          query == nullptr ? 0u : reinterpret_cast<const uint32_t*>(query)[column / 2];
    }
  }

  __device__ void turn(const T* query, int delta, const PagedKv& kv) {
    if (delta == turned_by) return;
    uint32_t turned[2 * kSteps];
    const bool known = delta == before_turned_by;
    if (!known) turned_queries<T, Operand, D>(turned, query, delta, kv);
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      uint32_t& now = fragments[i / 2][i % 2];
      const uint32_t next = known ? before[i] : turned[i];
      before[i] = now;
      now = next;
    }
    before_turned_by = turned_by;
    turned_by = delta;
  }
};
