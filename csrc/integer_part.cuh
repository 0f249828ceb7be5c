// A warp's part of attention over vectors in a basis that are codes of at most a byte: tensor cores
// multiply them as they are, by queries and weights that are integers of 16 bits.
//
// A number of 16 bits is two bytes, and a product has a column for either: so the eight columns are
// four query heads, of each of which a lane has one.
#pragma once

#include <cmath>

#include "api.h"
#include "codes.cuh"
#include "decode_units.cuh"
#include "packed_softmax.cuh"
#include "sixteen_bits.cuh"
#include "tensor_core.cuh"
#include "turned_bases.cuh"

// `Of` are what lies in a page: TopRCodes, PlaneCodes, for so many query heads.
template <typename Of>
class IntegerPart {
 public:
  using Vectors = Of;
  using T = typename Vectors::Element;
  using Element = T;
  static constexpr int D = Vectors::kDim;
  static constexpr int kDim = D;
  static constexpr int kTiles = Vectors::kTiles;
  static constexpr int kMasks = Vectors::kMasks;  // of 32 tokens, that it takes in at once

  Vectors vectors;

  __device__ explicit IntegerPart(const AttendPackedParams& params)
      : vectors(params), p(params.attend), lane(threadIdx.x % 32) {}

  // Begins with queries in the basis of the next pages.
  __device__ void begin(const TurnedBases<T, D>& turned) {
    vectors.begin(turned);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      states[tile] = {{-INFINITY}, {0}};
      odd[tile] = 0;
#pragma unroll
      for (int i = 0; i < 2 * Vectors::kRowTiles; ++i) out[tile][i / 2][i % 2] = 0;
    }
  }

  // Takes in 32 tokens a mask, of which bit j says whether the row sees token j of them.
  __device__ void attend(const unsigned char* page, int token, const uint32_t (&masks)[kMasks]) {
    float s[kTiles][kMasks][4], scales[kMasks][4];
    vectors.score(s, page, token);
    vectors.take_scales(scales, page, token);
    leave_out(scales, masks);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) weigh(tile, s[tile], scales, masks);
    vectors.values(page, token, *this);
  }

  // Adds products of sixteen channels of 32 tokens of a mask to sums of codes.
  __device__ __forceinline__ void multiply(int (&sums)[kTiles][4], const uint32_t (&a)[4],
                                           int mask) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint32_t(&columns)[2] = weights[tile][mask];
      multiply_bytes<true, true>(sums[tile], a, columns[0], columns[1]);
    }
  }

  // Adds such sums to those of all tokens.
  __device__ __forceinline__ void add(int m, const int (&sums)[kTiles][4]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& sum = out[tile][m][half];
        sum = fmaf(whole_of(sums[tile][2 * half], sums[tile][2 * half + 1]), units[tile], sum);
      }
    }
  }

  // As FloatPart.
  __device__ void leave(const Heads& of, float* rows, int pitch, State* to, bool any) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) states[tile].leave(to + kTileHeads * tile);
    __syncwarp();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int query = kTileHeads * tile + lane % 4;
      if (!any || query >= of.count) continue;
      vectors.leave(out[tile], states[tile].l[0], odd[tile], rows + query * pitch);
    }
  }

 private:
  const AttendParams& p;
  const int lane;
  // Of query heads lane % 4, and + 4: sums in the basis, of codes, what is NaN once a value was,
  // and softmaxes.
  float out[kTiles][Vectors::kRowTiles][2];
  float odd[kTiles];
  // Of the tokens that are taken in: columns of weights, and what they are multiples of.
  uint32_t weights[kTiles][kMasks][2];
  float units[kTiles];
  Softmax<1> states[kTiles];

  // Of what is not seen scales may be anything, and nothing times infinity is not nothing.
  __device__ void leave_out(float (&scales)[kMasks][4], const uint32_t (&masks)[kMasks]) const {
#pragma unroll
    for (int i = 0; i < kMasks; ++i) {
      if (masks[i] == ~0u) continue;
      const uint32_t seen = masks[i] >> key_of(lane, 0);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if ((seen >> (8 * j) & 1) == 0) scales[i][j] = 0;
      }
    }
  }

  // Over all keys the largest of numbers by their bits, or none where one is not finite.
  static __device__ __forceinline__ float finite_over_keys(uint32_t bits, float& odd) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, step));
    const float largest = __uint_as_float(bits);
    if (largest < INFINITY) return largest;
    odd = NAN;
    return 0;
  }

  // Makes weights of scores, as columns of products with values, and their unit.
  __device__ void weigh(int tile, float (&s)[kMasks][4], const float (&scales)[kMasks][4],
                        const uint32_t (&masks)[kMasks]) {
    float shrink[1], base[1];
    uint32_t bits = 0;  // of the largest weight, or of one that is none
    states[tile].take_in(s, key_of(lane, 0), masks, p, shrink, base);
    if (__any_sync(~0u, shrink[0] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < 2 * Vectors::kRowTiles; ++i) out[tile][i / 2][i % 2] *= shrink[0];
    }
#pragma unroll
    for (int i = 0; i < 4 * kMasks; ++i) {
      float& weight = s[i / 4][i % 4];
      weight = exp2_fast(weight - base[0]);
      states[tile].l[0] += weight;
      weight *= scales[i / 4][i % 4];
      bits = max(bits, __float_as_uint(fabsf(weight)));
    }
    const float largest = finite_over_keys(bits, odd[tile]);
    const float inverse = inverse_unit(largest);
    units[tile] = unit_of(largest);
#pragma unroll
    for (int i = 0; i < 2 * kMasks; ++i) {
      const uint32_t low = sixteen_bits(s[i / 2][i % 2 * 2], inverse);
      const uint32_t high = sixteen_bits(s[i / 2][i % 2 * 2 + 1], inverse);
      // The upper bytes of both, then the lower.
      weights[tile][i / 2][i % 2] =
          transpose_matrix(signed_bytes(permuted(low, high, 0x4051)));
    }
  }
};
