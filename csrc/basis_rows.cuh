// A warp's part of attention over pages in the basis of their text: rotated queries, weights, and
// what they add up to. The basis itself is turned_bases.cuh.
#pragma once

#include <cmath>

#include "api.h"
#include "bases.cuh"
#include "decode_units.cuh"
#include "packed_softmax.cuh"
#include "paged.cuh"
#include "tensor_core.cuh"
#include "turned_bases.cuh"

// `Vectors` are what lies in a page: TopRVectors, PlaneVectors.
template <typename Vectors>
class BasisRows {
 public:
  using T = typename Vectors::Element;
  using Element = T;
  static constexpr int D = Vectors::kDim;
  static constexpr int kDim = D;
  static constexpr bool kTurned = true;

  struct Shared {
    typename Vectors::Shared vectors;
    TurnedBases<T, D> turned;
    int rank;  // of the pages that are alike
  };

  __device__ explicit BasisRows(const AttendPackedParams& params)
      : p(params.attend), bases(params.bases), lane(threadIdx.x % 32), vectors(params) {}

  __device__ void prepare(Shared& sh) { vectors.prepare(sh.vectors); }

  // An entry whose block has no basis is one without tokens.
  __device__ Entry entry(int index, int rank) const {
    Entry found = read_entry(p.kv, index, rank);
    if (found.begin < found.end && basis_number(bases, found.block, rank) < 0) {
      found.end = found.begin;
    }
    return found;
  }

  // Pages are alike that have the same basis and delta; rotates the item's queries into it.
  template <int kThreads>
  __device__ int alike(Shared& sh, const Heads& of, const EntryRange& entries, int rank, int from,
                       int to) {
    const auto key_of = [&](int unit) {
      const Entry at = entry(entries[unit], rank);
      return at.begin < at.end ? BasisKey{basis_number(bases, at.block, rank), at.delta}
                               : BasisKey{-1, 0};
    };
    const int end = sh.turned.template alike<kThreads>(from, to, key_of);
    vectors.enter(sh.vectors, sh.turned.key, rank);
    sh.turned.template turn_in<kThreads>(p, of, vectors.directions(sh.turned.key, rank, kKeySide));
    vectors.take_queries(sh.vectors, sh.turned);
    if (threadIdx.x == 0) sh.rank = rank;
    return end;
  }

  // Begins with the query heads of an item in the basis of its next pages.
  __device__ void begin(const Heads&, const Shared& sh) {
    vectors.begin(sh.turned);
#pragma unroll
    for (int k = 0; k < Vectors::kSteps; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[k][e] = 0;
    }
    state = {{-INFINITY, -INFINITY}, {0, 0}};
  }

  // Takes in what the row sees of a page.
  __device__ void attend(const Heads&, const PackedRun& run, const unsigned char* page) {
    if (run.entry.begin >= run.entry.end || !vectors.has_basis()) return;
    const int tokens = static_cast<int>(p.kv.page_tokens);
    const bool whole = is_seen_whole(run, tokens);
#pragma unroll 1
    for (int token = run.entry.begin / 32 * 32; token < run.entry.end; token += 32) {
      const uint32_t mask = whole ? ~0u : mask_32(run, token, tokens);
      if (mask != 0) attend_32(page, token, mask);
    }
  }

  // As PackedRows; rows are in the basis.
  __device__ void leave(const Heads& of, float* part, int pitch, State* states, bool any) {
    state.leave(states);
    __syncwarp();
    if (!any || lane % 4 * 2 >= of.count) return;
    vectors.leave(out, part + lane % 4 * 2 * pitch, pitch);
  }

  // Takes what `sum` adds up of the warps' parts back into channels, and adds it to what pages of
  // other bases left there.
  template <int kThreads, typename Sum>
  __device__ void turn_back(Shared& sh, const Heads& of, const State* states, bool first,
                            Sum sum) {
    sum([&](int i, const float4& value) {
      sh.turned.put(i, value, Vectors::kBeside * states[i / (D / 4)].l);
    });
    const Directions values = vectors.directions(sh.turned.key, sh.rank, kValueSide);
    const float4 value = sh.turned.template turn_back<kThreads>(values, of, states);
    const int q = threadIdx.x / (D / 4);
    if (q >= of.count) return;
    if (first) {
      held = value;
      of_held = states[q];
    } else {
      add(held, of_held, value, states[q]);
    }
  }

  // Calls put(i, value, state) with this thread's word of the result.
  template <typename Put>
  __device__ void result(const Heads& of, Put put) {
    if (threadIdx.x < of.count * (D / 4)) put(threadIdx.x, held, of_held);
  }

 private:
  const AttendParams& p;
  const BasesParams& bases;
  const int lane;
  Vectors vectors;
  float out[Vectors::kSteps][4];  // of queries lane % 4 · 2 and + 1, in the basis
  Softmax state;                  // of the same
  // Of all threads of a block: a word of the result in channels, and its query's sums.
  float4 held;
  State of_held;

  // Takes in 32 tokens, of which bit j of the mask says whether the row sees token + j.
  __device__ void attend_32(const unsigned char* page, int token, uint32_t mask) {
    float s[2][4] = {}, shrink[2], base[2];
    vectors.score(s, page, token, mask);
    state.take_in(s, mask, p, shrink, base);
    if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int k = 0; k < Vectors::kSteps; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[k][e] *= shrink[e % 2];
      }
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const uint32_t of_unit = mask >> (16 * u) & 0xFFFF;
      if (of_unit == 0) continue;
      uint32_t weights[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = 8 * half + lane / 4;
        // Of what is not seen the scale may be anything, and nothing times infinity is not nothing.
        const bool seen = (of_unit >> key & 1) != 0;
        const float scale = seen ? vectors.value_scale(page, token + 16 * u + key) : 0.0f;
        float of_value[2];
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          const float weight = exp2_fast(s[u][2 * half + q] - base[q]);
          state.l[q] += weight;
          of_value[q] = weight * scale;
        }
        weights[half] = transpose_matrix(pack<T>(of_value[0], of_value[1]));
      }
      vectors.add_values(out, page, token + 16 * u, of_unit, weights);
    }
  }
};
