// merge_states: partial attentions of the same rows combined by their log-sum-exp.
//
// The simple version:
//   for each state: lse = ln Σ exp(lse_s); out = Σ exp(lse_s − lse) · out_s
//
// What makes it run at the speed of reading its input:
// 1. a thread has 16 bytes of a state's vector, of every split, four splits in flight;
// 2. the few log-sum-exps are read by every thread of a state, from the cache, instead of being
//    shared: nothing is waited for.
//
// A split with −∞ holds no key: its vector, whatever it is, counts for nothing.

#include <cmath>

#include "api.h"
#include "vector.cuh"

namespace {

constexpr int kSplitsInFlight = 4;

template <typename T, int V>
__device__ __forceinline__ void merge_states(const MergeStatesParams& p) {
  const uint32_t columns = p.head_dim / V;
  const uint32_t width = blockDim.x / p.states_per_block;  // threads of a state
  const int64_t state = int64_t{blockIdx.x} * p.states_per_block + threadIdx.x / width;
  if (threadIdx.x / width >= p.states_per_block || state >= p.states) return;

  const float* lses = p.lses + state;
  float top = -INFINITY;
  for (uint32_t split = 0; split < p.splits; ++split) {
    top = fmaxf(top, lses[split * p.states]);
  }
  for (uint32_t column = threadIdx.x % width; column < columns; column += width) {
    const T* outs = static_cast<const T*>(p.outs) + state * p.head_dim + column * V;
    float sums[V] = {};
    float total = 0.0f;
#pragma unroll kSplitsInFlight
    for (uint32_t split = 0; split < p.splits; ++split) {
      const float lse = lses[split * p.states];
      const Pack<T, V> part = load<T, V>(outs + split * p.states * p.head_dim);
      const bool counts = lse != -INFINITY;
      const float weight = counts ? expf(lse - top) : 0.0f;
      total += weight;
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const float x = static_cast<float>(part.at[e]);
        sums[e] = counts ? fmaf(weight, x, sums[e]) : sums[e];
      }
    }
    const float factor = total == 0.0f ? 0.0f : 1.0f / total;
    Pack<T, V> merged;
#pragma unroll
    for (int e = 0; e < V; ++e) merged.at[e] = static_cast<T>(sums[e] * factor);
    store<T, V>(static_cast<T*>(p.out) + state * p.head_dim + column * V, merged);
    if (column == 0) p.lse[state] = top + logf(total);
  }
}

}  // namespace

// Names as rust/cuda/src/merge_states.rs builds them: dtype, and elements moved at once (wide: 16
// bytes; narrow: one element).
#define KERNEL(DTYPE, TYPE, WIDTH, V)                                                 \
  extern "C" __global__ void __launch_bounds__(256)                                   \
      merge_states_##DTYPE##_##WIDTH(const __grid_constant__ MergeStatesParams params) { \
    merge_states<TYPE, V>(params);                                                    \
  }
#define KERNELS(DTYPE, TYPE)                                                          \
  KERNEL(DTYPE, TYPE, wide, static_cast<int>(16 / sizeof(TYPE)))                      \
  KERNEL(DTYPE, TYPE, narrow, 1)

KERNELS(f32, float)
KERNELS(bf16, __nv_bfloat16)
KERNELS(f16, __half)
