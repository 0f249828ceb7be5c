// pack_pages: exact pages into packed ones; unpack_pages: back.
//
// The simple version:
//   for each channel of a page's keys, and each token's values: steps from least to greatest,
//   then for each number the code of the step nearest to it
//
// What makes it fast:
// 1. One thread block a page, all pages of all rows in one launch.
// 2. Numbers are read side by side: channels by threads, 8 of them at a time for codes; the second
//    reading comes from the cache.
// 3. A thread makes whole words of 8 or 4 codes, so that no two write to one.
//
// Launch: rows · pages blocks of 128 threads. A row that points outside either side is skipped.

#include "api.h"
#include "pack_job.cuh"
#include "packed.cuh"
#include "vector.cuh"

namespace {

constexpr int kThreads = 128;
constexpr int kMaxTokens = 256;
constexpr int kMaxDim = 256;

// First bit of code e of a word that has codes of one token.
template <int kBits>
__device__ __forceinline__ int shift_in_row(int e) {
  return kBits == 4 ? 4 * (e / 2) + 16 * (e % 2) : kBits * e;
}

// Words of codes token by token: of keys, and of eight bits of values too.
template <int kBits, typename C, typename StepAt>
__device__ void pack_rows(const PackPagesParams& p, const Job& job, const C* from, uint32_t* words,
                          StepAt step_at) {
  constexpr int kPer = 32 / kBits;
  const int dim = p.head_dim;
  for (int i = threadIdx.x; i < static_cast<int>(p.page_tokens) * dim / kPer; i += kThreads) {
    const int token = i / (dim / kPer), first = i % (dim / kPer) * kPer;
    uint32_t word = 0;
    if (token < job.tokens) {
      const auto numbers = load<C, kPer>(from + element_of(p, job, token) + first);
#pragma unroll
      for (int e = 0; e < kPer; ++e) {
        const float2& step = step_at(token, first + e);
        const float x = static_cast<float>(numbers.at[e]);
        word |= code_of(x, step, largest_code(kBits)) << shift_in_row<kBits>(e);
      }
    }
    words[i] = word;
  }
}

// Words of codes of four bits of values, as lanes take them.
template <typename C>
__device__ void pack_units(const PackPagesParams& p, const Job& job, const C* from,
                           uint32_t* words, const float2* steps) {
  const int dim = p.head_dim, run = value_run(dim);
  for (int i = threadIdx.x; i < static_cast<int>(p.page_tokens) * dim / 8; i += kThreads) {
    const int unit = i / (2 * dim), of_unit = i % (2 * dim);
    const int with = of_unit / run % 32, tile = of_unit / (32 * run) * run + of_unit % run;
    uint32_t word = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      // Nibble 2k + h + 4b: token 2t + b + 8k, channel 16j + g + 8h.
      const int token = 16 * unit + with % 4 * 2 + e / 4 + e % 4 / 2 * 8;
      const int channel = 16 * tile + with / 4 + e % 2 * 8;
      if (token < job.tokens) {
        const float x = static_cast<float>(from[element_of(p, job, token) + channel]);
        word |= code_of(x, steps[token], largest_code(4)) << (4 * e);
      }
    }
    words[i] = word;
  }
}

template <int kBits, typename C, typename S>
__device__ void pack_page(const PackPagesParams& p) {
  __shared__ float2 of_keys[kMaxDim], of_values[kMaxTokens];
  const Job job = job_of(p, blockIdx.x);
  if (job.packed < 0) return;
  const int dim = p.head_dim, tokens = p.page_tokens;
  const PackedPlaces places = places_of<kBits>(tokens, dim);
  unsigned char* page = static_cast<unsigned char*>(p.packed) + job.packed;
  const C* keys = static_cast<const C*>(p.cache);
  const C* values = keys + int64_t{p.source_tokens} * dim;

  for (int channel = threadIdx.x; channel < dim; channel += kThreads) {
    Spread spread = no_spread();
    for (int token = 0; token < job.tokens; ++token) {
      spread.take_in(static_cast<float>(keys[element_of(p, job, token) + channel]));
    }
    const Step<S> step = step_of<S>(spread, largest_code(kBits));
    reinterpret_cast<S*>(page + places.key_scales)[channel] = step.scale;
    reinterpret_cast<S*>(page + places.key_zeros)[channel] = step.zero;
    of_keys[channel] = widen(step);
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int token = warp; token < tokens; token += kThreads / 32) {
    Step<S> step = {static_cast<S>(0.0f), static_cast<S>(0.0f)};
    if (token < job.tokens) {
      Spread spread = no_spread();
      const int64_t at = element_of(p, job, token);
      for (int i = lane; i < dim; i += 32) spread.take_in(static_cast<float>(values[at + i]));
#pragma unroll
      for (int apart = 16; apart > 0; apart /= 2) {
        spread.take_in({__shfl_xor_sync(~0u, spread.least, apart),
                        __shfl_xor_sync(~0u, spread.greatest, apart)});
      }
      step = step_of<S>(spread, largest_code(kBits));
    }
    if (lane == 0) {
      reinterpret_cast<S*>(page + places.value_steps)[2 * token] = step.scale;
      reinterpret_cast<S*>(page + places.value_steps)[2 * token + 1] = step.zero;
      of_values[token] = widen(step);
    }
  }
  __syncthreads();

  const auto of_key = [&](int, int channel) -> const float2& { return of_keys[channel]; };
  const auto of_value = [&](int token, int) -> const float2& { return of_values[token]; };
  auto* value_codes = reinterpret_cast<uint32_t*>(page + places.value_codes);
  pack_rows<kBits>(p, job, keys, reinterpret_cast<uint32_t*>(page), of_key);
  if constexpr (kBits == 4) {
    pack_units(p, job, values, value_codes, of_values);
  } else {
    pack_rows<kBits>(p, job, values, value_codes, of_value);
  }
}

// The code of a token's channel among codes token by token.
template <int kBits>
__device__ __forceinline__ uint32_t code_in_row(const uint32_t* words, int dim, int token,
                                                int channel) {
  constexpr int kPer = 32 / kBits;
  const uint32_t word = words[(token * dim + channel) / kPer];
  return word >> shift_in_row<kBits>(channel % kPer) & largest_code(kBits);
}

// That of a value of four bits.
__device__ __forceinline__ uint32_t code_in_unit(const uint32_t* words, int dim, int token,
                                                 int channel) {
  const int run = value_run(dim);
  const int row = token % 16, tile = channel / 16, with = channel % 8 * 4 + row % 8 / 2;
  const int word = token / 16 * 2 * dim + (tile / run * 32 + with) * run + tile % run;
  const int nibble = 2 * (row / 8) + channel % 16 / 8 + 4 * (row % 2);
  return words[word] >> (4 * nibble) & largest_code(4);
}

template <int kBits, typename C, typename S>
__device__ void unpack_page(const PackPagesParams& p) {
  const Job job = job_of(p, blockIdx.x);
  if (job.packed < 0) return;
  const int dim = p.head_dim;
  const PackedPlaces places = places_of<kBits>(p.page_tokens, dim);
  const unsigned char* page = static_cast<const unsigned char*>(p.packed) + job.packed;
  const auto* of_keys = reinterpret_cast<const uint32_t*>(page);
  const auto* of_values = reinterpret_cast<const uint32_t*>(page + places.value_codes);
  C* keys = static_cast<C*>(p.cache);
  C* values = keys + int64_t{p.source_tokens} * dim;
  for (int i = threadIdx.x; i < job.tokens * dim; i += kThreads) {
    const int token = i / dim, channel = i % dim;
    const int64_t at = element_of(p, job, token) + channel;
    const Step<S> of_key = {reinterpret_cast<const S*>(page + places.key_scales)[channel],
                            reinterpret_cast<const S*>(page + places.key_zeros)[channel]};
    const uint32_t key = code_in_row<kBits>(of_keys, dim, token, channel);
    keys[at] = static_cast<C>(number_of(key, widen(of_key)));

    const S* steps = reinterpret_cast<const S*>(page + places.value_steps) + 2 * token;
    uint32_t value;
    if constexpr (kBits == 4) {
      value = code_in_unit(of_values, dim, token, channel);
    } else {
      value = code_in_row<kBits>(of_values, dim, token, channel);
    }
    values[at] = static_cast<C>(number_of(value, widen(Step<S>{steps[0], steps[1]})));
  }
}

}  // namespace

// Names as rust/cuda/src/pack_pages.rs builds them: bits, the cache's elements, then the scales'.
#define KERNELS(BITS, NAME, C, SCALES, S)                                  \
  extern "C" __global__ void __launch_bounds__(kThreads)                   \
      pack_pages_int##BITS##_##NAME##_##SCALES(const PackPagesParams params) {   \
    pack_page<BITS, C, S>(params);                                         \
  }                                                                        \
  extern "C" __global__ void __launch_bounds__(kThreads)                   \
      unpack_pages_int##BITS##_##NAME##_##SCALES(const PackPagesParams params) { \
    unpack_page<BITS, C, S>(params);                                       \
  }
#define EVERY(BITS, SCALES, S)                  \
  KERNELS(BITS, f32, float, SCALES, S)          \
  KERNELS(BITS, bf16, __nv_bfloat16, SCALES, S) \
  KERNELS(BITS, f16, __half, SCALES, S)

EVERY(4, bf16, __nv_bfloat16)
EVERY(4, f16, __half)
EVERY(8, bf16, __nv_bfloat16)
EVERY(8, f16, __half)
