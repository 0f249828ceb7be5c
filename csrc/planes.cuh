// Where the codes of a page of planes lie, and how many bits a basis gives each channel:
// rust/core/src/ops/planes.rs says it, and this file mirrors that.
#pragma once

#include <cstdint>

#include "api.h"
#include "bases.cuh"

constexpr int kPlanes = 3;
constexpr int kTogether = 4;  // channels of a plane come in so many

// Bits of a channel's code, plane by plane.
__host__ __device__ constexpr int plane_bits(int plane) { return 8 >> plane; }

// Rows of a basis: mean [D], bits [D], steps [D, D], measures [D, D].
struct PlanesBasis {
  const float *mean, *bits, *steps, *measures;
};

__device__ __forceinline__ PlanesBasis planes_basis(const BasesParams& of, int number, int rank,
                                                    int side, int dim) {
  const float* mean = basis_at(of, number, rank, side, dim);
  return {mean, mean + dim, mean + 2 * dim, mean + (2 + dim) * dim};
}

// How many channels of a vector have 8, 4 and 2 bits.
struct PlaneWidths {
  int of[kPlanes];
  bool sound;  // these are fours, in this order, and no other bits follow

  __device__ __forceinline__ int channels() const { return of[0] + of[1] + of[2]; }
  // Of one vector in a plane, and in all of them.
  __device__ __forceinline__ int row(int plane) const { return of[plane] * plane_bits(plane) / 8; }
  __device__ __forceinline__ int bytes() const { return row(0) + row(1) + row(2); }
};

// By a warp, in all lanes.
__device__ __forceinline__ PlaneWidths widths_at(const float* bits, int dim) {
  constexpr int kRounds = 8;  // of 32 channels: D is 256 at most
  const int lane = threadIdx.x % 32;
  PlaneWidths widths = {{0, 0, 0}, true};
  bool odd = false;
  // All are on their way before one is waited for.
  float of_lane[kRounds], before[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int channel = 32 * i + lane;
    of_lane[i] = channel < dim ? bits[channel] : 0.0f;
    before[i] = channel > 0 && channel < dim ? bits[channel - 1] : of_lane[i];
  }
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    if (32 * i >= dim) break;
    const float own = of_lane[i];
    odd = odd || !(own <= before[i]);
    bool known = own == 0;
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const bool has = own == plane_bits(plane);
      widths.of[plane] += __popc(__ballot_sync(~0u, has));
      known = known || has;
    }
    odd = odd || !known;
  }
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane) odd = odd || widths.of[plane] % kTogether != 0;
  widths.sound = !__any_sync(~0u, odd);
  return widths;
}

// Whether a page has room for codes of such widths. The bases lie on the device, where no host has
// looked at them.
__device__ __forceinline__ bool have_room(const BasesParams& of, const PlaneWidths& keys,
                                          const PlaneWidths& values) {
  return keys.sound && values.sound &&
         keys.bytes() + values.bytes() <= static_cast<int>(of.token_bytes);
}

// Where the codes of four neighbouring channels of a vector lie, which have as many bits.
struct FourChannels {
  int bits;        // of each; 0: they have no codes
  int start, row;  // of token 0, and bytes from a token to the next

  // Of planes that begin there.
  __device__ __forceinline__ FourChannels(const PlaneWidths& of, const int (&starts)[kPlanes],
                                          int channel)
      : bits(0), start(0), row(0) {
    int first = 0;
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      if (channel >= first && channel < first + of.of[plane]) {
        bits = plane_bits(plane);
        start = starts[plane] + (channel - first) * bits / 8;
        row = of.row(plane);
      }
      first += of.of[plane];
    }
  }

  template <typename Byte>
  __device__ __forceinline__ Byte* at(Byte* page, int token) const {
    return page + start + token * row;
  }

  // These codes at their first byte.
  __device__ __forceinline__ uint32_t load(const unsigned char* from) const {
    if (bits == 8) return *reinterpret_cast<const uint32_t*>(from);
    if (bits == 4) return *reinterpret_cast<const uint16_t*>(from);
    return bits == 2 ? *from : 0;
  }
  __device__ __forceinline__ void store(unsigned char* to, uint32_t codes) const {
    if (bits == 8) *reinterpret_cast<uint32_t*>(to) = codes;
    if (bits == 4) *reinterpret_cast<uint16_t*>(to) = codes;
    if (bits == 2) *to = codes;
  }
};

// Where the codes of keys, or of values, begin in a page, plane by plane, and their first byte of
// flags.
struct PlanePlaces {
  int flags;
  int starts[kPlanes];
};

__device__ __forceinline__ int plane_flag_bytes(int tokens) { return (tokens / 4 + 15) / 16 * 16; }

__device__ __forceinline__ PlanePlaces plane_places(const PlaneWidths& keys,
                                                    const PlaneWidths& own, int side, int tokens) {
  const int start = plane_flag_bytes(tokens) + (side == kKeySide ? 0 : tokens * keys.bytes());
  const int four = start + tokens * own.row(0);
  return {side == kKeySide ? 0 : tokens / 8, {start, four, four + tokens * own.row(1)}};
}
