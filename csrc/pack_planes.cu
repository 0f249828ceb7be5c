// pack_pages and unpack_pages of planes: rust/reference/src/planes.rs, to the same bytes.
//
// The simple version:
//   for each vector: steps = measures · (x − mean), of channels that have bits; of each the nearest
//   code, the outermost one for what lies further out
//   back: x = mean + Σ (code − largest / 2) · step
//
// What makes it fast: as pack_top_r.cu, tiles of one side of a page, whose products are those of
// integers. A warp writes a token's rows of all planes, byte by byte.
//
// Launch: rows · pages · 2 · tiles blocks of 256 threads. A row that points outside either side,
// or whose packed block has no basis, is skipped, and so is a page whose basis has bits that are no
// planes or too many.

#include "api.h"
#include "basis_numbers.cuh"
#include "pack_tiles.cuh"
#include "packed.cuh"
#include "planes.cuh"

namespace {

// A tile's side of a page.
struct Side {
  PlanesBasis basis;
  PlaneWidths own;
  PlanePlaces places;
  unsigned char* page;
  int end;     // of all codes of the page
  int spare;   // bytes that codes leave of a token's
  bool sound;  // the basis has planes
};

// By all threads of a block.
__device__ Side side_of(const PackPagesParams& p, const Tile& tile) {
  const int dim = p.head_dim, tokens = p.page_tokens;
  const auto of_side = [&](int side) {
    return planes_basis(p.bases, tile.number, tile.job.page, side, dim);
  };
  const PlaneWidths keys = widths_at(of_side(kKeySide).bits, dim);
  const PlaneWidths values = widths_at(of_side(kValueSide).bits, dim);
  const PlaneWidths& own = tile.side == kKeySide ? keys : values;
  const int bytes = keys.bytes() + values.bytes();
  return {of_side(tile.side),
          own,
          plane_places(keys, own, tile.side, tokens),
          static_cast<unsigned char*>(p.packed) + tile.job.packed,
          plane_flag_bytes(tokens) + tokens * bytes,
          static_cast<int>(p.bases.token_bytes) - bytes,
          have_room(p.bases, keys, values)};
}

// Bit i: token i of a tile is NaN.
using Flags = uint32_t[kPackTokens / 32];

__device__ __forceinline__ bool flagged(const Flags& flags, int token) {
  return (flags[token / 32] >> (token % 32) & 1) != 0;
}

// The codes of neighbouring channels that make a byte of a plane.
template <int kBits>
__device__ __forceinline__ uint32_t codes_of(const float* steps) {
  constexpr float kMiddle = 0.5f * largest_code(kBits);
  uint32_t byte = 0;
#pragma unroll
  for (int e = 0; e < 8 / kBits; ++e) {
    const uint32_t code = nearest_code(__fadd_rn(steps[e], kMiddle), largest_code(kBits));
    byte |= code << (kBits * e);
  }
  return byte;
}

// Writes a plane of all tokens of a tile, four bytes a thread: they lie one behind the other, and
// begin on a boundary of as many. Zeros where a token has no codes.
template <int kPlane>
__device__ void put_plane(const Side& side, const Tile& tile, const NumbersRoom& room,
                          const Flags& flags, int first) {
  constexpr int kBits = plane_bits(kPlane);
  const int bytes = side.own.row(kPlane);
  unsigned char* page = side.page + side.places.starts[kPlane] + tile.first * bytes;
  uint32_t* to = reinterpret_cast<uint32_t*>(page);
  for (int i = threadIdx.x; i < tile.room * bytes / 4; i += kThreads) {
    int token = 4 * i / bytes, byte = 4 * i - token * bytes;
    uint32_t word = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if (token < tile.tokens && !flagged(flags, token)) {
        const float* steps = room.numbers + token * room.pitch + first + byte * (8 / kBits);
        word |= codes_of<kBits>(steps) << (8 * b);
      }
      if (++byte == bytes) byte = 0, ++token;
    }
    to[i] = word;
  }
}

// Zeros where a page has neither flags nor codes: the tile's share of what codes leave, and behind
// the flags.
__device__ void clear_rest(const PackPagesParams& p, const Tile& tile, const Side& side) {
  if (tile.side == kValueSide) {
    unsigned char* rest = side.page + side.end + tile.first * side.spare;
    for (int i = threadIdx.x; i < tile.room * side.spare; i += kThreads) rest[i] = 0;
  } else if (tile.first == 0) {
    const int flags = p.page_tokens / 4;
    for (int i = flags + threadIdx.x; i < plane_flag_bytes(p.page_tokens); i += kThreads) {
      side.page[i] = 0;
    }
  }
}

template <typename C>
__device__ void pack_tile(const PackPagesParams& p, float* shared) {
  __shared__ Flags flags;
  const Tile tile = tile_of<kPackTokens>(p);
  if (tile.job.packed < 0) return;
  const Side side = side_of(p, tile);
  if (!side.sound) return;
  const int channels = side.own.channels(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const NumbersRoom room(shared, p.head_dim, channels);
  if (threadIdx.x < kPackTokens / 32) flags[threadIdx.x] = 0;
  basis_numbers<C>(p, tile, room, side.basis.mean, side.basis.measures, channels);
  for (int token = warp; token < tile.tokens; token += kThreads / 32) {
    const bool finite = is_finite(room, token, channels);
    if (lane == 0 && !finite) atomicOr(&flags[token / 32], 1u << (token % 32));
  }
  __syncthreads();
  const PlaneWidths& own = side.own;
  put_plane<0>(side, tile, room, flags, 0);
  put_plane<1>(side, tile, room, flags, own.of[0]);
  put_plane<2>(side, tile, room, flags, own.of[0] + own.of[1]);
  clear_rest(p, tile, side);
  if (threadIdx.x < tile.room / 8) {
    const int byte = 8 * threadIdx.x;
    side.page[side.places.flags + (tile.first + byte) / 8] = flags[byte / 32] >> (byte % 32);
  }
}

// Spreads the steps of a token over its channels, by a warp.
__device__ void spread_steps(const Side& side, int row, int token, const Room& room) {
  int first = 0;
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane) {
    const int bits = plane_bits(plane), per = 8 / bits;
    const unsigned char* from = side.page + side.places.starts[plane] + row * side.own.row(plane);
    for (int i = threadIdx.x % 32; i < side.own.of[plane]; i += 32) {
      const int code = from[i / per] >> (bits * (i % per)) & largest_code(bits);
      const float middle = 0.5f * static_cast<float>(largest_code(bits));
      room.tokens[(first + i) * kTokenPitch + token] =
          __fsub_rn(static_cast<float>(code), middle);
    }
    first += side.own.of[plane];
  }
}

// What vectors stand for, or not kTurned their steps.
template <typename C, bool kTurned>
__device__ void unpack_tile(const PackPagesParams& p, float* shared) {
  const Tile tile = tile_of<kTokens>(p);
  if (tile.job.packed < 0 || tile.tokens == 0) return;
  const Side side = side_of(p, tile);
  if (!side.sound) return;
  const int channels = side.own.channels(), warp = threadIdx.x / 32;
  const Room room = room_of(shared, channels, p.head_dim);
  clear_tokens(room, channels);
  for (int token = warp; token < tile.tokens; token += kThreads / 32) {
    spread_steps(side, tile.first + token, token, room);
  }
  const auto is_nan = [&](int token) {
    const int row = tile.first + token;
    return (side.page[side.places.flags + row / 8] >> (row % 8) & 1) != 0;
  };
  const PlanesBasis& basis = side.basis;
  if constexpr (kTurned) {
    write_vectors<C>(p, tile, room, basis.mean, basis.steps, channels, is_nan);
  } else {
    write_numbers<C>(p, tile, room, channels, is_nan);
  }
}

}  // namespace

// Names as rust/cuda/src/pack_pages.rs builds them: by the cache's elements.
#define KERNELS(NAME, C)                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads)                     \
      pack_planes_##NAME(const __grid_constant__ PackPagesParams params) {   \
    extern __shared__ __align__(16) float shared[];                          \
    pack_tile<C>(params, shared);                                            \
  }                                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads)                     \
      unpack_planes_##NAME(const __grid_constant__ PackPagesParams params) { \
    extern __shared__ __align__(16) float shared[];                          \
    unpack_tile<C, true>(params, shared);                                    \
  }                                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads)                     \
      spread_planes_##NAME(const __grid_constant__ PackPagesParams params) { \
    extern __shared__ __align__(16) float shared[];                          \
    unpack_tile<C, false>(params, shared);                                   \
  }

KERNELS(f32, float)
KERNELS(bf16, __nv_bfloat16)
KERNELS(f16, __half)
