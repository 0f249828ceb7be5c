// The entries that score_pages scores, and what all ways of scoring them have in common.
#pragma once

#include <cmath>

#include "api.h"
#include "turned_element.cuh"
#include "vector.cuh"

namespace {

constexpr uint32_t kWindow = 64;  // entries that are scored together: WINDOW of the launch

// The greater of two numbers, NaN where one is: fmaxf drops a NaN.
__device__ __forceinline__ float greater(float one, float other) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(one), "f"(other));
  return most;
}

// The table of a request's KV head, whose entries are scored a window at a time.
class EntryRow {
 public:
  const uint32_t head;
  const uint32_t request;
  int64_t rank;          // of the head's pages within a block
  const int32_t* first;  // entry of the table
  uint32_t count;        // of its entries
  float* scores;         // of them

  __device__ EntryRow(const ScorePagesParams& params, uint32_t of_head, uint32_t of_request)
      : head(of_head), request(of_request), p(params) {
    const bool own = p.heads != nullptr;
    const int32_t table = own ? p.heads[4 * head] : 0;
    rank = own ? p.heads[4 * head + 1] : p.first_rank + head;
    const int32_t* offsets = p.entry_offsets + int64_t{request} * p.tables + table;
    const int64_t base = offsets[0], listed = int64_t{offsets[1]} - base;
    count = static_cast<uint32_t>(min(max(listed, int64_t{0}), int64_t{p.width}));
    first = p.entries + 5 * base;
    scores = p.scores + row() * p.width;
  }

  // Says how many entries the table has, and gives −∞ to those of some places that it has not.
  __device__ void close(uint32_t begin, uint32_t end) const {
    if (begin == 0 && threadIdx.x == 0) p.counts[row()] = static_cast<int32_t>(count);
    for (uint32_t i = max(begin, count) + threadIdx.x; i < min(end, p.width); i += blockDim.x) {
      scores[i] = -INFINITY;
    }
  }

  // Row of an entry's bounds, −1 for none.
  __device__ __forceinline__ int64_t page(uint32_t entry) const {
    const int64_t block = first[5 * int64_t{entry}], page = block + rank;
    return block >= 0 && page < p.pages ? page : -1;
  }

  __device__ __forceinline__ int delta(uint32_t entry) const {
    return first[5 * int64_t{entry} + 4];
  }

  // An element of one of the head's queries, as keys of entries with this delta meet it.
  template <typename T>
  __device__ __forceinline__ float query(uint32_t i, uint32_t d, int delta) const {
    const T* vector = static_cast<const T*>(p.q) + request * p.q_row_stride +
                      (int64_t{head} * p.group + i) * p.q_head_stride;
    if (delta == 0) return static_cast<float>(vector[d]);
    return turned(vector, static_cast<int>(d), delta, p.inv_freq, static_cast<int>(p.pairs),
                  p.interleaved != 0);
  }

  // A score of a query, of its product with what stands for a page's keys.
  __device__ __forceinline__ float finished(float dot) const {
    const float logit = dot * p.scale;
    return p.softcap > 0.0f ? p.softcap * tanhf(logit / p.softcap) : logit;
  }

  // Scores of two queries, or of two groups of them, as one.
  __device__ __forceinline__ float joined(float one, float other) const {
    return p.summed != 0 ? one + other : greater(one, other);
  }

  __device__ __forceinline__ float nothing() const { return p.summed != 0 ? 0.0f : -INFINITY; }

 private:
  const ScorePagesParams& p;

  __device__ __forceinline__ int64_t row() const { return int64_t{request} * p.kv_heads + head; }
};

}  // namespace
