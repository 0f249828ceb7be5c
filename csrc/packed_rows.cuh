// A warp's part of attention over packed pages: queries, weights, and what they add up to.
#pragma once

#include <cmath>

#include "api.h"
#include "codes.cuh"
#include "decode_units.cuh"
#include "packed.cuh"
#include "packed_softmax.cuh"
#include "page_codes.cuh"
#include "paged.cuh"
#include "rotation.cuh"
#include "tensor_core.cuh"

// The two channels from which on a lane has pair i of a query or key: D / 4 of them lie together.
template <int D>
__device__ __forceinline__ int channel_of(int lane, int i) {
  return D / 4 * (lane % 4) + 2 * i;
}

// A query turned back to where a segment's keys were. Rare, and long: not inlined.
template <typename T, int D>
__device__ __noinline__ void turn_query(uint32_t* to, const T* query, int delta,
                                        const PagedKv& kv) {
  const auto turned = [&](int d) {
    return turned_element(query, d, static_cast<int>(kv.pairs), kv.interleaved != 0, [&](int pair) {
      float2 angle;
      cos_sin(half_turns(-delta, kv.inv_freq[pair]), angle.x, angle.y);
      return angle;
    });
  };
#pragma unroll 1
  for (int i = 0; i < D / 8; ++i) {
    const int d = channel_of<D>(threadIdx.x % 32, i);
    to[i] = query == nullptr ? 0u : pack<T>(turned(d), turned(d + 1));
  }
}

// Rows of T over pages of codes of so many bits with scales of T.
template <typename T, int D, int kBits>
class PackedRows {
  using Code = Codes<T, kBits>;
  using Page = PageCodes<T, D, kBits>;

 public:
  using Element = T;
  static constexpr int kDim = D;
  static constexpr bool kTurned = false;  // results are not in a basis of their own
  static constexpr int kItemCost = 16;    // pages that a part of an item takes as long as
  struct Shared {};
  static constexpr int kSteps = D / 16;

  __device__ explicit PackedRows(const AttendPackedParams& params)
      : p(params.attend),
        lane(threadIdx.x % 32),
        places(places_of<kBits>(static_cast<int>(params.attend.kv.page_tokens), D)) {}

  // By all threads of a block, before anything else.
  __device__ void prepare(Shared&) const {}

  __device__ Entry entry(int index, int rank) const { return read_entry(p.kv, index, rank); }

  // By all threads: the first of an item's pages [from, to) that has not as much in common with the
  // one at `from` as results need that are added up. Here all pages have.
  template <int kThreads>
  __device__ int alike(Shared&, const Heads&, const EntryRange&, int, int, int to) const {
    return to;
  }

  // Begins with the query heads of an item.
  __device__ void begin(const Heads& of, const Shared&) {
    load_queries(of);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[k][e] = 0;
    }
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      state.m[q] = -INFINITY;
      state.l[q] = same[q] = 0;
    }
  }

  // Takes in what the row sees of a page.
  __device__ void attend(const Heads& of, const PackedRun& run, const unsigned char* page) {
    if (run.entry.begin >= run.entry.end) return;
    if (run.entry.delta != turned_by) turn_queries(of, run.entry.delta);
    uint32_t scaled[kSteps][2];
    float start[4] = {0, 0, 0, 0};
    take_in_scales(page, scaled, start);
    const int tokens = static_cast<int>(p.kv.page_tokens);
    const bool whole = is_seen_whole(run, tokens);
#pragma unroll 1
    for (int token = run.entry.begin / 32 * 32; token < run.entry.end; token += 32) {
      const uint32_t mask = whole ? ~0u : mask_32(run, token, tokens);
      if (mask == 0) continue;
      attend_32(page, token, mask, scaled, start);
    }
  }

  // Leaves what has come together in rows of `pitch` floats, and its sums in `states`, by query
  // heads; other warps have none of it.
  __device__ void leave(const Heads& of, float* part, int pitch, State* states, bool any) {
#pragma unroll
    for (int q = 0; q < 2; ++q) same[q] = over_keys(same[q]);
    state.leave(states);
    __syncwarp();
    if (!any || lane % 4 * 2 >= of.count) return;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int channel = Page::channel(lane, k, e / 2);
        part[(lane % 4 * 2 + e % 2) * pitch + channel] = out[k][e] + same[e % 2];
      }
    }
  }

 private:
  const AttendParams& p;
  const int lane;
  const PackedPlaces places;
  uint32_t queries[kSteps][2];  // B fragments: rows are channels, columns query heads
  int turned_by;                // delta that `queries` are turned back by
  // Of queries lane % 4 · 2 and + 1: sums over codes, and of what all channels have in common.
  float out[kSteps][4], same[2];
  Softmax<2> state;

  // Element 0 of the query of this lane's column, or null.
  __device__ const T* query_of(const Heads& of) const {
    const int q = lane / 4;
    return q < of.count ? static_cast<const T*>(p.q) + of.request * p.q_row_stride +
                              (of.first + q) * p.q_head_stride
                        : nullptr;
  }

  __device__ void load_queries(const Heads& of) {
    turned_by = 0;
    const T* query = query_of(of);
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      const auto* two =
          reinterpret_cast<const uint32_t*>(query) + channel_of<D>(lane, i) / 2;
      queries[i / 2][i % 2] = query == nullptr ? 0u : *two;
    }
  }

  __device__ void turn_queries(const Heads& of, int delta) {
    turned_by = delta;
    uint32_t turned[2 * kSteps];
    turn_query<T, D>(turned, query_of(of), delta, p.kv);
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) queries[i / 2][i % 2] = turned[i];
  }

  // The query times the page's scales, and what keys of middle codes would score.
  __device__ void take_in_scales(const unsigned char* page, uint32_t (&scaled)[kSteps][2],
                                 float (&start)[4]) const {
    constexpr int kLoads = kSteps / 2;  // of 16 bytes: a lane's channels
    const auto* scales =
        reinterpret_cast<const uint4*>(page + places.key_scales) + lane % 4 * kLoads;
    const auto* zeros =
        reinterpret_cast<const uint4*>(page + places.key_zeros) + lane % 4 * kLoads;
    const uint32_t middle = pack<T>(Code::kMiddle, Code::kMiddle);
    const uint32_t less = pack<T>(-Code::kAdded, -Code::kAdded);
    float others[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint4 s4 = scales[i], z4 = zeros[i];
      const uint32_t s[4] = {s4.x, s4.y, s4.z, s4.w}, z[4] = {z4.x, z4.y, z4.z, z4.w};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t (&q)[2] = queries[2 * i + j];
        uint32_t (&to)[2] = scaled[2 * i + j];
        to[0] = times<T>(q[0], s[2 * j]);
        to[1] = times<T>(q[1], s[2 * j + 1]);
        const uint32_t low = times<T>(s[2 * j], middle), high = times<T>(s[2 * j + 1], middle);
        const uint32_t of_zeros[4] = {z[2 * j], z[2 * j], z[2 * j + 1], z[2 * j + 1]};
        const uint32_t of_middles[4] = {low, low, high, high};
        multiply_add<T>(start, of_zeros, q[0], q[1]);
        multiply_add<T>(others, of_middles, q[0], q[1]);
        if (Code::kAdds) {
          const uint32_t of_added[4] = {less, less, less, less};
          multiply_add<T>(start, of_added, to[0], to[1]);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) start[e] += others[e];
  }

  // A lane's codes of a key as they lie.
  __device__ void load_key(uint32_t (&to)[Page::kWords], const unsigned char* page,
                           int slot) const {
    load_words(to, page + slot * (D * kBits / 8) + lane % 4 * (4 * Page::kWords));
  }

  // Scores of 16 keys: lane has keys lane / 4 and + 8 of queries lane % 4 · 2 and + 1.
  __device__ void score(float (&s)[4], const unsigned char* page, int slot,
                        const uint32_t (&scaled)[kSteps][2], const float (&start)[4]) const {
    float even[4] = {start[0], start[1], start[2], start[3]}, odd[4] = {0, 0, 0, 0};
    uint32_t low[Page::kWords], high[Page::kWords];
    load_key(low, page, slot + lane / 4);
    load_key(high, page, slot + lane / 4 + 8);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint32_t a[4] = {Page::key_pair(low, 2 * k), Page::key_pair(high, 2 * k),
                             Page::key_pair(low, 2 * k + 1), Page::key_pair(high, 2 * k + 1)};
      multiply_add<T>(k % 2 ? odd : even, a, scaled[k][0], scaled[k][1]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] = even[e] + odd[e];
  }

  // Takes in 32 tokens, of which bit j of the mask says whether the row sees token + j.
  __device__ void attend_32(const unsigned char* page, int token, uint32_t mask,
                            const uint32_t (&scaled)[kSteps][2], const float (&start)[4]) {
    float s[2][4], shrink[2], base[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) score(s[u], page, token + 16 * u, scaled, start);
    state.take_in(s, lane / 4, {mask}, p, shrink, base);
    same[0] *= shrink[0];
    same[1] *= shrink[1];
    const uint32_t seen = mask >> (lane / 4);  // bits 0, 8, 16, 24: of this lane's keys
    if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[k][e] *= shrink[e % 2];
      }
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      uint32_t weights[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2 step = value_step(page, token + 16 * u + lane / 4 + 8 * half);
        // Of what is not seen the step may be anything, and nothing times infinity is not nothing.
        if (mask != ~0u && (seen >> (16 * u + 8 * half) & 1) == 0) step = {0, 0};
        const float middle = fmaf(static_cast<float>(Code::kMiddle), step.x, step.y);
        float of_value[2];
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          const float weight = exp2_fast(s[u][2 * half + q] - base[q]);
          state.l[q] += weight;
          same[q] = fmaf(weight, middle, same[q]);
          of_value[q] = weight * step.x;
        }
        weights[half] = transpose_matrix(pack<T>(of_value[0], of_value[1]));
      }
      add_values(page, token + 16 * u, weights);
    }
  }

  // Scale and zero of a token's values.
  __device__ float2 value_step(const unsigned char* page, int slot) const {
    const uint32_t both = reinterpret_cast<const uint32_t*>(page + places.value_steps)[slot];
    const auto& two = reinterpret_cast<const typename Halves<T>::Two&>(both);
    return {Scales<T>::widen(two.x), Scales<T>::widen(two.y)};
  }

  // Values of 16 tokens by their weights. What codes are more than they count for is subtracted
  // before each of them is added: in a sum over all tokens it would drown their differences.
  __device__ void add_values(const unsigned char* page, int slot, const uint32_t (&weights)[2]) {
    const uint32_t less = pack<T>(-Code::kAdded, -Code::kAdded);
    const uint32_t of_added[4] = {less, less, less, less};
    const unsigned char* codes = page + places.value_codes + slot * (D * kBits / 8);
    Page::values(codes, lane, [&](int k, const uint32_t(&a)[4]) {
      if (Code::kAdds) multiply_add<T>(out[k], of_added, weights[0], weights[1]);
      multiply_add<T>(out[k], a, weights[0], weights[1]);
    });
  }
};
