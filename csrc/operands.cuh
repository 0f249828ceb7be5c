// How numbers of a cache of C become matrix operands: 16 × 16 of them, a part in each lane. One
// load brings 32 bytes of each of 16 rows.
//
// The columns of a key may come in any order, if those of the query come in the same: so a lane
// takes whatever the load brings it, and tells which columns these are. Likewise for the rows of a
// result, which are the columns of the values.
#pragma once

#include <cstdint>

#include "fp8.cuh"
#include "tensor_core.cuh"

// Numbers of 16 bits are operands as they are loaded.
template <typename T, typename C>
struct Operands {
  static_assert(sizeof(C) == 2, "other sizes are widened");
  using Value = T;                   // what values are multiplied as
  static constexpr int kAtOnce = 1;  // operands of a load

  static __device__ __forceinline__ void keys(uint32_t (&to)[1][4], const uint32_t (&loaded)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[0][i] = loaded[i];
  }
  static __device__ __forceinline__ void values(uint32_t (&to)[1][4],
                                                const uint32_t (&loaded)[4]) {
    keys(to, loaded);
  }
  // The first of two columns of a key, or of a query, in registers `half`, `half` + 2 of this lane.
  static __device__ __forceinline__ int key_column(int lane, int half) {
    return 8 * half + lane % 4 * 2;
  }
  // The column of the values that this lane has row lane / 4 + 8 `half` of the result for.
  static __device__ __forceinline__ int value_column(int lane, int half) {
    return 8 * half + lane / 4;
  }
};

// A lane is brought four neighbours of a key, and of the values two neighbours of two rows.
template <typename T>
struct Operands<T, Fp8> {
  // Weights are at most 1: f16 has finer ones than bf16, and is one step from e4m3.
  using Value = __half;
  static constexpr int kAtOnce = 2;

  static __device__ __forceinline__ void keys(uint32_t (&to)[2][4], const uint32_t (&loaded)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[i / 2][i % 2] = widen_two<T>(loaded[i]);
      to[i / 2][i % 2 + 2] = widen_two<T>(loaded[i] >> 16);
    }
  }
  static __device__ __forceinline__ void values(uint32_t (&to)[2][4],
                                                const uint32_t (&loaded)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t sorted = __byte_perm(loaded[i], 0, 0x3120);
      to[i % 2][i / 2 * 2] = widen_two<Value>(sorted);
      to[i % 2][i / 2 * 2 + 1] = widen_two<Value>(sorted >> 16);
    }
  }
  static __device__ __forceinline__ int key_column(int lane, int half) {
    return lane % 4 * 4 + 2 * half;
  }
  static __device__ __forceinline__ int value_column(int lane, int half) {
    return lane / 4 * 2 + half;
  }
};
