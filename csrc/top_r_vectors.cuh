// Vectors of top-r pages whose numbers are bf16 or fp8, as a warp takes them: scores of keys and
// sums of values in their basis.
#pragma once

#include <cmath>

#include "api.h"
#include "decode_units.cuh"
#include "packed_rows.cuh"
#include "tensor_core.cuh"
#include "top_r_numbers.cuh"
#include "top_r_pages.cuh"

// Of T, with numbers of so many bits and scales of T.
template <typename T, int D, int kBits, bool kWhole>
class TopRVectors : public TopRPages<T, D, kWhole> {
  using Pages = TopRPages<T, D, kWhole>;
  using Pages::bits, Pages::lane, Pages::places;
  using Pages::kOfKey, Pages::kOfValue;

 public:
  static constexpr int kSteps = D / 16;
  struct Shared {};

  __device__ explicit TopRVectors(const AttendPackedParams& params) : Pages(params) {}

  // By all threads of a block.
  __device__ void prepare(Shared&) const {}

  __device__ void begin(const TurnedBases<T, D>& turned) {
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
      const int place = turned.place_of(lane / 4, channel_of<D>(lane, i));
      const float2 two = *reinterpret_cast<const float2*>(turned.queries + place);
      queries[i / 2][i % 2] = pack<T>(two.x, two.y);
    }
#pragma unroll
    for (int q = 0; q < 2; ++q) offsets[q] = turned.of_queries[lane % 4 * 2 + q];
  }

  // Scores of 32 keys: s[u] are those of 16 · u + lane / 4 and + 8 with queries lane % 4 · 2 and
  // + 1.
  __device__ void score(float (&s)[2][4], const unsigned char* page, int token,
                        uint32_t mask) const {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if ((mask >> (16 * u) & 0xFFFF) != 0) score_16(s[u], page, token + 16 * u);
    }
  }

  // What numbers of a token's value are multiplied by.
  __device__ float value_scale(const unsigned char* page, int token) const {
    return scale_of_vector(page + places.side, token);
  }

  // Values of 16 tokens by their weights. Of those that are not seen numbers count as zeros.
  __device__ void add_values(float (&out)[kSteps][4], const unsigned char* page, int slot,
                             uint32_t seen, const uint32_t (&weights)[2]) {
    const unsigned char* side = page + places.side;
    const int first = lane % 4 * 2;
    const auto token_of = [&](int i) { return first + i % 2 + 8 * (i / 2); };
    uint32_t of[4], own = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      of[i] = bits.template at<kOfValue>(side, slot + token_of(i), lane / 4);
      own |= __popc(of[i]) << (8 * i);
    }
    // Four counts in one register, added up over the lanes of a token: 128 at most.
    const uint32_t before = counts_before<4, 8>(own, lane / 4);
    const auto numbers = [&](int i) {
      const bool is_seen = (seen >> token_of(i) & 1) != 0;
      return numbers_of<ValueNumbers>(page, places.side, slot + token_of(i),
                                      is_seen ? of[i] : 0u, before >> (8 * i) & 0xFF);
    };
    ValueNumbers taken[4] = {numbers(0), numbers(1), numbers(2), numbers(3)};
    multiply_values<0>(out, taken, weights);
  }

  // Leaves sums of two queries, by channels.
  __device__ void leave(const float (&out)[kSteps][4], float* rows, int pitch) const {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int channel = D / 8 * (lane / 4) + 2 * k + e / 2;
        rows[e % 2 * pitch + channel] = out[k][e];
      }
    }
  }

 private:
  using KeyNumbers = Numbers<T, kBits, kOfKey / 8>;
  using ValueNumbers = Numbers<T, kBits, kOfValue / 8>;

  uint32_t queries[kSteps][2];  // B fragments: rows are channels, columns query heads
  float offsets[2];             // of queries lane % 4 · 2 and + 1: what all keys score beside

  // Of a token's channels those of these groups, behind so many that are kept.
  template <typename Of>
  __device__ Of numbers_of(const unsigned char* page, int side, int token, uint32_t groups,
                           uint32_t before) const {
    const int row = side + places.numbers + token * places.row;
    return Of(bits.channels_of(groups), page, row, static_cast<int>(before << bits.shift()));
  }

  __device__ float scale_of_vector(const unsigned char* side, int token) const {
    if (kBits == kBf16Numbers) return 1;
    const T scale = reinterpret_cast<const T*>(side + places.scales)[token];
    return Scales<T>::widen(scale);
  }

  // Products with 16 keys: lane has keys lane / 4 and + 8 of queries lane % 4 · 2 and + 1.
  __device__ void score_16(float (&s)[4], const unsigned char* page, int slot) const {
    const int first = slot + lane / 4;
    const uint32_t low = bits.template at<kOfKey>(page, first, lane % 4);
    const uint32_t high = bits.template at<kOfKey>(page, first + 8, lane % 4);
    // Both counts in one register, added up over the lanes of a key.
    const uint32_t own = __popc(low) | __popc(high) << 16;
    const uint32_t before = counts_before<1, 4>(own, lane % 4);
    auto of_low = numbers_of<KeyNumbers>(page, 0, first, low, before & 0xFFFF);
    auto of_high = numbers_of<KeyNumbers>(page, 0, first + 8, high, before >> 16);
    float dot[4] = {0, 0, 0, 0};
    multiply_keys<0>(dot, of_low, of_high);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = scale_of_vector(page, first + 8 * half);
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        s[2 * half + q] = fmaf(dot[2 * half + q], scale, offsets[q]);
      }
    }
  }

  // Adds what the keys' channels from the `kEight`-th eight of a lane on make with the queries.
  template <int kEight>
  __device__ __forceinline__ void multiply_keys(float (&dot)[4], KeyNumbers& low,
                                                KeyNumbers& high) const {
    if constexpr (kEight < kOfKey / 8) {
      const auto x = low.template take<kEight>();
      const auto y = high.template take<kEight>();
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t a[4] = {
            KeyNumbers::channels(x, 2 * j), KeyNumbers::channels(y, 2 * j),
            KeyNumbers::channels(x, 2 * j + 1), KeyNumbers::channels(y, 2 * j + 1)};
        const uint32_t(&q)[2] = queries[2 * kEight + j];
        multiply_add<T>(dot, a, q[0], q[1]);
      }
      multiply_keys<kEight + 1>(dot, low, high);
    }
  }

  // Adds the values' channels from the `kEight`-th eight of a lane on, times their weights.
  template <int kEight>
  __device__ __forceinline__ void multiply_values(float (&out)[kSteps][4], ValueNumbers (&of)[4],
                                                  const uint32_t (&weights)[2]) const {
    if constexpr (kEight < kOfValue / 8) {
      const typename ValueNumbers::Eight x[4] = {
          of[0].template take<kEight>(), of[1].template take<kEight>(),
          of[2].template take<kEight>(), of[3].template take<kEight>()};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint2 early = ValueNumbers::tokens(x[0], x[1], i);
        const uint2 late = ValueNumbers::tokens(x[2], x[3], i);
        const uint32_t a[4] = {early.x, early.y, late.x, late.y};
        multiply_add<T>(out[4 * kEight + i], a, weights[0], weights[1]);
      }
      multiply_values<kEight + 1>(out, of, weights);
    }
  }
};
