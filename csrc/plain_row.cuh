// One query row in plain arithmetic, for any head dim that is a multiple of 8: a lane holds 8
// elements of a vector, so that a warp reads several keys at once.
#pragma once

#include <cmath>

#include "paged.cuh"
#include "rotation.cuh"
#include "vector.cuh"

constexpr int kMaxHeadDim = 256;
constexpr int kSlice = 8;  // elements of a vector that one lane holds
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLog2e = 1.4426950408889634f;

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

// Whether every vector of the cache starts on a 16-byte boundary.
template <typename T>
__device__ __forceinline__ bool is_aligned(const PagedKv& kv) {
  const int64_t strides = kv.block_stride | kv.head_stride | kv.token_stride | kv.value_offset;
  return (reinterpret_cast<uintptr_t>(kv.cache) | strides * sizeof(T)) % 16 == 0;
}

template <typename T>
__device__ __forceinline__ Pack<T, kSlice> load_slice(const T* from, bool aligned) {
  Pack<T, kSlice> slice;
  if (aligned) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(slice) / 16); ++i) {
      reinterpret_cast<uint4*>(&slice)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
  } else {
#pragma unroll
    for (int e = 0; e < kSlice; ++e) slice.at[e] = from[e];
  }
  return slice;
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
// hold keys at positions [from, to), in order.
template <typename Read>
__device__ void walk_keys(const PagedKv& kv, int begin, int end, int64_t from, int64_t to,
                          Read read) {
  if (begin >= end || from >= to) return;
  int index = entry_at(kv, begin, end, static_cast<int>(from));
  Entry next = read_entry(kv, index);
  for (; index < end && next.position < to; ++index) {
    const Entry entry = next;
    if (index + 1 < end) next = read_entry(kv, index + 1);
    const int64_t skipped = max(from - entry.position, int64_t{0});
    const int64_t wanted = to - entry.position;
    const int first = static_cast<int>(min(int64_t{entry.end}, entry.begin + skipped));
    const int last = static_cast<int>(min(int64_t{entry.end}, entry.begin + wanted));
    if (first < last) read(entry, first, last);
  }
}
