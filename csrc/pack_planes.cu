// pack_pages and unpack_pages of planes: rust/reference/src/planes.rs, to the same bytes.
//
// The simple version:
//   for each vector: steps = measures · (x − mean), of channels that have bits; of each the nearest
//   code, the outermost one for what lies further out
//   back: x = mean + Σ (code − largest / 2) · step
//
// What makes it fast: as pack_top_r.cu, tiles of 32 tokens of one side of a page, whose products
// run in the order of the definition. A warp writes a token's rows of all planes, byte by byte.
//
// Launch: rows · pages · 2 · tiles blocks of 256 threads. A row that points outside either side,
// or whose packed block has no basis, is skipped, and so is a page whose basis has bits that are no
// planes or too many.

#include "api.h"
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

// Writes a vector's codes, by a warp; zeros where it has none.
__device__ void put_codes(const Side& side, int row, const float* steps, bool has_codes) {
  int first = 0;
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane) {
    const int bits = plane_bits(plane), per = 8 / bits, bytes = side.own.row(plane);
    unsigned char* to = side.page + side.places.starts[plane] + row * bytes;
    for (int i = threadIdx.x % 32; i < bytes; i += 32) {
      uint32_t byte = 0;
      for (int e = 0; e < per && has_codes; ++e) {
        const float middle = 0.5f * static_cast<float>(largest_code(bits));
        const float own = __fadd_rn(steps[first + i * per + e], middle);
        byte |= nearest_code(own, largest_code(bits)) << (bits * e);
      }
      to[i] = byte;
    }
    first += side.own.of[plane];
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
  __shared__ int odd[kTokens];
  __shared__ uint32_t flags;  // bit i: token i of the tile is NaN
  const Tile tile = tile_of(p);
  if (tile.job.packed < 0) return;
  const Side side = side_of(p, tile);
  if (!side.sound) return;
  const int dim = p.head_dim, channels = side.own.channels();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Room room = room_of(shared, dim, channels);
  if (threadIdx.x == 0) flags = 0;
  rotate_tile<C>(p, tile, room, side.basis.mean, side.basis.measures, channels, odd);
  for (int token = warp; token < tile.room; token += kThreads / 32) {
    const bool there = token < tile.tokens;
    const float* steps = room.results + token * room.pitch;
    const bool finite = is_finite(steps, channels, odd[token]);
    put_codes(side, tile.first + token, steps, there && finite);
    if (lane == 0 && there && !finite) atomicOr(&flags, 1u << token);
  }
  clear_rest(p, tile, side);
  __syncthreads();
  if (threadIdx.x < tile.room / 8) {
    const int byte = side.places.flags + tile.first / 8 + threadIdx.x;
    side.page[byte] = flags >> (8 * threadIdx.x);
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
  const Tile tile = tile_of(p);
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
