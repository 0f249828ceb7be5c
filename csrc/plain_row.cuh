// One query row in plain arithmetic, for any head dim that is a multiple of 8: a lane holds 8
// elements of a vector, so that a warp reads several keys at once.
#pragma once

#include <cmath>
#include <type_traits>

#include "paged.cuh"
#include "powers.cuh"
#include "rotation.cuh"
#include "vector.cuh"

constexpr int kMaxHeadDim = 256;
constexpr int kSlice = 8;  // elements of a vector that one lane holds

// How the lanes of a warp share out vectors of head_dim elements.
struct Lanes {
  int width;    // lanes of one vector, a power of two
  int vectors;  // vectors that the warp holds at once
  int vector;   // this lane's vector
  int slice;    // this lane's elements are [8 · slice, 8 · slice + 8)
  bool holds;   // false where the vector has no such elements
};

__device__ __forceinline__ Lanes share_lanes(int head_dim) {
  const int lane = threadIdx.x % 32;
  const int slices = head_dim / kSlice;
  Lanes lanes;
  lanes.width = 1;
  while (lanes.width < slices) lanes.width *= 2;
  lanes.vectors = 32 / lanes.width;
  lanes.vector = lane / lanes.width;
  lanes.slice = lane % lanes.width;
  lanes.holds = lanes.slice < slices;
  return lanes;
}

// The sum over the lanes of one vector, in each of them.
__device__ __forceinline__ float sum_of_vector(const Lanes& lanes, float x) {
  for (int step = lanes.width / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// What a lane reads of a slice at once.
template <typename T>
using Word = std::conditional_t<kSlice * sizeof(T) < 16, uint2, uint4>;

// Whether vectors that lie sums of strides apart, here given or-ed, can be read in such words.
template <typename T>
__device__ __forceinline__ bool are_aligned(const void* first, int64_t strides) {
  return (reinterpret_cast<uintptr_t>(first) | strides * sizeof(T)) % sizeof(Word<T>) == 0;
}

template <typename T>
__device__ __forceinline__ Pack<T, kSlice> load_slice(const T* from, bool aligned) {
  Pack<T, kSlice> slice;
  if (aligned) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(slice) / sizeof(Word<T>)); ++i) {
      reinterpret_cast<Word<T>*>(&slice)[i] = reinterpret_cast<const Word<T>*>(from)[i];
    }
  } else {
#pragma unroll
    for (int e = 0; e < kSlice; ++e) slice.at[e] = from[e];
  }
  return slice;
}

template <typename T>
__device__ __forceinline__ void widen(const Pack<T, kSlice>& slice, float (&to)[kSlice]) {
#pragma unroll
  for (int e = 0; e < kSlice; ++e) to[e] = static_cast<float>(slice.at[e]);
}

// Writes `from` rotated by `delta` positions to `to`, both [head_dim] of this warp's shared memory;
// back by as many with kBack. No lane may still read `to`.
template <bool kBack>
__device__ void rotate_vector(const PagedKv& kv, int delta, const float* from, float* to) {
  const int lane = threadIdx.x % 32;
  const int pairs = static_cast<int>(kv.pairs);
  for (int i = 2 * pairs + lane; i < static_cast<int>(kv.head_dim); i += 32) to[i] = from[i];
  for (int pair = lane; pair < pairs; pair += 32) {
    const int first = kv.interleaved ? 2 * pair : pair;
    const int second = kv.interleaved ? first + 1 : first + pairs;
    const float x = from[first], y = from[second];
    float cosine, sine;
    cos_sin(half_turns(delta, kv.inv_freq[pair]), cosine, sine);
    if (kBack) sine = -sine;
    // Without a rotation elements stay as they are, infinities included.
    to[first] = delta == 0 ? x : x * cosine - y * sine;
    to[second] = delta == 0 ? y : x * sine + y * cosine;
  }
  __syncwarp();
}

// The score of a key in powers of two: log2(e) · softcap(scale · dot).
__device__ __forceinline__ float score_of(float dot, float scale, float softcap) {
  const float score = scale * dot;
  return kLog2e * (softcap == 0.0f ? score : softcap * tanhf(score / softcap));
}

// 2^(x − largest), and 0 for an x of −∞ even where nothing is larger.
__device__ __forceinline__ float weight_of(float x, float largest) {
  return exp2f(x - (largest == -INFINITY ? 0.0f : largest));
}

// The last entry of [begin, end) whose position is at most `position`, or the first.
__device__ __forceinline__ int entry_at(const PagedKv& kv, int begin, int end, int position) {
  int low = begin, high = end;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (kv.entries[int64_t{5} * middle + 3] <= position) low = middle; else high = middle;
  }
  return low;
}

// Calls `read(entry, first, last)` for slots [first, last) of each of the entries [begin, end) that
// hold keys at positions [from, to), in order; for pages up to `rank`.
template <typename Read>
__device__ void walk_keys(const PagedKv& kv, int begin, int end, int rank, int64_t from, int64_t to,
                          Read read) {
  if (begin >= end || from >= to) return;
  int index = entry_at(kv, begin, end, static_cast<int>(from));
  Entry next = read_entry(kv, index, rank);
  for (; index < end && next.position < to; ++index) {
    const Entry entry = next;
    if (index + 1 < end) next = read_entry(kv, index + 1, rank);
    const int64_t skipped = max(from - entry.position, int64_t{0});
    const int64_t wanted = to - entry.position;
    const int first = static_cast<int>(min(int64_t{entry.end}, entry.begin + skipped));
    const int last = static_cast<int>(min(int64_t{entry.end}, entry.begin + wanted));
    if (first < last) read(entry, first, last);
  }
}

// Positions that a row sees: [0, sink) and [oldest, end), which do not overlap.
struct KeySpan {
  int64_t sink, oldest, end;
};

__device__ __forceinline__ KeySpan span_of(const Reach& reach, int position) {
  KeySpan span;
  span.end = int64_t{position} + 1;
  span.oldest = reach.window == 0 ? 0 : max(span.end - reach.window, int64_t{0});
  span.sink = min(int64_t{reach.sink}, min(span.oldest, span.end));
  return span;
}

// A query vector of T that a warp scores keys of C with.
template <typename T, typename C>
class PlainQuery {
 public:
  static constexpr int kKeys = 4;  // keys that a lane reads before it uses the first
  const Lanes lanes;
  const bool aligned;

  // `query` and `turned` are this warp's, [head_dim] each, in shared memory.
  __device__ PlainQuery(const PagedKv& kv, float scale, float softcap, float* query, float* turned)
      : lanes(share_lanes(kv.head_dim)),
        aligned(are_aligned<C>(kv.cache, kv.block_stride | kv.head_stride | kv.token_stride |
                                             kv.value_offset)),
        kv_(kv), scale_(scale), softcap_(softcap), query_(query), turned_(turned) {}

  __device__ void load(const T* q) {
    for (int i = threadIdx.x % 32; i < static_cast<int>(kv_.head_dim); i += 32) {
      query_[i] = static_cast<float>(q[i]);
    }
    turn(0);
  }

  // This lane's elements of an entry's slot 0, once the query is turned to the entry's keys.
  __device__ const C* keys_of(const Entry& entry, int rank) {
    if (entry.delta != delta_) turn(entry.delta);
    return static_cast<const C*>(kv_.cache) + entry.offset + rank * kv_.head_stride +
           lanes.slice * kSlice;
  }

  // Scores of this lane's keys, slots first + i · vectors + vector; −∞ from `last` on.
  __device__ void score(const C* keys, int first, int last, float (&scores)[kKeys]) const {
    Pack<C, kSlice> key[kKeys];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int slot = first + i * lanes.vectors + lanes.vector;
      key[i] = {};
      if (slot < last && lanes.holds) key[i] = load_slice(keys + slot * kv_.token_stride, aligned);
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      float wide[kSlice], dot = 0.0f;
      widen(key[i], wide);
#pragma unroll
      for (int e = 0; e < kSlice; ++e) dot += q_[e] * wide[e];
      const float score = score_of(sum_of_vector(lanes, dot), scale_, softcap_);
      scores[i] = first + i * lanes.vectors + lanes.vector < last ? score : -INFINITY;
    }
  }

 private:
  const PagedKv& kv_;
  const float scale_, softcap_;
  float* query_;
  float* turned_;
  float q_[kSlice];  // turned back by delta_
  int delta_;

  // Scores of keys stored `delta` positions off need q turned back by as much.
  __device__ void turn(int delta) {
    __syncwarp();
    rotate_vector<true>(kv_, delta, query_, turned_);
    delta_ = delta;
#pragma unroll
    for (int e = 0; e < kSlice; ++e) {
      q_[e] = lanes.holds ? turned_[lanes.slice * kSlice + e] : 0.0f;
    }
  }
};
