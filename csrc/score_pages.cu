// score_pages: how much a row of queries may find in each page that its tables list.
//
// The simple version:
//   for each request, KV head, entry: score = max over the head's queries q of
//     softcap(scale · Σ_d max(q_d · least_d, q_d · greatest_d)), of bounds of the entry's page
//
// What makes it run at the speed of reading bounds:
// 1. bounds are read once, by 16-byte loads, for all query heads that share a KV head: eight lanes
//    have a page and hold its bounds while queries pass by, so 128 bytes of a page are one access
//    and four pages are on their way to each warp at a time. Of bounds of 16 or 8 bits, which are
//    shorter, four lanes have a page, and eight pages are on their way;
// 2. queries lie in shared memory as f32, where the four pages of a warp read the same words;
// 3. thread blocks of neighbouring KV heads, whose bounds lie side by side, run at the same time.
//
// A query is turned back for entries whose keys were rotated elsewhere: a thread block does so for
// one distance after the other, and mostly there is one. The order of sums is that of the elements
// alone, so a page's score does not depend on what else is scored.
//
// An entry whose page has no bounds, as one that points nowhere, scores −∞: a table that was made
// on the device cannot be checked on the host without waiting for it.

#include <cmath>

#include "api.h"
#include "rotation.cuh"
#include "vector.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kEntries = 64;  // of a thread block: ENTRIES of the launch
constexpr int kQuad = 4;      // f32 of a load from shared memory
constexpr uint32_t kAll = ~0u;

// How bounds of B are read where a head dim is at most kDim: `kColumns` loads of a lane for a
// vector of bounds, each of `kWords` elements. Vectors begin on boundaries of eight elements.
template <typename B, int kDim>
struct Layout {
  static constexpr int kWords = sizeof(B) == 4 ? 4 : 8;
  static constexpr int kLanes = sizeof(B) == 4 || kDim > 128 ? 8 : 4;  // of a page
  static constexpr int kColumns = kDim / (kLanes * kWords);
  static constexpr int kStep = kThreads / kLanes;  // pages of a thread block at a time
};

// `kWords` elements of B, which are loaded at once.
template <typename B>
struct Words {
  using Load = uint4;
};
template <>
struct Words<Fp8> {
  using Load = uint2;
};

// The greater of two numbers, NaN where one is: fmaxf drops a NaN.
__device__ __forceinline__ float greater(float one, float other) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(one), "f"(other));
  return most;
}

struct Shared {
  int64_t bounds[kEntries];  // row of the entry's bounds, −1 for none
  int delta[kEntries];
  int next;  // the first entry that has no score yet
};

// What an element adds to a score by its least and greatest number, or by its mean.
template <int kBounds>
__device__ __forceinline__ float part_of(float q, const float (&of)[kBounds]) {
  if constexpr (kBounds == 2) {
    return greater(q * of[0], q * of[1]);
  } else {
    return q * of[0];
  }
}

// An element of a query as keys of an entry with this delta meet it. This is rare, and not inlined.
template <typename T>
__device__ __noinline__ float turned(const T* vector, int d, int delta, const float* inv_freq,
                                     int pairs, bool interleaved) {
  return turned_element(vector, d, pairs, interleaved, [&](int pair) {
    float2 angle;
    cos_sin(half_turns(-delta, inv_freq[pair]), angle.x, angle.y);
    return angle;
  });
}

// Queries of T, bounds of B, of which the `kBounds` vectors from `kFirst` on count.
template <typename T, typename B, int kDim, int kFirst, int kBounds>
class Scores {
  using L = Layout<B, kDim>;
  using Load = typename Words<B>::Load;
  static constexpr bool kScaled = sizeof(B) == 1;
  // Vectors of a page: e4m3 has those alone that count.
  static constexpr int kVectors = sizeof(B) == 4 ? 3 : kScaled ? kBounds : 2;
  using Bounds = float[L::kColumns][L::kWords][kBounds];

  const ScorePagesParams& p;
  Shared& sh;
  float* const queries;  // [group, head_dim], turned
  const uint32_t head = blockIdx.x % p.kv_heads;
  const uint32_t chunk = blockIdx.x / p.kv_heads % p.chunks;
  const uint32_t request = blockIdx.x / p.kv_heads / p.chunks;
  const int64_t row = int64_t{request} * p.kv_heads + head;
  const uint32_t begin = chunk * kEntries;  // of this block among the table's
  uint32_t entries;                         // of this block

 public:
  __device__ Scores(const ScorePagesParams& params, Shared& shared, float* room)
      : p(params), sh(shared), queries(room) {}

  __device__ void run() {
    const bool own = p.heads != nullptr;
    const int32_t table = own ? p.heads[4 * head] : 0;
    const int64_t rank = own ? p.heads[4 * head + 1] : p.first_rank + head;
    const int32_t* offsets = p.entry_offsets + int64_t{request} * p.tables + table;
    const int64_t base = offsets[0], listed = int64_t{offsets[1]} - base;
    const uint32_t count =
        static_cast<uint32_t>(min(max(listed, int64_t{0}), int64_t{p.width}));
    if (chunk == 0 && threadIdx.x == 0) p.counts[row] = static_cast<int32_t>(count);
    entries = count > begin ? min(count - begin, static_cast<uint32_t>(kEntries)) : 0;
    float* scores = p.scores + row * p.width;
    for (uint32_t i = begin + entries + threadIdx.x; i < min(begin + kEntries, p.width);
         i += kThreads) {
      scores[i] = -INFINITY;
    }
    if (entries == 0) return;
    if (threadIdx.x < entries) {
      const int32_t* entry = p.entries + 5 * (base + begin + threadIdx.x);
      const int64_t block = entry[0], page = block + rank;
      sh.bounds[threadIdx.x] = block >= 0 && page < p.pages ? page : -1;
      sh.delta[threadIdx.x] = entry[4];
    }
    __syncthreads();
    // Entries of one delta after the other, in the order of the first of each.
    for (uint32_t from = 0; from < entries; from = sh.next) {
      const int delta = sh.delta[from];
      turn(delta);
      __syncthreads();
      if (threadIdx.x == 0) sh.next = static_cast<int>(entries);
      __syncthreads();
      const uint32_t entry = from + threadIdx.x;
      if (entry < entries && sh.delta[entry] != delta && is_first(entry)) {
        atomicMin(&sh.next, static_cast<int>(entry));
      }
      score(scores + begin, from, delta);
      __syncthreads();
    }
  }

 private:
  // Whether no entry before has this one's delta.
  __device__ __forceinline__ bool is_first(uint32_t entry) const {
    for (uint32_t i = 0; i < entry; ++i) {
      if (sh.delta[i] == sh.delta[entry]) return false;
    }
    return true;
  }

  // Brings the queries as keys of an entry with this delta meet them.
  __device__ __forceinline__ void turn(int delta) {
    const auto* q = static_cast<const T*>(p.q) + request * p.q_row_stride;
    const uint32_t elements = p.group * p.head_dim;
    for (uint32_t i = threadIdx.x; i < elements; i += kThreads) {
      const uint32_t d = i % p.head_dim;
      const T* vector = q + (int64_t{head} * p.group + i / p.head_dim) * p.q_head_stride;
      queries[i] = delta == 0 ? static_cast<float>(vector[d])
                              : turned(vector, static_cast<int>(d), delta, p.inv_freq,
                                       static_cast<int>(p.pairs), p.interleaved != 0);
    }
  }

  // Scores the block's entries from `from` on that have this delta. A warp's lanes stay together.
  __device__ __forceinline__ void score(float* scores, uint32_t from, int delta) {
    const uint32_t lane = threadIdx.x % L::kLanes, dim = p.head_dim;
    for (uint32_t first = from; first < entries; first += L::kStep) {
      const uint32_t entry = first + threadIdx.x / L::kLanes;
      const bool asked = entry < entries && sh.delta[entry] == delta;
      const int64_t page = asked ? sh.bounds[entry] : -1;
      Bounds bounds;
      fetch(bounds, page, lane, dim);
      float whole = p.summed != 0 ? 0.0f : -INFINITY;
#pragma unroll 2
      for (uint32_t i = 0; i < p.group; ++i) {
        const float logit = finished(dot(queries + i * dim, bounds, lane, dim));
        whole = p.summed != 0 ? whole + logit : greater(whole, logit);
      }
      if (asked && lane == 0) scores[entry] = page >= 0 ? whole : -INFINITY;
    }
  }

  // A lane's part of a page's bounds.
  __device__ __forceinline__ void fetch(Bounds& bounds, int64_t page, uint32_t lane,
                                        uint32_t dim) const {
    const B* all = static_cast<const B*>(p.bounds);
    const float factor = kScaled && page >= 0 ? power_of(__ldg(p.scales + page)) : 1.0f;
#pragma unroll
    for (int c = 0; c < L::kColumns; ++c) {
      const uint32_t d = (c * L::kLanes + lane) * L::kWords;
#pragma unroll
      for (int b = 0; b < kBounds; ++b) {
        Load words = {};
        if (page >= 0 && d < dim) {
          const B* from = all + (kVectors * page + kFirst + b) * dim + d;
          words = __ldg(reinterpret_cast<const Load*>(from));
        }
        const auto& of = reinterpret_cast<const Pack<B, L::kWords>&>(words);
#pragma unroll
        for (int w = 0; w < L::kWords; ++w) {
          const float wide = static_cast<float>(of.at[w]);
          bounds[c][w][b] = kScaled ? wide * factor : wide;
        }
      }
    }
  }

  __device__ __forceinline__ float dot(const float* query, const Bounds& bounds, uint32_t lane,
                                       uint32_t dim) const {
    float sums[kQuad] = {};
#pragma unroll
    for (int c = 0; c < L::kColumns; ++c) {
      const uint32_t d = (c * L::kLanes + lane) * L::kWords;
#pragma unroll
      for (int w = 0; w < L::kWords; w += kQuad) {
        // Where there is no element both factors are 0.
        float4 q = {};
        if (d < dim) q = *reinterpret_cast<const float4*>(query + d + w);
        sums[0] += part_of(q.x, bounds[c][w]);
        sums[1] += part_of(q.y, bounds[c][w + 1]);
        sums[2] += part_of(q.z, bounds[c][w + 2]);
        sums[3] += part_of(q.w, bounds[c][w + 3]);
      }
    }
    float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
    for (int step = L::kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
    return sum;
  }

  __device__ __forceinline__ float finished(float dot) const {
    const float logit = dot * p.scale;
    return p.softcap > 0.0f ? p.softcap * tanhf(logit / p.softcap) : logit;
  }
};

template <typename T, typename B, int kDim, int kFirst, int kBounds>
__device__ __forceinline__ void score_pages(const ScorePagesParams& params) {
  __shared__ Shared shared;
  extern __shared__ float4 room[];
  Scores<T, B, kDim, kFirst, kBounds>(params, shared, reinterpret_cast<float*>(room)).run();
}

}  // namespace

// Names as rust/cuda/src/score_pages.rs builds them: dtype of queries, the largest head dim, and
// what a score is made of: bounds in f32, least and greatest keys in the queries' dtype, or e4m3.
#define KERNEL(DTYPE, TYPE, OF, DIM, KIND, FIRST, BOUNDS)                                 \
  extern "C" __global__ void __launch_bounds__(kThreads)                                  \
      score_pages_##DTYPE##_##DIM##_##KIND(const __grid_constant__ ScorePagesParams params) { \
    score_pages<TYPE, OF, DIM, FIRST, BOUNDS>(params);                                    \
  }
#define KINDS(DTYPE, TYPE, OF, KIND, FIRST, BOUNDS)     \
  KERNEL(DTYPE, TYPE, OF, 64, KIND, FIRST, BOUNDS)      \
  KERNEL(DTYPE, TYPE, OF, 128, KIND, FIRST, BOUNDS)     \
  KERNEL(DTYPE, TYPE, OF, 256, KIND, FIRST, BOUNDS)
#define KERNELS(DTYPE, TYPE)                \
  KINDS(DTYPE, TYPE, float, minmax, 0, 2)   \
  KINDS(DTYPE, TYPE, float, mean, 2, 1)     \
  KINDS(DTYPE, TYPE, Fp8, fp8_minmax, 0, 2) \
  KINDS(DTYPE, TYPE, Fp8, fp8_mean, 0, 1)

KERNELS(f32, float)
KERNELS(bf16, __nv_bfloat16)
KERNELS(f16, __half)
KINDS(bf16, __nv_bfloat16, __nv_bfloat16, keys, 0, 2)
KINDS(f16, __half, __half, keys, 0, 2)
