// Vectors of planes as a warp takes them: scores of keys and sums of values in their basis.
//
// A plane's codes of 4 · n channels lie dense, so a lane takes four channels at a time, whatever
// the plane's bits: of keys those of a product of 16 channels, of values a lane's of 32. Where a
// plane ends within them lanes read what follows, which no query and no result has.
#pragma once

#include <cmath>
#include <cstdint>

#include "api.h"
#include "bases.cuh"
#include "codes.cuh"
#include "decode_units.cuh"
#include "planes.cuh"
#include "tensor_core.cuh"
#include "turned_bases.cuh"

// Codes of four channels of a token.
template <typename T, int kBits>
struct FourCodes {
  using Code = Codes<T, kBits>;
  static constexpr int kBytes = kBits / 2;

  // In the lowest bits.
  static __device__ __forceinline__ uint32_t load(const unsigned char* from) {
    if constexpr (kBits == 8) return *reinterpret_cast<const uint32_t*>(from);
    else if constexpr (kBits == 4) return *reinterpret_cast<const uint16_t*>(from);
    else return *from;
  }

  // Of a token channels 0 and 1, and 2 and 3.
  static __device__ __forceinline__ uint2 pairs(uint32_t codes) {
    if constexpr (kBits == 8) {
      return {Code::two_bytes(codes, 0), Code::two_bytes(codes, 1)};
    } else {
      const uint32_t apart = codes | codes << (16 - kBits);
      return {Code::two(apart), Code::two(apart >> (2 * kBits))};
    }
  }

  // Of each channel two tokens.
  static __device__ __forceinline__ uint4 tokens(uint32_t one, uint32_t other) {
    if constexpr (kBits == 8) {
      const uint32_t low = by_channels(one, other, 0), high = by_channels(one, other, 1);
      return {Code::two_bytes(low, 0), Code::two_bytes(low, 1), Code::two_bytes(high, 0),
              Code::two_bytes(high, 1)};
    } else {
      const uint32_t both = one | other << 16;
      return {Code::two(both), Code::two(both >> kBits), Code::two(both >> (2 * kBits)),
              Code::two(both >> (3 * kBits))};
    }
  }
};

// Of T. Codes count from half of their number of values on, which is half a step more than what
// they stand for: so all sums have half a step beside.
template <typename T, int D>
class PlaneVectors {
 public:
  using Element = T;
  static constexpr int kDim = D;
  // Channels of a product with keys, and of a lane's part of values; a plane begins with a whole
  // one, so there may be two more than channels need.
  static constexpr int kOfKey = 16, kOfValue = 32;
  static constexpr int kKeySteps = D / kOfKey + 2, kValueParts = D / kOfValue + 2;
  static constexpr int kSteps = 2 * kValueParts;
  static constexpr float kBeside = 0.5f;

  struct Shared {
    PlaneWidths widths[2];  // of a basis, whatever they are
    PlaneWidths keys, values;
    PlanePlaces of_keys, of_values;
    bool has_basis;
    uint2 queries[kKeySteps][32];  // B fragments of products: of lanes
  };

  __device__ explicit PlaneVectors(const AttendPackedParams& params)
      : bases(params.bases),
        page_tokens(static_cast<int>(params.attend.kv.page_tokens)),
        lane(threadIdx.x % 32) {}

  // As those of TopRVectors.
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
    for (int i = threadIdx.x; i < kKeySteps * 32; i += blockDim.x) {
      const int group = i % 4;  // of the four of a product; query head i % 32 / 4
      int step = i / 32, first = 0;
      uint2 own = {0, 0};
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
        const int channel = kOfKey * step + kTogether * group;
        if (step >= 0 && channel < sh.keys.of[plane]) {
          own = *reinterpret_cast<const uint2*>(turned.queries + i % 32 / 4 * D + first + channel);
        }
        // Below 0 once it was one of this plane's.
        step -= parts_of(sh.keys.of[plane], kOfKey);
        first += sh.keys.of[plane];
      }
      sh.queries[i / 32][i % 32] = own;
    }
    __syncthreads();
  }

  __device__ void begin(const TurnedBases<T, D>& turned) {
    float halves[4] = {0, 0, 0, 0}, added[4] = {0, 0, 0, 0};
    const uint2* of = held->queries[0] + lane;
    beside_products<0>(halves, added, of);
    beside_products<1>(halves, added, of);
    beside_products<2>(halves, added, of);
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      offsets[q] = turned.of_queries[lane % 4 * 2 + q] + halves[q] + added[q];
    }
    odd = 0;
  }

  __device__ void score(float (&s)[2][4], const unsigned char* page, int token,
                        uint32_t mask) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i / 4][i % 4] = offsets[i % 2];
    const uint2* of = held->queries[0] + lane;
    score_plane<0>(s, page, token, of);
    score_plane<1>(s, page, token, of);
    score_plane<2>(s, page, token, of);
    const unsigned char* flags = page + held->of_keys.flags + token / 8;
    const uint32_t nan = mask & *reinterpret_cast<const uint32_t*>(flags);
    if (nan == 0) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (nan >> (lane / 4 + i / 2 * 8) & 1) s[i / 4][i % 4] = NAN;
    }
  }

  __device__ float value_scale(const unsigned char*, int) const { return 1; }

  // Values of 16 tokens by their weights.
  __device__ void add_values(float (&out)[kSteps][4], const unsigned char* page, int slot,
                             uint32_t seen, const uint32_t (&weights)[2]) {
    const uint32_t flags =
        *reinterpret_cast<const uint16_t*>(page + held->of_values.flags + slot / 8);
    if ((flags & seen) != 0) odd = NAN;
    const int token = slot + lane % 4 * 2;
    const PlaneWidths& values = held->values;
#pragma unroll
    for (int part = 0; part < kValueParts; ++part) {
      float(&low)[4] = out[2 * part], (&high)[4] = out[2 * part + 1];
      int nth = part;
      const int eight = parts_of(values.of[0], kOfValue);
      if (nth < eight) {
        add_part<0>(low, high, page, token, nth, weights);
        continue;
      }
      nth -= eight;
      const int four = parts_of(values.of[1], kOfValue);
      if (nth < four) {
        add_part<1>(low, high, page, token, nth, weights);
        continue;
      }
      nth -= four;
      if (nth >= parts_of(values.of[2], kOfValue)) break;
      add_part<2>(low, high, page, token, nth, weights);
    }
  }

  __device__ void leave(const float (&out)[kSteps][4], float* rows, int pitch) const {
    const PlaneWidths& values = held->values;
    if (values.channels() == 0 && lane < 4) rows[0] = rows[pitch] = odd;
#pragma unroll
    for (int part = 0; part < kValueParts; ++part) {
      int nth = part, first = 0;
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
        const int channel = kOfValue * nth + kTogether * (lane / 4);
        if (nth >= 0 && channel < values.of[plane]) {
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            rows[e % 2 * pitch + first + channel + e / 2] =
                out[2 * part + e / 4][e % 4] + odd;
          }
        }
        nth -= parts_of(values.of[plane], kOfValue);
        first += values.of[plane];
      }
    }
  }

 private:
  const BasesParams& bases;
  const int page_tokens;
  const int lane;
  const Shared* held;
  float offsets[2];  // of queries lane % 4 · 2 and + 1: what all keys score beside
  float odd;         // 0, or NaN once a value was

  static __device__ __forceinline__ int parts_of(int channels, int of_part) {
    return (channels + of_part - 1) / of_part;
  }

  // What half a step makes with the queries, and what codes hold beside their numbers.
  template <int kPlane>
  __device__ void beside_products(float (&halves)[4], float (&added)[4], const uint2*& of) const {
    using Code = Codes<T, plane_bits(kPlane)>;
    const uint32_t half = pack<T>(0.5f, 0.5f), less = pack<T>(-Code::kAdded, -Code::kAdded);
    const uint32_t of_halves[4] = {half, half, half, half};
    const uint32_t of_added[4] = {less, less, less, less};
#pragma unroll 1
    for (int left = held->keys.of[kPlane]; left > 0; left -= kOfKey) {
      const uint2 q = *of;
      of += 32;
      multiply_add<T>(halves, of_halves, q.x, q.y);
      if (Code::kAdds) multiply_add<T>(added, of_added, q.x, q.y);
    }
  }

  // Adds what a plane of 32 keys makes with the queries.
  template <int kPlane>
  __device__ __forceinline__ void score_plane(float (&s)[2][4], const unsigned char* page,
                                              int token, const uint2*& of) const {
    using Four = FourCodes<T, plane_bits(kPlane)>;
    const int row = held->keys.row(kPlane);
    const unsigned char* from =
        page + held->of_keys.starts[kPlane] + (token + lane / 4) * row + lane % 4 * Four::kBytes;
#pragma unroll 2
    for (int left = held->keys.of[kPlane]; left > 0; left -= kOfKey) {
      const uint2 q = *of;
      of += 32;
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const uint2 low = Four::pairs(Four::load(from + 16 * u * row));
        const uint2 high = Four::pairs(Four::load(from + (16 * u + 8) * row));
        const uint32_t a[4] = {low.x, high.x, low.y, high.y};
        multiply_add<T>(s[u], a, q.x, q.y);
      }
      from += 4 * Four::kBytes;
    }
  }

  // Adds the nth 32 channels of a plane's values, of tokens + 0, 1, 8 and 9: of a lane's four the
  // first two are rows of `low`.
  template <int kPlane>
  __device__ __forceinline__ void add_part(float (&low)[4], float (&high)[4],
                                           const unsigned char* page, int token, int nth,
                                           const uint32_t (&weights)[2]) const {
    using Four = FourCodes<T, plane_bits(kPlane)>;
    using Code = typename Four::Code;
    const int row = held->values.row(kPlane);
    const unsigned char* from = page + held->of_values.starts[kPlane] + token * row +
                                (8 * nth + lane / 4) * Four::kBytes;
    const uint4 early = Four::tokens(Four::load(from), Four::load(from + row));
    const uint4 late = Four::tokens(Four::load(from + 8 * row), Four::load(from + 9 * row));
    if (Code::kAdds) {
      const uint32_t less = pack<T>(-Code::kAdded, -Code::kAdded);
      const uint32_t of_added[4] = {less, less, less, less};
      multiply_add<T>(low, of_added, weights[0], weights[1]);
      multiply_add<T>(high, of_added, weights[0], weights[1]);
    }
    const uint32_t first[4] = {early.x, early.y, late.x, late.y};
    const uint32_t second[4] = {early.z, early.w, late.z, late.w};
    multiply_add<T>(low, first, weights[0], weights[1]);
    multiply_add<T>(high, second, weights[0], weights[1]);
  }
};
