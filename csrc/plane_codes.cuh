// Vectors of planes as a warp takes them: scores of keys and sums of values in their basis, by
// products of bytes.
//
// Of eight bits a code is the byte, of four the upper half of one, of two its uppermost bits, with
// a one behind: so a byte counts from the middle of what codes stand for, 16 or 64 to a step, and
// of eight bits half a step less than it, which is added elsewhere.
#pragma once

#include <cmath>
#include <cstdint>

#include "api.h"
#include "bases.cuh"
#include "codes.cuh"
#include "decode_units.cuh"
#include "planes.cuh"
#include "sixteen_bits.cuh"
#include "tensor_core.cuh"
#include "turned_bases.cuh"

// What a byte counts for a step of a plane.
__host__ __device__ constexpr float bytes_of_step(int plane) {
  return plane == 0 ? 1 : plane == 1 ? 16 : 64;
}

// Four codes of so many bits, each the `nth` of a byte, as signed bytes.
template <int kPlane>
__device__ __forceinline__ uint32_t code_bytes(uint32_t word, int nth) {
  if constexpr (kPlane == 0) {
    return signed_bytes(word);
  } else if constexpr (kPlane == 1) {
    return masked_xor(word << (4 - 4 * nth), 0xF0F0F0F0u, 0x88888888u);
  } else {
    return masked_xor(word << (6 - 2 * nth), 0xC0C0C0C0u, 0xA0A0A0A0u);
  }
}

// For so many tiles of query heads.
template <typename T, int D, int kHeadTiles>
class PlaneCodes {
 public:
  using Element = T;
  static constexpr int kDim = D;
  static constexpr int kTiles = kHeadTiles;
  static constexpr int kMasks = 2;
  // A plane begins with a whole product with keys, and with a whole part of values, so there may be
  // more than channels need.
  static constexpr int kOfKey = 32, kOfValue = 32;
  static constexpr int kSteps = D / kOfKey + 3, kParts = D / kOfValue + 2;
  static constexpr int kRowTiles = 2 * kParts;
  static constexpr int kKeys = 4 * kMasks;  // that a lane has scores of

  struct Shared {
    PlaneWidths widths[2];  // of a basis, whatever they are
    PlaneWidths keys, values;
    PlanePlaces of_keys, of_values;
    bool has_basis;
    float units[kPlanes][kQueries], inverses[kPlanes][kQueries];
    float beside[kQueries];                 // what all keys score
    uint2 queries[kSteps][kMostTiles][32];  // B fragments of products: of lanes
  };

  __device__ explicit PlaneCodes(const AttendPackedParams& params)
      : bases(params.bases),
        page_tokens(static_cast<int>(params.attend.kv.page_tokens)),
        lane(threadIdx.x % 32) {}

  // As those of TopRPages.
  __device__ void prepare(Shared& sh) { held = &sh; }
  __device__ bool has_basis() const { return held->has_basis; }

  __device__ void enter(Shared& sh, BasisKey& key, int rank) {
    const BasisKey at = key;
    const int side = threadIdx.x / 32;
    if (side <= kValueSide && at.known()) {
      const PlaneWidths own = widths_at(planes_basis(bases, at.number, rank, side, D).bits, D);
      if (lane == 0) sh.widths[side] = own;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const PlaneWidths none = {{0, 0, 0}, true};
      sh.has_basis = at.known() && have_room(bases, sh.widths[kKeySide], sh.widths[kValueSide]);
      sh.keys = sh.has_basis ? sh.widths[kKeySide] : none;
      sh.values = sh.has_basis ? sh.widths[kValueSide] : none;
      sh.of_keys = plane_places(sh.keys, sh.keys, kKeySide, page_tokens);
      sh.of_values = plane_places(sh.keys, sh.values, kValueSide, page_tokens);
      if (!sh.has_basis) key.number = -1;
    }
    __syncthreads();
  }

  __device__ Directions directions(const BasisKey& key, int rank, int side) const {
    if (!key.known()) return {nullptr, nullptr, 0};
    const PlanesBasis basis = planes_basis(bases, key.number, rank, side, D);
    return {basis.mean, basis.steps, (side == kKeySide ? held->keys : held->values).channels()};
  }

  __device__ void take_queries(Shared& sh, const TurnedBases<T, D>& turned) const {
    const int head = threadIdx.x / 32;
    if (head < kQueries) find_units(sh, turned, head);
    __syncthreads();
    for (int i = threadIdx.x; i < kSteps * kTiles * 32; i += blockDim.x) {
      const int step = i / (32 * kTiles), tile = i / 32 % kTiles, of_lane = i % 32;
      sh.queries[step][tile][of_lane] =
          fragment(sh, turned, step, kTileHeads * tile + of_lane / 8, of_lane);
    }
    __syncthreads();
  }

  __device__ void begin(const TurnedBases<T, D>&) {}
  __device__ void open(unsigned char*) const {}

  // As TopRCodes, with flags of what is none.
  __device__ void score(float (&s)[kTiles][kMasks][4], const unsigned char* page, int token) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float beside = held->beside[kTileHeads * tile + lane % 4];
#pragma unroll
      for (int j = 0; j < kKeys; ++j) s[tile][j / 4][j % 4] = beside;
    }
    const uint2* of = held->queries[0][0] + lane;
    score_plane<0>(s, page, token, of);
    score_plane<1>(s, page, token, of);
    score_plane<2>(s, page, token, of);
    const uint64_t nan = flags_at(page + held->of_keys.flags + token / 8);
    if (nan == 0) return;
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      if ((nan >> (key_of(lane, 0) + 8 * j) & 1) == 0) continue;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) s[tile][j / 4][j % 4] = NAN;
    }
  }

  // NaN of values that are none.
  __device__ void take_scales(float (&scales)[kMasks][4], const unsigned char* page,
                              int token) const {
#pragma unroll
    for (int j = 0; j < kKeys; ++j) scales[j / 4][j % 4] = 1;
    const uint64_t nan = flags_at(page + held->of_values.flags + token / 8);
    if (nan == 0) return;
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      if ((nan >> (key_of(lane, 0) + 8 * j) & 1) != 0) scales[j / 4][j % 4] = NAN;
    }
  }

  // As TopRCodes; rows of operands are those that `leave` says.
  template <typename Part>
  __device__ void values(const unsigned char* page, int token, Part& to) const {
    const PlaneWidths& values = held->values;
    const int eight = parts_of(values.of[0]), four = eight + parts_of(values.of[1]);
    const int all = four + parts_of(values.of[2]);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part >= all) break;
      if (part < eight) add_part<0>(to, part, page, token, part);
      else if (part < four) add_part<1>(to, part, page, token, part - eight);
      else add_part<2>(to, part, page, token, part - four);
    }
  }

  // Leaves a query's sums of `values`, which are NaN where `odd` is, by channels; `weights`: the
  // sum of all weights.
  __device__ void leave(const float (&out)[kRowTiles][2], float weights, float odd,
                        float* to) const {
    const PlaneWidths& values = held->values;
    if (values.channels() == 0 && lane < 4) to[0] = odd;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      int nth = part, first = 0;
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
        const int channel = kOfValue * nth + kTogether * (lane / 4);
        if (nth >= 0 && channel < values.of[plane]) {
          const float beside = plane == 0 ? fmaf(0.5f, weights, odd) : odd;
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            to[first + channel + e] =
                fmaf(1 / bytes_of_step(plane), out[2 * part + e / 2][e % 2], beside);
          }
        }
        nth -= parts_of(values.of[plane]);
        first += values.of[plane];
      }
    }
  }

 private:
  const BasesParams& bases;
  const int page_tokens;
  const int lane;
  const Shared* held;

  static __device__ __forceinline__ int parts_of(int channels) {
    return (channels + kOfValue - 1) / kOfValue;
  }

  // Products with a plane's keys: of codes of two bits a lane has a word for two of them.
  template <int kPlane>
  static __device__ __forceinline__ int steps_of(int channels) {
    return kPlane == 2 ? (channels + 63) / 64 * 2 : (channels + 31) / 32;
  }

  // By a warp: how large a head's query is along each plane, and what its keys of eight bits score
  // beside.
  __device__ void find_units(Shared& sh, const TurnedBases<T, D>& turned, int head) const {
    const int ends[2] = {sh.keys.of[0], sh.keys.of[0] + sh.keys.of[1]};
    uint32_t largest[kPlanes] = {0, 0, 0};
    float halves = 0;
    for (int channel = lane; channel < sh.keys.channels(); channel += 32) {
      const float x = turned.queries[turned.place_of(head, channel)];
      const int plane = (channel >= ends[0]) + (channel >= ends[1]);
      if (plane == 0) halves += 0.5f * x;
#pragma unroll
      for (int p = 0; p < kPlanes; ++p) {
        if (plane == p) largest[p] = max(largest[p], __float_as_uint(fabsf(x)));
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) halves += __shfl_xor_sync(~0u, halves, step);
#pragma unroll
    for (int p = 0; p < kPlanes; ++p) {
      const QueryUnit unit(__reduce_max_sync(~0u, largest[p]));
      if (lane != 0) continue;
      sh.inverses[p][head] = unit.inverse;
      sh.units[p][head] = unit.size / bytes_of_step(p);
    }
    if (lane == 0) sh.beside[head] = turned.of_queries[head] + halves;
  }

  // What a lane has of a head's query for a product with keys.
  __device__ uint2 fragment(const Shared& sh, const TurnedBases<T, D>& turned, int step, int head,
                            int of_lane) const {
    uint2 own = {0, 0};
    int nth = step, first = 0;
    const auto take = [&](auto plane) {
      constexpr int kPlane = decltype(plane)::value;
      const int width = sh.keys.of[kPlane], steps = steps_of<kPlane>(width);
      if (nth >= 0 && nth < steps) {
        const int from = 8 * steps * (of_lane % 4);
        const auto number = [&](int i, int e) {
          int channel = from + 8 * nth + 4 * i + e;
          if (kPlane == 1) channel = from + 8 * nth + 2 * e + i;
          if (kPlane == 2) channel = from + 16 * (nth / 2) + 4 * e + nth % 2 * 2 + i;
          if (channel >= width) return sixteen_bits(0, 0);
          const float x = turned.queries[turned.place_of(head, first + channel)];
          return sixteen_bits(x, sh.inverses[kPlane][head]);
        };
        const bool upper = of_lane / 4 % 2 == 0;
        const uint32_t low[4] = {number(0, 0), number(0, 1), number(0, 2), number(0, 3)};
        const uint32_t high[4] = {number(1, 0), number(1, 1), number(1, 2), number(1, 3)};
        own = {bytes_of_four(low, upper), bytes_of_four(high, upper)};
      }
      // Below 0 once it was one of this plane's.
      nth -= steps;
      first += width;
    };
    take(Plane<0>());
    take(Plane<1>());
    take(Plane<2>());
    return own;
  }

  template <int kPlane>
  struct Plane {
    static constexpr int value = kPlane;
  };

  // Adds what a plane of 64 keys makes with the queries.
  template <int kPlane>
  __device__ __forceinline__ void score_plane(float (&s)[kTiles][kMasks][4],
                                              const unsigned char* page, int token,
                                              const uint2*& of) const {
    const int width = held->keys.of[kPlane], row = held->keys.row(kPlane);
    const int steps = steps_of<kPlane>(width);
    if (steps == 0) return;
    // Bytes that a lane has of a key: whole words from the beginning of its row on.
    const int chunk = steps * plane_bits(kPlane);
    const unsigned char* from = page + held->of_keys.starts[kPlane] +
                                (token + key_of(lane, 0)) * row + lane % 4 * chunk;
    const int bits = 8 * (static_cast<int>(reinterpret_cast<uintptr_t>(from)) & 3);
    from -= bits / 8;
    uint32_t words[kKeys];
    if constexpr (kPlane > 0) {
#pragma unroll
      for (int j = 0; j < kKeys; ++j) words[j] = word_at(from + 8 * j * row, 0);
    }
    int sums[kTiles][kKeys / 2][4] = {};
#pragma unroll 1
    for (int step = 0; step < steps; step += kPlane == 2 ? 2 : 1) {
      uint32_t own[kKeys], behind[kKeys];
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        if constexpr (kPlane == 0) {
          own[j] = word_at(from + 8 * j * row, 0), behind[j] = word_at(from + 8 * j * row, 1);
        } else {
          const uint32_t next = word_at(from + 8 * j * row, 1);
          own[j] = behind[j] = __funnelshift_r(words[j], next, bits);
          words[j] = next;
        }
      }
      from += kPlane == 0 ? 8 : 4;
#pragma unroll
      for (int i = 0; i < (kPlane == 2 ? 2 : 1); ++i) {
        const auto low = [&](int j) { return code_bytes<kPlane>(own[j], 2 * i); };
        const auto high = [&](int j) { return code_bytes<kPlane>(behind[j], 2 * i + 1); };
#pragma unroll
        for (int u = 0; u < kKeys / 2; ++u) {
          const uint32_t a[4] = {low(2 * u), low(2 * u + 1), high(2 * u), high(2 * u + 1)};
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            const uint2 q = of[32 * tile];
            multiply_bytes<true, true>(sums[tile][u], a, q.x, q.y);
          }
        }
        of += 32 * kMostTiles;
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float unit = held->units[kPlane][kTileHeads * tile + lane % 4];
#pragma unroll
      for (int j = 0; j < kKeys; ++j) {
        const int(&of_key)[4] = sums[tile][j / 2];
        float& score = s[tile][j / 4][j % 4];
        score = fmaf(whole_of(of_key[j % 2 * 2], of_key[j % 2 * 2 + 1]), unit, score);
      }
    }
  }

  static __device__ __forceinline__ uint32_t word_at(const unsigned char* from, int i) {
    return reinterpret_cast<const uint32_t*>(from)[i];
  }

  // Of 64 tokens, of whom a page may have fewer: flags come in whole words.
  static __device__ __forceinline__ uint64_t flags_at(const unsigned char* from) {
    const auto* halves = reinterpret_cast<const uint16_t*>(from);
    const uint32_t low = halves[0] | uint32_t{halves[1]} << 16;
    const uint32_t high = halves[2] | uint32_t{halves[3]} << 16;
    return low | uint64_t{high} << 32;
  }

  // Adds the nth 32 channels of a plane's values, which are part `part` of all: of a lane's four
  // the first two are rows of its first operand.
  template <int kPlane, typename Part>
  __device__ __forceinline__ void add_part(Part& to, int part, const unsigned char* page, int token,
                                           int nth) const {
    constexpr int kBytes = kTogether * plane_bits(kPlane) / 8;
    const int row = held->values.row(kPlane);
    const unsigned char* from = page + held->of_values.starts[kPlane] +
                                (token + value_of(lane, 0)) * row + (8 * nth + lane / 4) * kBytes;
    int sums[2][kTiles][4] = {};
#pragma unroll
    for (int mask = 0; mask < kMasks; ++mask) {
      uint32_t a[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t x[4], channels[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const unsigned char* at = from + (32 * mask + value_of(0, 4 * half + i)) * row;
          if constexpr (kPlane == 0) x[i] = *reinterpret_cast<const uint32_t*>(at);
          else if constexpr (kPlane == 1) x[i] = *reinterpret_cast<const uint16_t*>(at);
          else x[i] = *at;
        }
        channels_of<kPlane>(channels, x);
        a[0][2 * half] = channels[0], a[0][2 * half + 1] = channels[1];
        a[1][2 * half] = channels[2], a[1][2 * half + 1] = channels[3];
      }
      to.multiply(sums[0], a[0], mask);
      to.multiply(sums[1], a[1], mask);
    }
    to.add(2 * part, sums[0]);
    to.add(2 * part + 1, sums[1]);
  }

  // Of each of four channels the bytes of four tokens, by the codes of each.
  template <int kPlane>
  static __device__ __forceinline__ void channels_of(uint32_t (&channels)[4],
                                                     const uint32_t (&x)[4]) {
    uint32_t rows[4];
    transpose_bytes(rows, x);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (kPlane == 0) channels[e] = code_bytes<0>(rows[e], 0);
      else if constexpr (kPlane == 1) channels[e] = code_bytes<1>(rows[e / 2], e % 2);
      else channels[e] = code_bytes<2>(rows[0], e);
    }
  }
};
