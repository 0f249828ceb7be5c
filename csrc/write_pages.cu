// write_pages: new keys and values of one layer scattered into pages, and bounds of pages.
//
// The simple version:
//   for each row, head: K[slots[table(head), row]] = k[row]; V[slots[table(head), row]] = v[row]
//   for each held page, element: min, max, mean of the keys in its slots
//
// What makes it run at the speed of a plain copy:
// 1. bits are moved, not numbers: 16-byte words where everything lies on such boundaries, single
//    elements otherwise. Into an fp8 cache go numbers, divided by a scale;
// 2. a thread has two words of K and two of V in flight before it stores any of them;
// 3. stores keep what they wrote in the cache: attention reads it next.
//
// Bounds are a kernel of their own, after the scatter: a page's rows may come from several thread
// blocks, and slots that this call did not write count as well. Its reads come from the cache. Of
// keys of 16 bits they may be the least and the greatest alone, in the dtype of these: each is the
// element of some key, so nothing is rounded. In e4m3 they are the least rounded down and the
// greatest rounded up, or the mean rounded to the nearest, with a power of two a page.
//
// Slots and held pages that point outside the cache, or at the null block, are skipped: a table
// that was made on the device cannot be checked on the host without waiting for it. So are slots of
// block −1: a local head does not keep every token.

#include <cmath>

#include "api.h"
#include "fp8_bounds.cuh"
#include "vector.cuh"

namespace {

constexpr int kWords = 2;  // of K and of V that a thread moves
constexpr int kSlotsInFlight = 8;
constexpr int kMostThreads = 256;

// Words that are stored as they are.
template <typename Word>
struct Same {
  using Source = Word;
  using Target = Word;
  static __device__ __forceinline__ Word stored(const Word& word, float) { return word; }
};

// Words of N elements of T for an fp8 cache.
template <typename T, int N>
struct ToFp8 {
  using Source = Pack<T, N>;
  using Target = Pack<Fp8, N>;
  static __device__ __forceinline__ Target stored(const Source& word, float scale) {
    Target target;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      target.at[e] = divide_to_fp8(static_cast<float>(word.at[e]), scale);
    }
    return target;
  }
};

template <typename Words>
__device__ __forceinline__ void write_pages(const WritePagesParams& p) {
  using Source = typename Words::Source;
  using Target = typename Words::Target;
  const uint32_t row_words = p.kv_heads * p.columns;
  const uint32_t words = p.rows * row_words;
  Source keys[kWords], values[kWords];
  Target* targets[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    targets[i] = nullptr;
    const uint64_t word = (uint64_t{blockIdx.x} * kWords + i) * blockDim.x + threadIdx.x;
    if (word >= words) continue;
    const uint32_t row = static_cast<uint32_t>(word) / row_words;
    const uint32_t rest = static_cast<uint32_t>(word) % row_words;
    const uint32_t head = rest / p.columns, column = rest % p.columns;
    const bool own = p.heads != nullptr;
    const int32_t table = own ? p.heads[4 * head] : 0;
    const int64_t in_block =
        own ? p.heads[4 * head + 1] * p.head_stride : p.layer_offset + head * p.head_stride;
    const int32_t* at = p.slots + 2 * (int64_t{table} * p.rows + row);
    const int32_t block = at[0], slot = at[1];
    const int64_t page = block * p.block_stride + in_block;
    if (block <= 0 || page > p.last_page || slot < 0 || slot >= static_cast<int>(p.page_tokens)) {
      continue;
    }
    targets[i] = static_cast<Target*>(p.cache) + page + slot * p.token_stride + column;
    keys[i] =
        static_cast<const Source*>(p.k)[row * p.k_row_stride + head * p.k_head_stride + column];
    values[i] =
        static_cast<const Source*>(p.v)[row * p.v_row_stride + head * p.v_head_stride + column];
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if (targets[i] == nullptr) continue;
    targets[i][0] = Words::stored(keys[i], p.key_scale);
    targets[i][p.value_offset] = Words::stored(values[i], p.value_scale);
  }
}

// What is kept of a page: f32 bounds and mean, keys of 16 bits, e4m3 bounds, an e4m3 mean.
enum class Kept { kF32, kKeys, kFp8, kFp8Mean };

// Of an element of a page's keys.
struct OfElement {
  float least = INFINITY;
  float greatest = -INFINITY;
  double sum = 0.0;
};

template <typename T>
__device__ __forceinline__ OfElement of_slots(const T* keys, int begin, int end, int64_t stride) {
  OfElement of;
#pragma unroll kSlotsInFlight
  for (int slot = begin; slot < end; ++slot) {
    const float x = static_cast<float>(keys[slot * stride]);
    // Not fminf and fmaxf, which drop a NaN.
    of.least = x < of.least || isnan(x) ? x : of.least;
    of.greatest = x > of.greatest || isnan(x) ? x : of.greatest;
    of.sum += x;
  }
  return of;
}

// The greatest of a number of each thread, for all of them. Once a launch: it has room of its own.
__device__ __forceinline__ float greatest_of_block(float number) {
  __shared__ float of_warps[kMostThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    number = fmaxf(number, __shfl_xor_sync(0xffffffffu, number, step));
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = number;
  __syncthreads();
  for (uint32_t warp = 0; warp < blockDim.x / 32; ++warp) number = fmaxf(number, of_warps[warp]);
  return number;
}

__device__ __forceinline__ float finite_size(float x) { return isfinite(x) ? fabsf(x) : 0.0f; }

// A thread block has one page, a thread an element of its keys. The sum is taken in slot order in
// f64: every version of the op has the same bits. In e4m3 no thread has more than one element.
template <typename T, Kept kKept>
__device__ __forceinline__ void page_bounds(const PageBoundsParams& p) {
  const int32_t* row = p.held + int64_t{3} * (blockIdx.x / p.kv_heads);
  const uint32_t head = blockIdx.x % p.kv_heads;
  const int32_t block = row[0], begin = row[1], end = row[2];
  const int32_t first = p.rows == nullptr ? block : p.rows[blockIdx.x / p.kv_heads];
  if (block <= 0 || block >= p.blocks || first < 0 || first >= p.described || begin < 0 ||
      begin >= end || end > static_cast<int>(p.page_tokens)) {
    return;
  }
  const T* page = static_cast<const T*>(p.cache) + block * p.block_stride + p.layer_offset +
                  head * p.head_stride;
  const int64_t at = int64_t{first} + p.first_page + head;  // row of bounds
  if constexpr (kKept == Kept::kFp8 || kKept == Kept::kFp8Mean) {
    const uint32_t d = threadIdx.x;
    OfElement of = {0.0f, 0.0f, 0.0};
    if (d < p.head_dim) of = of_slots(page + d, begin, end, p.token_stride);
    const float mean = static_cast<float>(of.sum / (end - begin) * p.key_scale);
    const float least = of.least * p.key_scale, greatest = of.greatest * p.key_scale;
    const bool means = kKept == Kept::kFp8Mean;
    const float size = means ? finite_size(mean) : fmaxf(finite_size(least), finite_size(greatest));
    const uint8_t scale = covering_scale(greatest_of_block(size));
    const float factor = power_of(scale);
    Fp8* bounds = static_cast<Fp8*>(p.bounds) + at * (means ? 1 : 2) * p.head_dim;
    if (d < p.head_dim && means) {
      bounds[d] = round_bound<Rounding::kNearest>(mean, factor);
    } else if (d < p.head_dim) {
      bounds[d] = round_bound<Rounding::kDown>(least, factor);
      bounds[p.head_dim + d] = round_bound<Rounding::kUp>(greatest, factor);
    }
    if (d == 0) p.scales[at] = scale;
  } else {
    for (uint32_t d = threadIdx.x; d < p.head_dim; d += blockDim.x) {
      const OfElement of = of_slots(page + d, begin, end, p.token_stride);
      if constexpr (kKept == Kept::kKeys) {
        T* bounds = static_cast<T*>(p.bounds) + at * 2 * p.head_dim;
        bounds[d] = Arithmetic<T>::round(of.least);
        bounds[p.head_dim + d] = Arithmetic<T>::round(of.greatest);
      } else {
        float* bounds = static_cast<float*>(p.bounds) + at * 3 * p.head_dim;
        bounds[d] = of.least * p.key_scale;
        bounds[p.head_dim + d] = of.greatest * p.key_scale;
        bounds[2 * p.head_dim + d] = static_cast<float>(of.sum / (end - begin) * p.key_scale);
      }
    }
  }
}

}  // namespace

// Names as rust/cuda/src/write_pages.rs builds them: bytes moved at once, or the dtypes and the
// elements moved at once; the dtype of keys, and what is kept of them.
#define WRITE(NAME, ...)                                                              \
  extern "C" __global__ void __launch_bounds__(kMostThreads)                          \
      write_pages_##NAME(const __grid_constant__ WritePagesParams params) {           \
    write_pages<__VA_ARGS__>(params);                                                 \
  }
#define BOUNDS(NAME, ...)                                                             \
  extern "C" __global__ void __launch_bounds__(kMostThreads)                          \
      page_bounds_##NAME(const __grid_constant__ PageBoundsParams params) {           \
    page_bounds<__VA_ARGS__>(params);                                                 \
  }

WRITE(16, Same<uint4>)
WRITE(4, Same<uint32_t>)
WRITE(2, Same<uint16_t>)
WRITE(f32_fp8_4, ToFp8<float, 4>)
WRITE(f32_fp8_1, ToFp8<float, 1>)
WRITE(bf16_fp8_8, ToFp8<__nv_bfloat16, 8>)
WRITE(bf16_fp8_1, ToFp8<__nv_bfloat16, 1>)
WRITE(f16_fp8_8, ToFp8<__half, 8>)
WRITE(f16_fp8_1, ToFp8<__half, 1>)
BOUNDS(f32, float, Kept::kF32)
BOUNDS(bf16, __nv_bfloat16, Kept::kF32)
BOUNDS(f16, __half, Kept::kF32)
BOUNDS(fp8, Fp8, Kept::kF32)
BOUNDS(bf16_keys, __nv_bfloat16, Kept::kKeys)
BOUNDS(f16_keys, __half, Kept::kKeys)
BOUNDS(f32_to_fp8, float, Kept::kFp8)
BOUNDS(bf16_to_fp8, __nv_bfloat16, Kept::kFp8)
BOUNDS(f16_to_fp8, __half, Kept::kFp8)
BOUNDS(fp8_to_fp8, Fp8, Kept::kFp8)
BOUNDS(f32_to_fp8_mean, float, Kept::kFp8Mean)
BOUNDS(bf16_to_fp8_mean, __nv_bfloat16, Kept::kFp8Mean)
BOUNDS(f16_to_fp8_mean, __half, Kept::kFp8Mean)
BOUNDS(fp8_to_fp8_mean, Fp8, Kept::kFp8Mean)
