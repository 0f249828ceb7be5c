// What a decode step is cut into.
#pragma once

#include <cmath>

#include "paged.cuh"
#include "powers.cuh"
#include "tensor_core.cuh"

constexpr int kMaxItems = 1024;  // also in rust/cuda/src/attend_plan.rs
constexpr int kUnit = 16;        // keys of a unit
constexpr int kQueries = 8;      // query heads of an item
constexpr int kItemCost = 16;

// One KV head of one request, with up to 8 of its query heads.
struct Item {
  int end;  // where the next one begins: behind its units, and what an item costs beside them
  EntryRange entries;
};

// The query heads of an item.
struct Heads {
  int request, kv_head;
  int first, count;
};

// A unit, or half of one: keys that lie side by side in one page, and which of them the row sees.
template <typename Place>
struct Run {
  Place place;    // of its first key, as the stages take it
  uint32_t mask;  // bit j: key j is seen
  int delta;
};

// x / y by the factor that api.h says of y.
__device__ __forceinline__ int quotient(int x, uint32_t factor) {
  return factor == 0 ? x : static_cast<int>(__umulhi(static_cast<uint32_t>(x), factor));
}

// Bits 0 to n − 1, of kUnit bits at most.
__device__ __forceinline__ uint32_t bits_below(int n) {
  return (1u << min(max(n, 0), kUnit)) - 1;
}

// Bit j: the row at `position` sees the key in slot `slot` + j of an entry, of so many.
__device__ __forceinline__ uint32_t mask_of(const Entry& entry, const Reach& reach, int position,
                                            int slot, int count) {
  const int zero = entry.begin - entry.position - slot;  // where the key at position 0 would be
  uint32_t mask = bits_below(min(min(entry.end - slot, count), position + 1 + zero)) &
                  ~bits_below(entry.begin - slot);
  if (reach.window > 0) {
    mask &= ~bits_below(position - reach.window + 1 + zero) | bits_below(reach.sink + zero);
  }
  return mask;
}

struct State {
  float m, l;  // largest score, in powers of two; sum of 2^(score − m)
};

// The largest n with 2^n ≤ x.
__host__ __device__ constexpr int log2_of(int x) { return x < 2 ? 0 : 1 + log2_of(x / 2); }

// Adds to a number of the whole device, before which all that this thread wrote or saw written is
// seen by whoever adds after it.
__device__ __forceinline__ int add_in_order(uint32_t* to, int number) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(to), "r"(number)
               : "memory");
  return before;
}

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

// What another block has written, or zeros. In the order in which it stands, so that all that is
// read together is asked for before any of it is waited for.
__device__ __forceinline__ float4 read_if(bool there, const float4* from) {
  float4 x = {0, 0, 0, 0};
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
      "@p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n}\n"
      : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w)
      : "l"(from), "r"(static_cast<int>(there)));
  return x;
}
__device__ __forceinline__ float2 read_if(bool there, const float2* from) {
  float2 x = {0, 0};
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n"
      "@p ld.global.cg.v2.f32 {%0, %1}, [%2];\n}\n"
      : "+f"(x.x), "+f"(x.y)
      : "l"(from), "r"(static_cast<int>(there)));
  return x;
}

// Takes in partial sums read(0), read(1), … of which there are `count`, or the first N of them.
template <int N, typename Read>
__device__ __forceinline__ void add_parts(float4& value, State& state, int count, Read read) {
  Part parts[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    parts[j] = read(j, j < count);
  }
  float largest = state.m;
#pragma unroll
  for (int j = 0; j < N; ++j) largest = fmaxf(largest, parts[j].state.m);
  add(value, state, {0, 0, 0, 0}, {largest, 0});
#pragma unroll
  for (int j = 0; j < N; ++j) {
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
