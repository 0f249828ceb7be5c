// Scores of pages by the sum over elements as it is written, each in f32.
//
// What makes it run at the speed of reading bounds of f32:
// 1. bounds are read once, by 16-byte loads, for all query heads that share a KV head: eight lanes
//    have a page and hold its bounds while queries pass by, so 128 bytes of a page are one access
//    and four pages are on their way to each warp at a time. Of bounds of 16 or 8 bits, which are
//    shorter, four lanes have a page, and eight pages are on their way;
// 2. queries lie in shared memory as f32, where the four pages of a warp read the same words.
//
// A query is turned back for entries whose keys were rotated elsewhere: a thread block does so for
// one distance after the other, and mostly there is one. The order of sums is that of the elements
// alone, so a page's score does not depend on what else is scored.
#pragma once

#include "page_entries.cuh"

namespace {

constexpr int kQuad = 4;  // f32 of a load from shared memory
constexpr uint32_t kAll = ~0u;

// How `kThreads` threads read bounds of B where a head dim is at most kDim: `kColumns` loads of a
// lane for a vector of bounds, each of `kWords` elements. Vectors begin on boundaries of eight
// elements.
template <typename B, int kDim, int kThreads>
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

struct Shared {
  int64_t bounds[kWindow];  // row of the entry's bounds, −1 for none
  int delta[kWindow];
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

// Queries of T, bounds of B, of which the `kBounds` vectors from `kFirst` on count.
template <typename T, typename B, int kDim, int kFirst, int kBounds, int kThreads>
class PageScores {
  using L = Layout<B, kDim, kThreads>;
  using Load = typename Words<B>::Load;
  static constexpr bool kScaled = sizeof(B) == 1;
  // Vectors of a page: e4m3 has those alone that count.
  static constexpr int kVectors = sizeof(B) == 4 ? 3 : kScaled ? kBounds : 2;
  using Bounds = float[L::kColumns][L::kWords][kBounds];

  const ScorePagesParams& p;
  Shared& sh;
  float* const queries;  // [group, head_dim], turned
  const EntryRow& row;
  uint32_t begin;    // of the window
  uint32_t entries;  // of it
  uint64_t wanted;   // of those, by bits

 public:
  __device__ PageScores(const ScorePagesParams& params, const EntryRow& of, Shared& shared,
                        float* room)
      : p(params), sh(shared), queries(room), row(of) {}

  // Scores some of the window that begins at an entry of the row, by bits.
  __device__ void run(uint32_t window, uint64_t some) {
    begin = window, entries = min(row.count - begin, kWindow), wanted = some;
    if (wanted == 0) return;
    if (threadIdx.x < entries) {
      sh.bounds[threadIdx.x] = row.page(begin + threadIdx.x);
      sh.delta[threadIdx.x] = row.delta(begin + threadIdx.x);
    }
    __syncthreads();
    // Entries of one delta after the other, in the order of the first of each.
    for (uint32_t from = __ffsll(static_cast<long long>(wanted)) - 1; from < entries;
         from = sh.next) {
      const int delta = sh.delta[from];
      turn(delta);
      __syncthreads();
      if (threadIdx.x == 0) sh.next = static_cast<int>(entries);
      __syncthreads();
      const uint32_t entry = from + threadIdx.x;
      if (is_wanted(entry) && sh.delta[entry] != delta && is_first(entry)) {
        atomicMin(&sh.next, static_cast<int>(entry));
      }
      score(from, delta);
      __syncthreads();
    }
  }

 private:
  __device__ __forceinline__ bool is_wanted(uint32_t entry) const {
    return entry < entries && (wanted >> entry & 1) != 0;
  }

  // Whether none that is wanted before has this one's delta.
  __device__ __forceinline__ bool is_first(uint32_t entry) const {
    for (uint32_t i = 0; i < entry; ++i) {
      if (is_wanted(i) && sh.delta[i] == sh.delta[entry]) return false;
    }
    return true;
  }

  // Brings the queries as keys of an entry with this delta meet them.
  __device__ __forceinline__ void turn(int delta) {
    const uint32_t elements = p.group * p.head_dim;
    for (uint32_t i = threadIdx.x; i < elements; i += kThreads) {
      queries[i] = row.query<T>(i / p.head_dim, i % p.head_dim, delta);
    }
  }

  // Scores those that are wanted from `from` on that have this delta. A warp's lanes stay together.
  __device__ __forceinline__ void score(uint32_t from, int delta) {
    const uint32_t lane = threadIdx.x % L::kLanes, dim = p.head_dim;
    for (uint32_t first = from; first < entries; first += L::kStep) {
      const uint32_t entry = first + threadIdx.x / L::kLanes;
      const bool asked = is_wanted(entry) && sh.delta[entry] == delta;
      const int64_t page = asked ? sh.bounds[entry] : -1;
      Bounds bounds;
      fetch(bounds, page, lane, dim);
      float whole = row.nothing();
#pragma unroll 2
      for (uint32_t i = 0; i < p.group; ++i) {
        whole = row.joined(whole, row.finished(dot(queries + i * dim, bounds, lane, dim)));
      }
      if (asked && lane == 0) row.scores[begin + entry] = page >= 0 ? whole : -INFINITY;
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
};

}  // namespace
