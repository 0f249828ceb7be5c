// rotate_rows: queries and keys of rows rotated by cosines and sines that are given.
//
// The simple version:
//   for each row, head, pair: (x, y) = (x · cos − y · sin, x · sin + y · cos)
//
// It moves 2 · (q + k) + cos + sin bytes and computes next to nothing: memory bounds thousands of
// rows, the launch bounds a few. What makes it run at these bounds:
// 1. one launch for queries and keys;
// 2. 16-byte accesses: a thread holds V pairs of two heads before it stores any of them, so four
//    loads are in flight beside those of cosines and sines, which both heads share;
// 3. stores keep what they wrote in the cache: write_pages and attention read it next.
//
// Every element is computed by itself, without fused steps: its bits do not depend on the width of
// accesses, nor on which version of the op computed it.

#include "api.h"
#include "pairs.cuh"
#include "vector.cuh"

namespace {

constexpr int kHeads = 2;  // that a thread rotates: `THREAD_HEADS` of rust/cuda

// A plain assignment would be split: see `store`, which says that nobody reads soon.
template <typename T, int V>
__device__ __forceinline__ void store_for_readers(T* to, const Pack<T, V>& values) {
  if constexpr (sizeof(values) == 16) {
    *reinterpret_cast<uint4*>(to) = reinterpret_cast<const uint4&>(values);
  } else {
    static_assert(V == 1, "16 bytes or an element");
    *to = values.at[0];
  }
}

template <typename T>
__device__ __forceinline__ void turn(T& x, T& y, T cosine, T sine) {
  const float a = static_cast<float>(x), b = static_cast<float>(y);
  const float c = static_cast<float>(cosine), s = static_cast<float>(sine);
  x = static_cast<T>(__fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s)));
  y = static_cast<T>(__fadd_rn(__fmul_rn(a, s), __fmul_rn(b, c)));
}

template <typename T, int V, bool kInterleaved>
__device__ __forceinline__ void rotate_rows(const RotateRowsParams& p) {
  const uint64_t index = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const uint32_t slots = p.q.slots + p.k.slots;
  const uint32_t units = p.rows * slots * p.columns;
  if (index >= units) return;
  const uint32_t unit = static_cast<uint32_t>(index);
  const int column = static_cast<int>(unit % p.columns);
  const uint32_t slot = unit / p.columns % slots, row = unit / p.columns / slots;

  const bool is_query = slot < p.q.slots;
  const uint32_t heads = is_query ? p.q.heads : p.k.heads;
  const uint32_t head = kHeads * (is_query ? slot : slot - p.q.slots);
  const int64_t source_step = is_query ? p.q.source_head_stride : p.k.source_head_stride;
  const int64_t target_step = is_query ? p.q.head_stride : p.k.head_stride;
  const T* source = static_cast<const T*>(is_query ? p.q.source : p.k.source) +
                    row * (is_query ? p.q.source_row_stride : p.k.source_row_stride) +
                    head * source_step;
  T* target = static_cast<T*>(is_query ? p.q.target : p.k.target) +
              row * (is_query ? p.q.row_stride : p.k.row_stride) + head * target_step;

  const int pairs = static_cast<int>(p.pairs);
  const int pair_columns = pairs / V;
  const bool is_pair = column < pair_columns;
  const int first_at = is_pair ? first_of_pairs<V, kInterleaved>(column)
                               : 2 * pairs + (column - pair_columns) * V;
  const int second_at = first_at + pair_distance<V, kInterleaved>(pairs);

  Pack<T, V> first[kHeads], second[kHeads], cosine, sine;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (head + h >= heads) continue;
    first[h] = load<T, V>(source + h * source_step + first_at);
    if (is_pair) second[h] = load<T, V>(source + h * source_step + second_at);
  }
  if (is_pair) {
    const T* cosines = static_cast<const T*>(p.cos) + row * p.cos_row_stride;
    const T* sines = static_cast<const T*>(p.sin) + row * p.sin_row_stride;
    cosine = of_pairs<V, kInterleaved>(cosines, pairs, column);
    sine = of_pairs<V, kInterleaved>(sines, pairs, column);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (head + h >= heads) continue;
    if (is_pair) {
      for_each_pair<V, kInterleaved>(first[h], second[h], [&](int e, T& x, T& y) {
        turn(x, y, cosine.at[e], sine.at[e]);
      });
      store_for_readers(target + h * target_step + second_at, second[h]);
    }
    store_for_readers(target + h * target_step + first_at, first[h]);
  }
}

}  // namespace

// Names as rust/cuda/src/rotate_rows.rs builds them: dtype, pairing, and elements moved at once
// (wide: 16 bytes; narrow: one element).
#define KERNEL(DTYPE, TYPE, PAIRING, INTERLEAVED, WIDTH, V)                       \
  extern "C" __global__ void __launch_bounds__(256, 3)                            \
      rotate_rows_##DTYPE##_##PAIRING##_##WIDTH(                                  \
          const __grid_constant__ RotateRowsParams params) {                      \
    rotate_rows<TYPE, V, INTERLEAVED>(params);                                    \
  }
#define KERNELS(DTYPE, TYPE)                                                      \
  KERNEL(DTYPE, TYPE, half, false, wide, static_cast<int>(16 / sizeof(TYPE)))     \
  KERNEL(DTYPE, TYPE, half, false, narrow, 1)                                     \
  KERNEL(DTYPE, TYPE, interleaved, true, wide, static_cast<int>(16 / sizeof(TYPE))) \
  KERNEL(DTYPE, TYPE, interleaved, true, narrow, 1)

KERNELS(f32, float)
KERNELS(bf16, __nv_bfloat16)
KERNELS(f16, __half)
