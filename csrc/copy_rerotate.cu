// copy_rerotate: tokens of every layer and head copied between blocks, keys rotated by delta.
// Blocks are read in the tensor that is written, or in another one, whose strides may be others.
//
// The simple version:
//   for each copy, layer, head, token: K[dst] = R(delta · inv_freq[layer]) K[src]; V[dst] = V[src]
//
// What makes it run at the speed of a plain copy:
// 1. one launch for all layers, heads and copies: a thread block has one (copy, layer) and some of
//    the heads, so the few cosines and sines are computed once in shared memory and used by all
//    (of a head group's block it has one (copy, page), whose layer a table tells);
// 2. 16-byte accesses: a thread holds both vectors of V pairs, and two vectors of values, before
//    it stores any of them, so four loads are in flight, the first ones while cosines and sines
//    are computed;
// 3. a thread's token and column are fixed before the loop over heads: no division inside.
//
// Rows that point outside a tensor are skipped: a table that was made on the device cannot be
// checked on the host without waiting for it.

#include "api.h"
#include "pairs.cuh"
#include "rotation.cuh"
#include "vector.cuh"

namespace {

struct Copy {
  int64_t source, target;  // elements to the first token's key, layer and head 0, of each tensor
  int count;
  int delta;
  bool valid;
};

__device__ Copy read_copy(const CopyRerotateParams& p, uint32_t index) {
  const int32_t* row = p.copies + int64_t{6} * index;
  const int32_t src_block = row[0], src_slot = row[1], dst_block = row[2], dst_slot = row[3];
  const int64_t slots = p.page_tokens, source_slots = p.source_page_tokens;
  Copy copy;
  copy.count = row[4];
  copy.delta = row[5];
  copy.valid = src_block >= 0 && src_block < p.source_blocks && dst_block > 0 &&
               dst_block < p.blocks && src_slot >= 0 && dst_slot >= 0 && copy.count > 0 &&
               int64_t{src_slot} + copy.count <= source_slots &&
               int64_t{dst_slot} + copy.count <= slots;
  copy.source = src_block * p.source_block_stride + src_slot * p.source_token_stride;
  copy.target = dst_block * p.block_stride + dst_slot * p.token_stride;
  return copy;
}

// Rotates V pairs.
template <typename T, int V, bool kInterleaved, typename Wide>
__device__ __forceinline__ void rotate(Pack<T, V>& first, Pack<T, V>& second,
                                       const Pack<Wide, V>& cosine, const Pack<Wide, V>& sine) {
  using A = Arithmetic<T>;
  for_each_pair<V, kInterleaved>(first, second, [&](int e, T& x, T& y) {
    const Wide a = A::widen(x), b = A::widen(y);
    x = A::round(a * cosine.at[e] - b * sine.at[e]);
    y = A::round(a * sine.at[e] + b * cosine.at[e]);
  });
}

template <typename T, int V, bool kInterleaved>
__device__ __forceinline__ void copy_rerotate(const CopyRerotateParams& p) {
  using Wide = typename Arithmetic<T>::Wide;
  extern __shared__ __align__(16) unsigned char shared[];
  Wide* cosines = reinterpret_cast<Wide*>(shared);
  Wide* sines = cosines + p.pairs;

  const uint32_t chunk = blockIdx.x % p.head_chunks;
  const uint32_t part = blockIdx.x / p.head_chunks % p.parts;
  const uint32_t layer = p.page_layers != nullptr ? p.page_layers[part] : part;
  const Copy copy = read_copy(p, blockIdx.x / p.head_chunks / p.parts);
  if (!copy.valid || layer >= p.layers) return;

  const bool rotates = copy.delta != 0;
  bool has_angles = !rotates;

  // Key columns of a token: first those that hold V pairs, then single vectors past rotary_dim.
  const int vectors = p.head_dim / V;
  const int pair_columns = p.pairs / V;
  const int key_columns = pair_columns + (vectors - 2 * pair_columns);
  const int key_rows = blockDim.x / key_columns;
  const int key_column = threadIdx.x % key_columns;
  const int key_row = threadIdx.x / key_columns;
  const bool is_pair = key_column < pair_columns;
  const int first_at = is_pair ? first_of_pairs<V, kInterleaved>(key_column)
                               : (pair_columns + key_column) * V;
  const int second_at = first_at + pair_distance<V, kInterleaved>(static_cast<int>(p.pairs));

  const int value_rows = blockDim.x / vectors;
  const int value_column = threadIdx.x % vectors * V;
  const int value_row = threadIdx.x / vectors;

  T* cache = static_cast<T*>(p.cache) + part * p.part_stride;
  const T* read = static_cast<const T*>(p.source) + part * p.source_part_stride;
  const uint32_t head_end = min((chunk + 1) * p.heads_per_block, p.kv_heads);
  for (uint32_t head = chunk * p.heads_per_block; head < head_end; ++head) {
    const T* source = read + copy.source + head * p.source_head_stride;
    T* target = cache + copy.target + head * p.head_stride;
    int t = key_row < key_rows ? key_row : copy.count;
    int u = value_row < value_rows ? value_row : copy.count;
    do {
      const bool has_key = t < copy.count;
      const int u_next = u + value_rows;
      Pack<T, V> first, second, value, value_next;
      const T* key = source + t * p.source_token_stride;
      const T* values = source + p.source_value_offset + value_column;
      if (has_key) first = load<T, V>(key + first_at);
      if (has_key && is_pair) second = load<T, V>(key + second_at);
      if (u < copy.count) value = load<T, V>(values + u * p.source_token_stride);
      if (u_next < copy.count) value_next = load<T, V>(values + u_next * p.source_token_stride);

      // While the first vectors are on their way, by all threads.
      if (!has_angles) {
        for (uint32_t i = threadIdx.x; i < p.pairs; i += blockDim.x) {
          const float frequency = p.inv_freq[int64_t{layer} * p.pairs + i];
          cos_sin(half_turns(copy.delta, frequency), cosines[i], sines[i]);
        }
        __syncthreads();
        has_angles = true;
      }
      if (rotates && is_pair && has_key) {
        const int pairs = static_cast<int>(p.pairs);
        rotate<T, V, kInterleaved>(first, second,
                                   of_pairs<V, kInterleaved>(cosines, pairs, key_column),
                                   of_pairs<V, kInterleaved>(sines, pairs, key_column));
      }
      T* new_key = target + t * p.token_stride;
      T* new_values = target + p.value_offset + value_column;
      if (has_key) store<T, V>(new_key + first_at, first);
      if (has_key && is_pair) store<T, V>(new_key + second_at, second);
      if (u < copy.count) store<T, V>(new_values + u * p.token_stride, value);
      if (u_next < copy.count) store<T, V>(new_values + u_next * p.token_stride, value_next);
      t += key_rows;
      u += 2 * value_rows;
    } while (t < copy.count || u < copy.count);
  }
}

}  // namespace

// Names as rust/cuda/src/copy_rerotate.rs builds them: dtype, pairing, and elements moved at once
// (wide: 16 bytes; narrow: one element, for rotary dims that 16 bytes do not divide).
#define KERNEL(DTYPE, TYPE, PAIRING, INTERLEAVED, WIDTH, V)                       \
  extern "C" __global__ void __launch_bounds__(256, 4)                            \
      copy_rerotate_##DTYPE##_##PAIRING##_##WIDTH(                                \
          const __grid_constant__ CopyRerotateParams params) {                    \
    copy_rerotate<TYPE, V, INTERLEAVED>(params);                                  \
  }
#define KERNELS(DTYPE, TYPE)                                                      \
  KERNEL(DTYPE, TYPE, half, false, wide, static_cast<int>(16 / sizeof(TYPE)))     \
  KERNEL(DTYPE, TYPE, half, false, narrow, 1)                                     \
  KERNEL(DTYPE, TYPE, interleaved, true, wide, static_cast<int>(16 / sizeof(TYPE))) \
  KERNEL(DTYPE, TYPE, interleaved, true, narrow, 1)

KERNELS(f32, float)
KERNELS(bf16, __nv_bfloat16)
KERNELS(f16, __half)
KERNELS(fp8, Fp8)
