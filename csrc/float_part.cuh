// A warp's part of attention over vectors in a basis that are numbers of 16 bits: rotated queries,
// weights, and what they add up to.
#pragma once

#include <cmath>

#include "api.h"
#include "decode_units.cuh"
#include "packed_softmax.cuh"
#include "tensor_core.cuh"
#include "turned_bases.cuh"

// `Of` are what lies in a page: TopRVectors.
template <typename Of>
class FloatPart {
 public:
  using Vectors = Of;
  using T = typename Vectors::Element;
  using Element = T;
  static constexpr int D = Vectors::kDim;
  static constexpr int kDim = D;
  static constexpr int kMasks = 1;  // of 32 tokens, that it takes in at once

  Vectors vectors;

  __device__ explicit FloatPart(const AttendPackedParams& params)
      : vectors(params), p(params.attend), lane(threadIdx.x % 32) {}

  // Begins with queries in the basis of the next pages.
  __device__ void begin(const TurnedBases<T, D>& turned) {
    vectors.begin(turned);
#pragma unroll
    for (int k = 0; k < Vectors::kSteps; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[k][e] = 0;
    }
    state = {{-INFINITY, -INFINITY}, {0, 0}};
  }

  // Takes in 32 tokens, of which bit j of the mask says whether the row sees token + j.
  __device__ void attend(const unsigned char* page, int token, const uint32_t (&masks)[1]) {
    const uint32_t mask = masks[0];
    float s[2][4] = {}, shrink[2], base[2];
    vectors.score(s, page, token, mask);
    state.take_in(s, lane / 4, masks, p, shrink, base);
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

  // Leaves what has come together in rows of `pitch` floats, and its sums in `states`, by query
  // heads.
  __device__ void leave(const Heads& of, float* rows, int pitch, State* states, bool any) {
    state.leave(states);
    __syncwarp();
    if (!any || lane % 4 * 2 >= of.count) return;
    vectors.leave(out, rows + lane % 4 * 2 * pitch, pitch);
  }

 private:
  const AttendParams& p;
  const int lane;
  float out[Vectors::kSteps][4];  // of queries lane % 4 · 2 and + 1, in the basis
  Softmax<2> state;               // of the same
};
