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
// 4. Codes of values pass through shared memory, where a word of eight finds its own, or they their
//    words. Rows are a bank further on there than channels ask for, so that those of a word differ.
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
constexpr int kBeside = 4;    // bytes between their rows

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
    unsigned char codes[kCoded * (kMaxDim + kBeside)];  // of values
  };
  float2 steps[kMaxDim];  // of channels; of values, of so many tokens
};

// Words of eight codes of a token, where it lies among codes token by token.
template <int kBits>
__device__ __forceinline__ void store_row(uint32_t* words, int element,
                                          const uint32_t (&codes)[8]) {
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

// Where the codes of word i of values in four bits lie among rows of tokens: of its unit the token
// and the channel of nibble 0. Nibble 2k + h + 4b: token 2t + b + 8k, channel 16j + g + 8h.
__device__ __forceinline__ int place_in_rows(int i, int dim) {
  const int run = value_run(dim), unit = i / (2 * dim), of_unit = i % (2 * dim);
  const int with = of_unit / run % 32, tile = of_unit / (32 * run) * run + of_unit % run;
  return (16 * unit + with % 4 * 2) * (dim + kBeside) + 16 * tile + with / 4;
}

__device__ __forceinline__ int place_of_nibble(int e, int dim) {
  return (e / 4 + e % 4 / 2 * 8) * (dim + kBeside) + e % 2 * 8;
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
        unsigned char* to = side.codes + (token - first) * (dim + kBeside) + share.channel;
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
        const unsigned char* codes = side.codes + place_in_rows(i, dim);
        uint32_t word = 0;
#pragma unroll
        for (int e = 0; e < 8; ++e) word |= uint32_t{codes[place_of_nibble(e, dim)]} << (4 * e);
        words[first * dim / 8 + i] = word;
      }
    }
    __syncthreads();
  }
}

// Finds the tokens of a page; by all threads.
__device__ __forceinline__ void find_tokens(const PackPagesParams& p, const Job& job, Side& side) {
  for (int token = threadIdx.x; token < job.tokens; token += kThreads) {
    side.at[token] = element_of(p, job, token);
  }
  __syncthreads();
}

template <int kBits, typename C, typename S>
__device__ void pack_page(const PackPagesParams& p) {
  __shared__ Side side;
  const int number = blockIdx.x / 2;
  const Job job = job_of(p, number / p.pages, number % p.pages);
  if (job.packed < 0) return;
  find_tokens(p, job, side);
  unsigned char* page = static_cast<unsigned char*>(p.packed) + job.packed;
  const C* keys = static_cast<const C*>(p.cache);
  if (blockIdx.x % 2 == 0) {
    pack_keys<kBits, C, S>(p, job, side, keys, page);
  } else {
    const C* values = keys + int64_t{p.source_tokens} * p.head_dim;
    pack_values<kBits, C, S>(p, job, side, values, page);
  }
}

// Codes of eight channels of a token, where it lies among codes token by token.
template <int kBits>
__device__ __forceinline__ void load_row(uint32_t (&codes)[8], const uint32_t* words, int element) {
  constexpr int kPer = 32 / kBits;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    codes[e] = words[element / kPer + e / kPer] >> shift_in_row<kBits>(e % kPer) &
               largest_code(kBits);
  }
}

// Writes eight channels of a token, which are read again soon.
template <typename C, typename StepAt>
__device__ __forceinline__ void store_eight(C* to, const uint32_t (&codes)[8], StepAt step_at) {
  Pack<C, kOfThread> numbers;
#pragma unroll
  for (int e = 0; e < kOfThread; ++e) {
    numbers.at[e] = static_cast<C>(number_of(codes[e], step_at(e)));
  }
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(numbers) / 16); ++i) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(&numbers)[i];
  }
}

template <int kBits, typename C, typename S>
__device__ void unpack_keys(const PackPagesParams& p, const Job& job, const Side& side, C* to,
                            const unsigned char* page) {
  const int dim = p.head_dim;
  const PackedPlaces places = places_of<kBits>(p.page_tokens, dim);
  const Share share(dim);
  const auto scales = load<S, kOfThread>(
      reinterpret_cast<const S*>(page + places.key_scales) + share.channel);
  const auto zeros = load<S, kOfThread>(
      reinterpret_cast<const S*>(page + places.key_zeros) + share.channel);
  float2 steps[kOfThread];
#pragma unroll
  for (int e = 0; e < kOfThread; ++e) steps[e] = widen(Step<S>{scales.at[e], zeros.at[e]});
#pragma unroll 4
  for (int token = share.token; token < job.tokens; token += share.tokens) {
    uint32_t codes[8];
    load_row<kBits>(codes, reinterpret_cast<const uint32_t*>(page), token * dim + share.channel);
    store_eight(to + side.at[token] + share.channel, codes, [&](int e) { return steps[e]; });
  }
}

template <int kBits, typename C, typename S>
__device__ void unpack_values(const PackPagesParams& p, const Job& job, Side& side, C* to,
                              const unsigned char* page) {
  const int dim = p.head_dim;
  const PackedPlaces places = places_of<kBits>(p.page_tokens, dim);
  const auto* words = reinterpret_cast<const uint32_t*>(page + places.value_codes);
  const auto* steps = reinterpret_cast<const S*>(page + places.value_steps);
  const Share share(dim);
  for (int first = 0; first < job.tokens; first += kCoded) {
    const int end = min(first + kCoded, static_cast<int>(p.page_tokens));
    if constexpr (kBits == 4) {
      for (int i = threadIdx.x; i < (end - first) * dim / 8; i += kThreads) {
        unsigned char* codes = side.codes + place_in_rows(i, dim);
        const uint32_t word = words[first * dim / 8 + i];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          codes[place_of_nibble(e, dim)] = static_cast<unsigned char>(word >> (4 * e) & 15);
        }
      }
      __syncthreads();
    }
    for (int token = first + share.token; token < min(end, job.tokens); token += share.tokens) {
      uint32_t codes[8];
      if constexpr (kBits == 4) {
        const unsigned char* from = side.codes + (token - first) * (dim + kBeside) + share.channel;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          codes[e] = reinterpret_cast<const uint32_t*>(from)[e / 4] >> (8 * (e % 4)) & 255;
        }
      } else {
        load_row<kBits>(codes, words, token * dim + share.channel);
      }
      const float2 step = widen(Step<S>{steps[2 * token], steps[2 * token + 1]});
      store_eight(to + side.at[token] + share.channel, codes, [&](int) { return step; });
    }
    __syncthreads();
  }
}

template <int kBits, typename C, typename S>
__device__ void unpack_page(const PackPagesParams& p) {
  __shared__ Side side;
  const int number = blockIdx.x / 2;
  const Job job = job_of(p, number / p.pages, number % p.pages);
  if (job.packed < 0) return;
  find_tokens(p, job, side);
  const unsigned char* page = static_cast<const unsigned char*>(p.packed) + job.packed;
  C* keys = static_cast<C*>(p.cache);
  if (blockIdx.x % 2 == 0) {
    unpack_keys<kBits, C, S>(p, job, side, keys, page);
  } else {
    unpack_values<kBits, C, S>(p, job, side, keys + int64_t{p.source_tokens} * p.head_dim, page);
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
