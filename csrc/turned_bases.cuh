// Queries into the basis of a text, and results out of it: once for all pages of a thread block
// that lie next to each other and were packed in the same basis (MosaicKV, section 5.3).
#pragma once

#include <climits>

#include "api.h"
#include "bases.cuh"
#include "decode_units.cuh"
#include "rotation.cuh"
#include "vector.cuh"

// Which basis, and by how much queries are turned back before; a number below 0: neither.
struct BasisKey {
  int number, delta;

  __device__ bool known() const { return number >= 0; }
  __device__ bool operator!=(const BasisKey& other) const {
    return number != other.number || delta != other.delta;
  }
};

// The side of a basis as attention takes it: what a number along each channel stands for, and what
// all vectors have in common.
struct Directions {
  const float *mean, *rows;  // [D]; [channels, D]
  int channels;
};

// In shared memory. All functions but `place_of` are called by all threads of a block.
template <typename T, int D>
struct TurnedBases {
  static constexpr int kParts = D == 64 ? 8 : 3;  // of a sum over directions
  static constexpr int kWords = D / 4;
  static constexpr int kAtOnce = kQueries / 2;
  static constexpr int kPitch = D + 16;  // of rotated queries

  BasisKey key;
  int first_known, first_other;
  alignas(16) float of_queries[kQueries];        // times the mean key
  alignas(16) float queries[kQueries * kPitch];  // in the basis, by `place_of`
  union {
    alignas(16) float turned[kQueries * D];  // queries turned back
    alignas(16) float sums[D * kQueries];    // of values in the basis, by channels
  };
  alignas(16) float parts[kParts][kQueries * D];

  // Where the first of pages [from, to) lies whose key is known and another than that of those
  // before, which becomes `key`.
  template <int kThreads, typename KeyOf>
  __device__ int alike(int from, int to, KeyOf key_of) {
    bool found = false;
#pragma unroll 1
    for (int at = from; at < to; at += kThreads) {
      __syncthreads();
      if (threadIdx.x == 0) {
        first_known = first_other = INT_MAX;
        if (!found) key = {-1, 0};
      }
      __syncthreads();
      const int unit = at + threadIdx.x;
      const BasisKey own = unit < to ? key_of(unit) : BasisKey{-1, 0};
      if (!found) {
        if (own.known()) atomicMin(&first_known, unit);
        __syncthreads();
        found = first_known < INT_MAX;
        if (unit == first_known) key = own;
        __syncthreads();
      }
      if (found && own.known() && own != key) atomicMin(&first_other, unit);
      __syncthreads();
      if (first_other < INT_MAX) return first_other;
    }
    return to;
  }

  // Turns an item's queries back by the delta of `key`, and rotates them into its basis of keys.
  // That of values is on its way then.
  template <int kThreads>
  __device__ void turn_in(const AttendParams& p, const Heads& of, const Directions& keys,
                          const Directions& values) {
    const BasisKey at = key;
    turn_back_queries<kThreads>(p, of, at.delta);
    bring_near<kThreads>(values);
    for (int i = threadIdx.x; i < kQueries * D; i += kThreads) {
      const bool none = i % D >= keys.channels || i / D >= of.count || !at.known();
      if (none) queries[place_of(i / D, i % D)] = 0;
    }
    if (threadIdx.x < kQueries) of_queries[threadIdx.x] = 0;
    __syncthreads();
    if (at.known()) {
#pragma unroll 1
      for (int first = 0; first < of.count; first += kAtOnce) rotate<kThreads>(keys, first);
    }
    __syncthreads();
  }

  // Where a number of a rotated query lies: so that lanes which read 16 bytes of the same quarter
  // of other queries, or of other quarters, do not meet in a bank.
  static __device__ __forceinline__ int place_of(int query, int channel) {
    return query * kPitch + channel + 4 * (channel / (D / 4));
  }

  // Notes word i of sums in the basis.
  __device__ void put(int i, const float4& value) {
    const int q = i / kWords, channel = i % kWords * 4;
    const float four[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[(channel + e) * kQueries + q] = four[e];
  }

  // This thread's word of the sums in channels; `states` has the weights of the queries.
  template <int kThreads>
  __device__ float4 turn_back(const Directions& values, const Heads& of, const State* states) {
    static_assert(kThreads / D == kParts && kQueries * kWords <= kThreads, "threads of a block");
    __syncthreads();
    const bool known = key.known();
    if (known) {
#pragma unroll 1
      for (int first = 0; first < of.count; first += kAtOnce) {
        add_directions(values, first);
      }
    }
    __syncthreads();
    float4 value = {0, 0, 0, 0};
    const int q = threadIdx.x / kWords, word = threadIdx.x % kWords;
    if (!known || q >= of.count) return value;
    const float weight = states[q].l;
    const float4 mean = __ldg(reinterpret_cast<const float4*>(values.mean) + word);
    // What is NaN is so in all channels, even where a basis has no direction to bring it there.
    const float odd = 0 * sums[q];
    value = {weight * mean.x + odd, weight * mean.y + odd, weight * mean.z + odd,
             weight * mean.w + odd};
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float4 x = *reinterpret_cast<const float4*>(parts[part] + q * D + 4 * word);
      value.x += x.x;
      value.y += x.y;
      value.z += x.z;
      value.w += x.w;
    }
    return value;
  }

 private:
  template <int kThreads>
  __device__ void turn_back_queries(const AttendParams& p, const Heads& of, int delta) {
    for (int i = threadIdx.x; i < kQueries * D; i += kThreads) {
      const int q = i / D, d = i % D;
      float x = 0;
      if (q < of.count) {
        const T* query = static_cast<const T*>(p.q) + of.request * p.q_row_stride +
                         (of.first + q) * p.q_head_stride;
        x = delta == 0 ? static_cast<float>(query[d]) : turned_number(p, query, d, delta);
      }
      turned[i] = x;
    }
  }

  // Into the cache, by lines of 128 bytes.
  template <int kThreads>
  static __device__ void bring_near(const Directions& of) {
    for (int i = 32 * threadIdx.x; i < of.channels * D; i += 32 * kThreads) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(of.rows + i));
    }
  }

  // Rare, and long: not inlined.
  static __device__ __noinline__ float turned_number(const AttendParams& p, const T* query, int d,
                                                     int delta) {
    const auto angle_of = [&](int pair) {
      float2 angle;
      cos_sin(half_turns(-delta, p.kv.inv_freq[pair]), angle.x, angle.y);
      return angle;
    };
    return turned_element(query, d, static_cast<int>(p.kv.pairs), p.kv.interleaved != 0, angle_of);
  }

  // Some queries from `first` on. A warp has the mean or a direction at a time, a lane D / 32
  // channels of it.
  template <int kThreads>
  __device__ void rotate(const Directions& keys, int first) {
    constexpr int kOwn = D / 32, kWarps = kThreads / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float q[kAtOnce][kOwn];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int e = 0; e < kOwn; ++e) q[i][e] = turned[(first + i) * D + kOwn * lane + e];
    }
    // All are on their way before one is waited for.
    constexpr int kRounds = D / kWarps + 1;
    Pack<float, kOwn> rows[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int row = warp + i * kWarps;
      const float* from = row == 0 ? keys.mean : keys.rows + (row - 1) * D;
      if (row <= keys.channels) rows[i] = load<float, kOwn>(from + kOwn * lane);
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int row = warp + round * kWarps;
      if (row > keys.channels) break;
      const Pack<float, kOwn>& x = rows[round];
      float sum[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        sum[i] = 0;
#pragma unroll
        for (int e = 0; e < kOwn; ++e) sum[i] = fmaf(q[i][e], x.at[e], sum[i]);
      }
      // Half of the queries go to half of the lanes, until a lane has one of them.
#pragma unroll
      for (int count = kAtOnce / 2; count > 0; count /= 2) {
        const bool upper = (lane & 8 * count) != 0;
#pragma unroll
        for (int i = 0; i < count; ++i) {
          const float other = upper ? sum[i] : sum[i + count];
          const float mine = upper ? sum[i + count] : sum[i];
          sum[i] = mine + __shfl_xor_sync(~0u, other, 8 * count);
        }
      }
#pragma unroll
      for (int step = 4; step > 0; step /= 2) sum[0] += __shfl_xor_sync(~0u, sum[0], step);
      if (lane % 8 != 0) continue;
      const int query = first + lane / 8;
      if (row == 0) {
        of_queries[query] = sum[0];
      } else {
        queries[place_of(query, row - 1)] = sum[0];
      }
    }
  }

  // A thread has a channel, and of some queries from `first` on a part of the sum over directions.
  __device__ void add_directions(const Directions& values, int first) {
    const int channel = threadIdx.x % D, part = threadIdx.x / D;
    float sum[kAtOnce] = {};
#pragma unroll 22
    for (int c = part; c < values.channels; c += kParts) {
      const float x = __ldg(values.rows + c * D + channel);
      const float4 of = *reinterpret_cast<const float4*>(sums + c * kQueries + first);
      sum[0] = fmaf(of.x, x, sum[0]);
      sum[1] = fmaf(of.y, x, sum[1]);
      sum[2] = fmaf(of.z, x, sum[2]);
      sum[3] = fmaf(of.w, x, sum[3]);
    }
#pragma unroll
    for (int q = 0; q < kAtOnce; ++q) parts[part][(first + q) * D + channel] = sum[q];
  }
};
