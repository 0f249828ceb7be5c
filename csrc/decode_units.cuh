// What a decode step is cut into.
#pragma once

#include <cmath>

#include "paged.cuh"
#include "powers.cuh"
#include "tensor_core.cuh"

constexpr int kMaxItems = 1024;  // also in rust/cuda/src/attend_plan.rs
constexpr int kUnit = 16;        // keys of a unit
constexpr int kHalf = 8;         // keys that surely lie in one page, side by side
constexpr int kQueries = 8;      // query heads of an item
constexpr int kItemCost = 16;    // units that beginning and ending an item takes as long as

// One KV head of one request, with up to 8 of its query heads.
struct Item {
  int end;  // where the next one begins: units, and for each item kItemCost more
  EntryRange entries;
};

// Half a unit: where its keys are, and which of them the row sees.
struct Half {
  int64_t place;  // as the stages take it
  uint32_t mask;  // bit j: key j is seen
  int delta;
};

struct State {
  float m, l;  // largest score, in powers of two; sum of 2^(score − m)
};

// How much a partial sum counts beside one whose largest score is `largest`.
__device__ __forceinline__ float weight_of(const State& state, float largest) {
  if (state.m == -INFINITY) return state.l == 0 ? 0.0f : NAN;
  return exp2_fast(state.m - largest);
}

// Takes in another partial sum of four elements.
__device__ __forceinline__ void add(float4& value, State& state, const float4& x,
                                    const State& other) {
  const float largest = fmaxf(state.m, other.m);
  const float mine = weight_of(state, largest), its = weight_of(other, largest);
  value.x = mine * value.x + its * x.x;
  value.y = mine * value.y + its * x.y;
  value.z = mine * value.z + its * x.z;
  value.w = mine * value.w + its * x.w;
  state = {largest, mine * state.l + its * other.l};
}

// A partial sum of four elements.
struct Part {
  float4 value;
  State state;
};

constexpr int kBatch = 8;  // partial sums that are read together, not one after the other

// Takes in partial sums read(0), read(1), … of which there are up to kBatch.
template <typename Read>
__device__ __forceinline__ void add_parts(float4& value, State& state, int count, Read read) {
  Part parts[kBatch];
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    parts[j] = j < count ? read(j) : Part{{0, 0, 0, 0}, {-INFINITY, 0}};
  }
  float largest = state.m;
#pragma unroll
  for (int j = 0; j < kBatch; ++j) largest = fmaxf(largest, parts[j].state.m);
  add(value, state, {0, 0, 0, 0}, {largest, 0});
#pragma unroll
  for (int j = 0; j < kBatch; ++j) {
    const float weight = weight_of(parts[j].state, largest);
    value.x += weight * parts[j].value.x;
    value.y += weight * parts[j].value.y;
    value.z += weight * parts[j].value.z;
    value.w += weight * parts[j].value.w;
    state.l += weight * parts[j].state.l;
  }
}

// Rare, and long: not inlined.
__device__ __noinline__ float capped(float score, float cap) { return cap * tanhf(score / cap); }
