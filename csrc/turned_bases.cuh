// Queries into the basis of a text, and results out of it: once for all pages of a thread block
// that lie next to each other and were packed in the same basis (MosaicKV, section 5.3).
#pragma once

#include <climits>

#include "api.h"
#include "bases.cuh"
#include "decode_units.cuh"
#include "packed_rows.cuh"
#include "rotation.cuh"
#include "tensor_core.cuh"
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

// In shared memory. All functions but `take` are called by all threads of a block.
template <typename T, int D>
struct TurnedBases {
  static constexpr int kParts = D == 64 ? 8 : 3;  // of a sum over directions
  static constexpr int kWords = D / 4;

  BasisKey key;
  int first_known, first_other;
  alignas(16) float of_queries[kQueries];  // times the mean key
  alignas(16) T queries[kQueries * D];     // in the basis
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
  template <int kThreads>
  __device__ void turn_in(const AttendParams& p, const Heads& of, const Directions& keys) {
    const BasisKey at = key;
    turn_back_queries<kThreads>(p, of, at.delta);
    for (int i = threadIdx.x; i < kQueries * D; i += kThreads) {
      if (i % D >= keys.channels || !at.known()) queries[i] = static_cast<T>(0.0f);
    }
    if (threadIdx.x < kQueries && !at.known()) of_queries[threadIdx.x] = 0;
    __syncthreads();
    if (at.known()) rotate<kThreads>(keys);
    __syncthreads();
  }

  // B fragments of a lane, and what its queries score beside.
  __device__ void take(uint32_t (&fragments)[D / 16][2], float (&offsets)[2]) const {
    const int lane = threadIdx.x % 32;
    const T* query = queries + lane / 4 * D;
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
      fragments[i / 2][i % 2] =
          *reinterpret_cast<const uint32_t*>(query + channel_of<D>(lane, i));
    }
#pragma unroll
    for (int q = 0; q < 2; ++q) offsets[q] = of_queries[lane % 4 * 2 + q];
  }

  // Notes word i of sums in the basis, and what each of them has beside.
  __device__ void put(int i, const float4& value, float beside) {
    const int q = i / kWords, channel = i % kWords * 4;
    const float four[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[(channel + e) * kQueries + q] = four[e] + beside;
  }

  // This thread's word of the sums in channels; `states` has the weights of the queries.
  template <int kThreads>
  __device__ float4 turn_back(const Directions& values, const Heads& of, const State* states) {
    static_assert(kThreads / D == kParts && kQueries * kWords <= kThreads, "threads of a block");
    __syncthreads();
    const bool known = key.known();
    if (known) add_directions(values);
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

  // A warp has the mean or a direction at a time, and all queries; a lane D / 32 channels of them.
  template <int kThreads>
  __device__ void rotate(const Directions& keys) {
    constexpr int kOwn = D / 32, kWarps = kThreads / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float q[kQueries][kOwn];
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
#pragma unroll
      for (int e = 0; e < kOwn; ++e) q[i][e] = turned[i * D + kOwn * lane + e];
    }
#pragma unroll 4
    for (int row = warp; row <= keys.channels; row += kWarps) {
      const float* from = row == 0 ? keys.mean : keys.rows + (row - 1) * D;
      const Pack<float, kOwn> x = load<float, kOwn>(from + kOwn * lane);
      float sum[kQueries];
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
        sum[i] = 0;
#pragma unroll
        for (int e = 0; e < kOwn; ++e) sum[i] = fmaf(q[i][e], x.at[e], sum[i]);
      }
      // Half of the queries go to half of the lanes, until a lane has one of them.
#pragma unroll
      for (int count = kQueries / 2; count > 0; count /= 2) {
        const bool upper = (lane & 4 * count) != 0;
#pragma unroll
        for (int i = 0; i < count; ++i) {
          const float other = upper ? sum[i] : sum[i + count];
          const float mine = upper ? sum[i + count] : sum[i];
          sum[i] = mine + __shfl_xor_sync(~0u, other, 4 * count);
        }
      }
      sum[0] += __shfl_xor_sync(~0u, sum[0], 2);
      sum[0] += __shfl_xor_sync(~0u, sum[0], 1);
      if (lane % 4 != 0) continue;
      if (row == 0) {
        of_queries[lane / 4] = sum[0];
      } else {
        queries[lane / 4 * D + row - 1] = static_cast<T>(sum[0]);
      }
    }
  }

  // A thread has a channel, and of all queries a part of the sum over directions.
  __device__ void add_directions(const Directions& values) {
    const int channel = threadIdx.x % D, part = threadIdx.x / D;
    float sum[kQueries] = {};
#pragma unroll 8
    for (int c = part; c < values.channels; c += kParts) {
      const float x = __ldg(values.rows + c * D + channel);
      const auto* of = reinterpret_cast<const float4*>(sums + c * kQueries);
      const float4 low = of[0], high = of[1];
      sum[0] = fmaf(low.x, x, sum[0]);
      sum[1] = fmaf(low.y, x, sum[1]);
      sum[2] = fmaf(low.z, x, sum[2]);
      sum[3] = fmaf(low.w, x, sum[3]);
      sum[4] = fmaf(high.x, x, sum[4]);
      sum[5] = fmaf(high.y, x, sum[5]);
      sum[6] = fmaf(high.z, x, sum[6]);
      sum[7] = fmaf(high.w, x, sum[7]);
    }
#pragma unroll
    for (int q = 0; q < kQueries; ++q) parts[part][q * D + channel] = sum[q];
  }
};
