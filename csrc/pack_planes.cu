// pack_pages and unpack_pages of planes: rust/reference/src/planes.rs, to the same bytes.
//
// The simple version:
//   for each vector: steps = measures · (x − mean), of channels that have bits; of each the nearest
//   code, the outermost one for what lies further out
//   back: x = mean + Σ (code − largest / 2) · step
//
// What makes it fast: as pack_top_r.cu, tiles of one side of a page, whose products are those of
// integers. A warp writes the codes of eight tokens, a lane those of four channels.
//
// Launch: as pack_top_r.cu. A row that points outside either side, or whose packed block has no
// basis, is skipped, and so is a page whose basis has bits that are no planes or too many.

#include "api.h"
#include "basis_numbers.cuh"
#include "pack_tiles.cuh"
#include "packed.cuh"
#include "planes.cuh"

namespace {

// One side of a page in a basis.
struct Side {
  PlanesBasis basis;
  PlaneWidths own;
  PlanePlaces places;
  int end;     // of all codes of the page
  int spare;   // bytes that codes leave of a token's
  bool sound;  // the basis has planes

  Side() = default;

  // By all lanes of a warp.
  __device__ Side(const PackPagesParams& p, int number, int page, int side) {
    const int dim = p.head_dim, tokens = p.page_tokens;
    const auto of_side = [&](int which) {
      return planes_basis(p.bases, number, page, which, dim);
    };
    const PlaneWidths keys = widths_at(of_side(kKeySide).bits, dim);
    const PlaneWidths values = widths_at(of_side(kValueSide).bits, dim);
    const int bytes = keys.bytes() + values.bytes();
    basis = of_side(side);
    own = side == kKeySide ? keys : values;
    places = plane_places(keys, own, side, tokens);
    end = plane_flag_bytes(tokens) + tokens * bytes;
    spare = static_cast<int>(p.bases.token_bytes) - bytes;
    sound = have_room(p.bases, keys, values);
  }
};

__device__ __forceinline__ unsigned char* page_of(const PackPagesParams& p, const Tile& tile) {
  return static_cast<unsigned char*>(p.packed) + tile.job.packed;
}

// The numbers of a vector of a tile as a warp has them: of channels 128 · q + 4 · lane and three
// more; 0 behind the last channel.
template <int kQuads>
struct VectorNumbers {
  float of[kQuads][4];
  bool finite;  // the vector and all of them: in all lanes

  template <typename Room>
  __device__ VectorNumbers(const Room& room, int token, int channels) {
    bool all = isfinite(room.powers[token]);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int first = 128 * q + 4 * (threadIdx.x % 32);
      Pack<float, 4> four = {};
      if (first < channels) four = load<float, 4>(room.numbers + token * room.pitch + first);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        of[q][e] = first + e < channels ? four.at[e] : 0.0f;
        all = all && isfinite(of[q][e]);
      }
    }
    finite = __all_sync(~0u, all);
  }
};

// The codes of four channels; 0 of those that have none.
__device__ __forceinline__ uint32_t codes_of(const FourChannels& of, const float (&steps)[4]) {
  const int largest = largest_code(of.bits);
  const float middle = 0.5f * static_cast<float>(largest);
  uint32_t codes = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    codes |= nearest_code(__fadd_rn(steps[e], middle), largest) << (of.bits * e);
  }
  return codes;
}

// Zeros where a page has neither flags nor codes: the tile's share of what codes leave, and behind
// the flags.
__device__ void clear_rest(const PackPagesParams& p, const Tile& tile, const Side& side) {
  unsigned char* page = page_of(p, tile);
  if (tile.side == kValueSide) {
    unsigned char* rest = page + side.end + tile.first * side.spare;
    for (int i = threadIdx.x; i < tile.room * side.spare; i += kThreads) rest[i] = 0;
  } else if (tile.first == 0) {
    const int flags = p.page_tokens / 4;
    for (int i = flags + threadIdx.x; i < plane_flag_bytes(p.page_tokens); i += kThreads) {
      page[i] = 0;
    }
  }
}

// As pack_tiles takes it, of heads of up to 32 · kSteps channels.
template <typename C, int kOfSteps>
struct Planes {
  using Element = C;
  static constexpr int kSteps = kOfSteps;
  static constexpr int kQuads = kSteps * kStep / 128;

  const PackPagesParams& p;
  Side side;

  __device__ bool enter(int number, Rows& rows) {
    side = Side(p, number, blockIdx.x / 2, blockIdx.x % 2);
    rows = {side.basis.mean, side.basis.measures, side.own.channels()};
    return side.sound;
  }

  template <typename Room>
  __device__ void put(const Tile& tile, const Room& room) const {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 8;
    unsigned char* page = page_of(p, tile);
    uint32_t flags = 0;  // bit i: token i of the warp's is NaN
    for (int token = first; token < min(first + 8, tile.room); ++token) {
      const VectorNumbers<kQuads> steps(room, token, side.own.channels());
      const bool there = token < tile.tokens;
      if (there && !steps.finite) flags |= 1u << (token - first);
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const FourChannels four(side.own, side.places.starts, 128 * q + 4 * lane);
        four.store(four.at(page, tile.first + token),
                   there && steps.finite ? codes_of(four, steps.of[q]) : 0);
      }
    }
    clear_rest(p, tile, side);
    if (lane == 0 && first < tile.room) page[side.places.flags + (tile.first + first) / 8] = flags;
  }
};

// Spreads the steps of a token over its channels, by a warp.
__device__ void spread_steps(const Side& side, const unsigned char* page, int row, int token,
                             const Room& room) {
  for (int channel = threadIdx.x % 32 * 4; channel < side.own.channels(); channel += 128) {
    const FourChannels four(side.own, side.places.starts, channel);
    const uint32_t codes = four.load(four.at(page, row));
    const int largest = largest_code(four.bits);
    const float middle = 0.5f * static_cast<float>(largest);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int code = codes >> (four.bits * e) & largest;
      room.tokens[(channel + e) * kTokenPitch + token] =
          __fsub_rn(static_cast<float>(code), middle);
    }
  }
}

// What vectors stand for, or not kTurned their steps.
template <typename C, bool kTurned>
__device__ void unpack_tile(const PackPagesParams& p, float* shared) {
  const Tile tile = unpacked_tile(p);
  if (tile.job.packed < 0 || tile.tokens == 0) return;
  const Side side(p, tile.number, tile.job.page, tile.side);
  if (!side.sound) return;
  const unsigned char* page = page_of(p, tile);
  const int channels = side.own.channels(), warp = threadIdx.x / 32;
  const Room room = room_of(shared, channels, p.head_dim);
  clear_tokens(room, channels);
  for (int token = warp; token < tile.tokens; token += kThreads / 32) {
    spread_steps(side, page, tile.first + token, token, room);
  }
  const auto is_nan = [&](int token) {
    const int row = tile.first + token;
    return (page[side.places.flags + row / 8] >> (row % 8) & 1) != 0;
  };
  const PlanesBasis& basis = side.basis;
  if constexpr (kTurned) {
    write_vectors<C>(p, tile, room, basis.mean, basis.steps, channels, is_nan);
  } else {
    write_numbers<C>(p, tile, room, channels, is_nan);
  }
}

}  // namespace

// Names as rust/cuda/src/pack_pages.rs builds them: by the cache's elements; and of heads of more
// than 128 channels.
#define PACK(NAME, C, STEPS)                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads, STEPS > 4 ? 1 : 2)              \
      pack_planes_##NAME(const __grid_constant__ PackPagesParams params) {               \
    extern __shared__ __align__(16) unsigned char shared[];                              \
    pack_tiles(params, Planes<C, STEPS>{params, {}}, shared);                            \
  }
#define KERNELS(NAME, C)                                                                 \
  PACK(NAME, C, 4)                                                                       \
  PACK(NAME##_wide, C, 8)                                                                \
  extern "C" __global__ void __launch_bounds__(kThreads)                                 \
      unpack_planes_##NAME(const __grid_constant__ PackPagesParams params) {             \
    extern __shared__ __align__(16) unsigned char shared[];                              \
    unpack_tile<C, true>(params, reinterpret_cast<float*>(shared));                      \
  }                                                                                      \
  extern "C" __global__ void __launch_bounds__(kThreads)                                 \
      spread_planes_##NAME(const __grid_constant__ PackPagesParams params) {             \
    extern __shared__ __align__(16) unsigned char shared[];                              \
    unpack_tile<C, false>(params, reinterpret_cast<float*>(shared));                     \
  }

KERNELS(f32, float)
KERNELS(bf16, __nv_bfloat16)
KERNELS(f16, __half)
