// pack_pages: exact pages into packed ones; unpack_pages: back.
//
// The simple version:
//   for each channel of a page's keys, and each token's values: steps from least to greatest,
//   then for each number the code of the step nearest to it
//
// What makes it fast:
// 1. One thread block a side of a page, all pages of all rows in one launch: the few that a model
//    fills in a step are enough for all processors.
// 2. Numbers are read eight channels at a time, twice; the second reading comes from the cache.
// 3. A thread keeps its channels, and how to divide by their steps. It multiplies by the inverse,
//    and divides only where that might round to the neighbour.
// 4. Codes of values pass through shared memory, where a word of eight finds its own.
//
// Launch: 2 · rows · pages blocks of 256 threads. A row that points outside either side is skipped.

#include "api.h"
#include "pack_job.cuh"
#include "packed.cuh"
#include "vector.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kMaxTokens = 256;
constexpr int kMaxDim = 256;
constexpr int kOfThread = 8;  // channels of a token
constexpr int kCoded = 64;    // tokens whose codes of values are in shared memory at once

// First bit of code e of a word that has codes of one token.
template <int kBits>
__device__ __forceinline__ int shift_in_row(int e) {
  return kBits == 4 ? 4 * (e / 2) + 16 * (e % 2) : kBits * e;
}

// A step, and what to multiply by for a number of them.
struct Divisor {
  float scale, zero, inverse;

  __device__ __forceinline__ Divisor() {}
  __device__ __forceinline__ explicit Divisor(const float2& step)
      : scale(step.x), zero(step.y), inverse(__frcp_rn(step.x)) {}

  // As `code_of`. A product is less than 1e-3 from the quotient; what is no number is divided.
  __device__ __forceinline__ uint32_t code(float x, int largest) const {
    if (!(scale > 0)) return 0;
    const float over = __fsub_rn(x, zero);
    float steps = __fmul_rn(over, inverse);
    const bool sure = fabsf(steps - floorf(steps) - 0.5f) > 1e-3f;
    if (!sure) steps = __fdiv_rn(over, scale);
    return nearest_code(steps, largest);
  }
};

// How the threads of a block share the numbers of a side: each has eight channels of every so many
// tokens. Where these do not go into the block, the last threads have none.
struct Share {
  int channel, token, tokens;  // the first of its channels, its first token, and how far apart

  __device__ __forceinline__ explicit Share(int dim) {
    const int parts = dim / kOfThread;
    tokens = kThreads / parts;
    channel = threadIdx.x % parts * kOfThread;
    token = threadIdx.x / parts;
    if (token == tokens) token = kMaxTokens;
  }
};

struct Side {
  int64_t at[kMaxTokens];  // first element of each token of the page
  union {
    Spread keys[kThreads * kOfThread];              // of a thread's tokens, by channels
    Spread values[kCoded * (kMaxDim / kOfThread)];  // of a thread's channels, by tokens
    unsigned char codes[kCoded * kMaxDim];          // of values
  };
  float2 steps[kMaxDim];  // of channels; of values, of so many tokens
};

// Words of eight codes of a token, where it lies among codes token by token.
template <int kBits>
__device__ __forceinline__ void store_row(uint32_t* words, int element, const uint32_t (&codes)[8]) {
  constexpr int kPer = 32 / kBits;
  uint32_t made[8 / kPer] = {};
#pragma unroll
  for (int e = 0; e < 8; ++e) made[e / kPer] |= codes[e] << shift_in_row<kBits>(e % kPer);
#pragma unroll
  for (int w = 0; w < 8 / kPer; ++w) words[element / kPer + w] = made[w];
}

// Codes of a token's eight channels.
template <int kBits, typename C, typename DivisorOf>
__device__ __forceinline__ void code_eight(uint32_t (&codes)[8], const C* from,
                                           DivisorOf divisor_of) {
  const auto numbers = load<C, kOfThread>(from);
#pragma unroll
  for (int e = 0; e < kOfThread; ++e) {
    codes[e] = divisor_of(e).code(static_cast<float>(numbers.at[e]), largest_code(kBits));
  }
}

template <int kBits, typename C, typename S>
__device__ void pack_keys(const PackPagesParams& p, const Job& job, Side& side, const C* from,
                          unsigned char* page) {
  const int dim = p.head_dim, tokens = p.page_tokens;
  const PackedPlaces places = places_of<kBits>(tokens, dim);
  const Share share(dim);
  Spread own[kOfThread];
#pragma unroll
  for (int e = 0; e < kOfThread; ++e) own[e] = no_spread();
#pragma unroll 4
  for (int token = share.token; token < job.tokens; token += share.tokens) {
    const auto numbers = load<C, kOfThread>(from + side.at[token] + share.channel);
#pragma unroll
    for (int e = 0; e < kOfThread; ++e) own[e].take_in(static_cast<float>(numbers.at[e]));
  }
  if (share.token < share.tokens) {
#pragma unroll
    for (int e = 0; e < kOfThread; ++e) {
      side.keys[share.token * dim + share.channel + e] = own[e];
    }
  }
  __syncthreads();
  for (int channel = threadIdx.x; channel < dim; channel += kThreads) {
    Spread spread = no_spread();
    for (int row = 0; row < share.tokens; ++row) spread.take_in(side.keys[row * dim + channel]);
    const Step<S> step = step_of<S>(spread, largest_code(kBits));
    reinterpret_cast<S*>(page + places.key_scales)[channel] = step.scale;
    reinterpret_cast<S*>(page + places.key_zeros)[channel] = step.zero;
    side.steps[channel] = widen(step);
  }
  __syncthreads();
  Divisor divisors[kOfThread];
#pragma unroll
  for (int e = 0; e < kOfThread; ++e) divisors[e] = Divisor(side.steps[share.channel + e]);
  const auto of_channel = [&](int e) { return divisors[e]; };
#pragma unroll 4
  for (int token = share.token; token < tokens; token += share.tokens) {
    uint32_t codes[8] = {};
    if (token < job.tokens) {
      code_eight<kBits>(codes, from + side.at[token] + share.channel, of_channel);
    }
    store_row<kBits>(reinterpret_cast<uint32_t*>(page), token * dim + share.channel, codes);
  }
}

// Steps of the values of tokens [first, end), each of a token; 0 where there is none.
template <int kBits, typename C, typename S>
__device__ void take_value_steps(const PackPagesParams& p, const Job& job, Side& side,
                                 const C* from, S* steps, int first, int end) {
  const int parts = p.head_dim / kOfThread, there = min(end, job.tokens);
  const Share share(p.head_dim);
#pragma unroll 4
  for (int token = first + share.token; token < there; token += share.tokens) {
    const auto numbers = load<C, kOfThread>(from + side.at[token] + share.channel);
    Spread own = no_spread();
#pragma unroll
    for (int e = 0; e < kOfThread; ++e) own.take_in(static_cast<float>(numbers.at[e]));
    side.values[(token - first) * parts + share.channel / kOfThread] = own;
  }
  __syncthreads();
  for (int token = first + threadIdx.x; token < end; token += kThreads) {
    Step<S> step = {static_cast<S>(0.0f), static_cast<S>(0.0f)};
    if (token < there) {
      const Spread* of_token = side.values + (token - first) * parts;
      Spread spread = no_spread();
      for (int part = 0; part < parts; ++part) spread.take_in(of_token[part]);
      step = step_of<S>(spread, largest_code(kBits));
    }
    steps[2 * token] = step.scale;
    steps[2 * token + 1] = step.zero;
    side.steps[token - first] = widen(step);
  }
  __syncthreads();
}

// Words of codes of four bits of values, as lanes take them, of a unit's 16 tokens: `codes`
// [16, dim].
__device__ __forceinline__ uint32_t unit_word(const unsigned char* codes, int dim, int of_unit) {
  const int run = value_run(dim);
  const int with = of_unit / run % 32, tile = of_unit / (32 * run) * run + of_unit % run;
  uint32_t word = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    // Nibble 2k + h + 4b: token 2t + b + 8k, channel 16j + g + 8h.
    const int token = with % 4 * 2 + e / 4 + e % 4 / 2 * 8;
    const int channel = 16 * tile + with / 4 + e % 2 * 8;
    word |= uint32_t{codes[token * dim + channel]} << (4 * e);
  }
  return word;
}

template <int kBits, typename C, typename S>
__device__ void pack_values(const PackPagesParams& p, const Job& job, Side& side, const C* from,
                            unsigned char* page) {
  const int dim = p.head_dim, tokens = p.page_tokens;
  const PackedPlaces places = places_of<kBits>(tokens, dim);
  auto* words = reinterpret_cast<uint32_t*>(page + places.value_codes);
  auto* steps = reinterpret_cast<S*>(page + places.value_steps);
  const Share share(dim);
  for (int first = 0; first < tokens; first += kCoded) {
    const int end = min(first + kCoded, tokens);
    take_value_steps<kBits>(p, job, side, from, steps, first, end);
    for (int token = first + share.token; token < end; token += share.tokens) {
      uint32_t codes[8] = {};
      if (token < job.tokens) {
        const Divisor divisor(side.steps[token - first]);
        code_eight<kBits>(codes, from + side.at[token] + share.channel,
                          [&](int) { return divisor; });
      }
      if constexpr (kBits == 4) {
        unsigned char* to = side.codes + (token - first) * dim + share.channel;
#pragma unroll
        for (int e = 0; e < 8; e += 4) {
          *reinterpret_cast<uint32_t*>(to + e) =
              codes[e] | codes[e + 1] << 8 | codes[e + 2] << 16 | codes[e + 3] << 24;
        }
      } else {
        store_row<kBits>(words, token * dim + share.channel, codes);
      }
    }
    if constexpr (kBits == 4) {
      __syncthreads();
      for (int i = threadIdx.x; i < (end - first) * dim / 8; i += kThreads) {
        const int unit = i / (2 * dim);
        words[first * dim / 8 + i] = unit_word(side.codes + 16 * unit * dim, dim, i % (2 * dim));
      }
    }
    __syncthreads();
  }
}

template <int kBits, typename C, typename S>
__device__ void pack_page(const PackPagesParams& p) {
  __shared__ Side side;
  const Job job = job_of(p, blockIdx.x / 2);
  if (job.packed < 0) return;
  for (int token = threadIdx.x; token < job.tokens; token += kThreads) {
    side.at[token] = element_of(p, job, token);
  }
  __syncthreads();
  unsigned char* page = static_cast<unsigned char*>(p.packed) + job.packed;
  const C* keys = static_cast<const C*>(p.cache);
  if (blockIdx.x % 2 == 0) {
    pack_keys<kBits, C, S>(p, job, side, keys, page);
  } else {
    const C* values = keys + int64_t{p.source_tokens} * p.head_dim;
    pack_values<kBits, C, S>(p, job, side, values, page);
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
  const Job job = job_of(p, blockIdx.x / 2);
  if (job.packed < 0) return;
  const int dim = p.head_dim;
  const bool of_keys = blockIdx.x % 2 == 0;
  const PackedPlaces places = places_of<kBits>(p.page_tokens, dim);
  const unsigned char* page = static_cast<const unsigned char*>(p.packed) + job.packed;
  const auto* words = reinterpret_cast<const uint32_t*>(page + (of_keys ? 0 : places.value_codes));
  C* to = static_cast<C*>(p.cache) + (of_keys ? 0 : int64_t{p.source_tokens} * dim);
  for (int i = threadIdx.x; i < job.tokens * dim; i += kThreads) {
    const int token = i / dim, channel = i % dim;
    Step<S> step;
    if (of_keys) {
      step = {reinterpret_cast<const S*>(page + places.key_scales)[channel],
              reinterpret_cast<const S*>(page + places.key_zeros)[channel]};
    } else {
      const S* of_token = reinterpret_cast<const S*>(page + places.value_steps) + 2 * token;
      step = {of_token[0], of_token[1]};
    }
    const bool in_units = kBits == 4 && !of_keys;
    const uint32_t code = in_units ? code_in_unit(words, dim, token, channel)
                                   : code_in_row<kBits>(words, dim, token, channel);
    to[element_of(p, job, token) + channel] = static_cast<C>(number_of(code, widen(step)));
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
