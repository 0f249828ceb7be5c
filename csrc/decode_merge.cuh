// A decode step's parts put together: several blocks may have keys of an item, and each leaves
// what it has in the workspace.
#pragma once

#include <cmath>

#include "decode_units.cuh"
#include "powers.cuh"
#include "tensor_core.cuh"

constexpr int kGroup = 8;  // blocks that first add up among themselves; attend_plan.rs has it too
constexpr int kMany = 20;   // parts of an item from which on they do
static_assert(kMany >= kGroup, "of two such items at most one begins in a group");

// Floats of a part: values [kQueries, D], states [kQueries].
template <int D>
__host__ __device__ constexpr int part_floats() {
  return kQueries * (D + 2);
}

// Items' units in equal shares, of a block or of a group of blocks. A share has two places for
// parts: for the item that begins before it or with it, and for the one that begins inside.
struct Shares {
  int units;   // of one
  int places;  // of parts that come before those of the first share

  // They are few enough for floats to be at most one wrong.
  __device__ __forceinline__ int of_unit(int unit) const {
    const int guess =
        static_cast<int>(__fdividef(static_cast<float>(unit), static_cast<float>(units)));
    return guess + (unit >= (guess + 1) * units ? 1 : 0) - (unit < guess * units ? 1 : 0);
  }
  __device__ __forceinline__ int begins_inside(int share, int begin) const {
    return begin > share * units ? 1 : 0;
  }
  // Of the part of an item that begins at a unit.
  __device__ __forceinline__ int place_of(int share, int begin) const {
    return places + 2 * share + begins_inside(share, begin);
  }
};

// Writes four elements of a result, from d on.
template <typename T, int D>
__device__ __forceinline__ void finish(const AttendParams& p, const Heads& of, int q, int d,
                                       const float4& value, const State& state) {
  const int64_t row = int64_t{of.request} * p.query_heads + of.first + q;
  const bool nothing = state.m == -INFINITY && state.l == 0;
  const float factor = __fdividef(p.value_scale, state.l);
  const auto packed = [&](float low, float high) {
    return nothing ? 0u : pack<T>(low * factor, high * factor);
  };
  *reinterpret_cast<uint2*>(static_cast<T*>(p.out) + row * D + d) = {packed(value.x, value.y),
                                                                    packed(value.z, value.w)};
  if (d == 0) p.lse[row] = nothing ? -INFINITY : (state.m + __log2f(state.l)) * kLn2;
}

// Adds up the parts of an item that begins at `begin`, those of shares [first, last], as a part
// or, when `to` is null, as the result. Teams of threads have parts next to each other, each
// thread four elements of a query; `values` and `sums` are memory for kHeld threads.
template <typename T, int D, int kThreads, int kHeld, int kBatch>
__device__ __forceinline__ void add_up(const AttendParams& p, const Heads& of,
                                       const Shares& shares, int begin, int first, int last,
                                       float* to, float4* values, State* sums) {
  constexpr int kWords = D / 4, kPart = part_floats<D>();
  constexpr int kRowBits = log2_of(kHeld / kWords), kRows = 1 << kRowBits;
  const int bits = 32 - __clz(of.count - 1), team_bits = max(kRowBits - bits, 0);
  const int teams = 1 << team_bits;
  const int row = threadIdx.x / kWords, word = threadIdx.x % kWords;
  const int team = row >> bits;
  const int parts = last - first + 1, each = (parts + teams - 1) >> team_bits;
  const int begins_inside = shares.begins_inside(first, begin) * kPart;
#pragma unroll 1
  for (int before = 0; before < of.count; before += kRows) {
    const int q = before + (row & ((1 << bits) - 1));
    const bool mine = row < kRows && team < teams && q < of.count;
    float4 value = {0, 0, 0, 0};
    State state = {-INFINITY, 0};
    if (mine) {
      const int end = min((team + 1) * each, parts);
#pragma unroll 1
      for (int i = team * each; i < end; i += kBatch) {
        const float* part = p.partial + (shares.places + 2 * (first + i)) * kPart;
        const int before_first = i == 0 ? begins_inside : 0;
        add_parts<kBatch>(value, state, end - i, [&](int j, bool there) {
          const float* from = part + (j == 0 ? before_first : 2 * j * kPart);
          const float4 x = read_if(there, reinterpret_cast<const float4*>(from + q * D) + word);
          const float2 of_q =
              read_if(there, reinterpret_cast<const float2*>(from + kQueries * D) + q);
          return Part{x, {there ? of_q.x : -INFINITY, of_q.y}};
        });
      }
    }
    if (teams > 1) {
      if (mine) {
        values[threadIdx.x] = value;
        sums[threadIdx.x] = state;
      }
      __syncthreads();
      if (team > 0 || !mine) break;
#pragma unroll 1
      for (int other = 1; other < teams; ++other) {
        const int at = threadIdx.x + (other << bits) * kWords;
        add(value, state, values[at], sums[at]);
      }
    }
    if (!mine) continue;
    if (to == nullptr) {
      finish<T, D>(p, of, q, 4 * word, value, state);
    } else {
      reinterpret_cast<float4*>(to + q * D)[word] = value;
      if (word == 0) reinterpret_cast<State*>(to + kQueries * D)[q] = state;
    }
  }
}

// A block's share of an item.
struct Piece {
  int item;
  int begin, units;  // of the item
  int done;          // units that are in the part
};

template <int D>
__device__ __forceinline__ float* part_at(const AttendParams& p, int place) {
  return p.partial + place * part_floats<D>();
}

// After this block left its part of an item: adds up the parts if it is the last one to do so.
// Parts of many blocks are added up by groups first, so that no block reads all of them. `share`
// are the units of a block; `values`, `sums` as for add_up, `is_last` of the whole block.
template <typename T, int D, int kThreads, int kHeld, int kBatch>
__device__ __forceinline__ void pass_on(const AttendParams& p, const Heads& of, Piece piece,
                                        int share, float4* values, State* sums, bool& is_last) {
  const Shares groups = {kGroup * share, static_cast<int>(2 * gridDim.x)};
  const int group = blockIdx.x / kGroup;
  Shares shares = {share, 0};
  bool grouped = piece.units > kMany * share;
#pragma unroll 1
  while (true) {
    int from = piece.begin, to = piece.begin + piece.units;  // what is added up now
    int counter = piece.item;
    float* sum = nullptr;
    if (grouped) {
      from = max(from, group * groups.units);
      to = min(to, (group + 1) * groups.units);
      counter = kMaxItems + 2 * group + groups.begins_inside(group, piece.begin);
      sum = part_at<D>(p, groups.place_of(group, piece.begin));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      // The parts are counted by their units.
      const int before = add_in_order(p.counters + counter, piece.done);
      is_last = before + piece.done == to - from;
      if (is_last) p.counters[counter] = 0;
    }
    __syncthreads();
    if (!is_last) return;
    add_up<T, D, kThreads, kHeld, kBatch>(p, of, shares, piece.begin, shares.of_unit(from),
                                          shares.of_unit(to - 1), sum, values, sums);
    if (!grouped) return;
    piece.done = to - from;
    shares = groups;
    grouped = false;
  }
}
