// pack_pages and unpack_pages of top-r pages: rust/reference/src/top_r.rs, to the same bytes.
//
// The simple version:
//   for each vector: c = directions · (x − mean); keep the groups of c with the most energy
//   back: x = mean + Σ c · direction
//
// What makes it fast:
// 1. A thread block packs one side of a page of every so many rows, 64 tokens at a time. The
//    products are those of integers, on tensor cores: basis_numbers.cuh.
// 2. Four lanes choose what is kept of a vector: top_r_choice.cuh. They make codes of all of its
//    numbers, four at a time from banks of their own, and list those that are kept: none waits for
//    another, and few scales take a division.
// 3. One unpacks 32 tokens: the products are those of two matrices, of which a thread has 4 × 4
//    results. These sums run in the order of the definition, one rounding after the other.
//
// Launch, to pack: [2 · pages, chunks] blocks of 256 threads, of which each takes every chunk-th
// row; to unpack: rows · pages · 2 · tiles blocks of as many. A row that points outside either
// side, or whose packed block has no basis, is skipped.

#include "api.h"
#include "basis_numbers.cuh"
#include "pack_tiles.cuh"
#include "top_r.cuh"
#include "top_r_choice.cuh"

namespace {

// Where a tile's side of a page lies, and its parts.
struct Side {
  TopRPlaces places;
  unsigned char* bytes;
};

__device__ Side side_of(const PackPagesParams& p, const Tile& tile) {
  const TopRPlaces places = top_r_places(p.top_r, p.page_tokens);
  unsigned char* page = static_cast<unsigned char*>(p.packed) + tile.job.packed;
  return {places, page + tile.side * places.side};
}

__device__ const float* mean_of(const PackPagesParams& p, const Tile& tile) {
  return basis_at(p.bases, tile.number, tile.job.page, tile.side, p.head_dim);
}

// Numbers over a scale, each rounded once. Of an ordinary scale that is the product with its
// inverse, put right by what it leaves (Markstein, 1990): so it is for every number where the scale
// has 11 significant bits or fewer.
struct Quotients {
  float scale, inverse;
  bool ordinary;  // neither is anywhere near the ends of the range

  __device__ __forceinline__ explicit Quotients(float of)
      : scale(of), inverse(__frcp_rn(of)), ordinary(of > 0x1p-80f && of < 0x1p80f) {}

  __device__ __forceinline__ float of(float x) const {
    if (!ordinary) return __fdiv_rn(x, scale);
    const float near = __fmul_rn(x, inverse);
    return __fmaf_rn(__fmaf_rn(-near, scale, x), inverse, near);
  }
};

// The bits of a kept number.
template <int kBits>
__device__ __forceinline__ uint32_t stored(float x, const Quotients& by) {
  if constexpr (kBits == 16) {
    return __bfloat16_as_ushort(isnan(by.scale) ? Scales<__nv_bfloat16>::nan()
                                                : __float2bfloat16_rn(x));
  } else {
    if (!(by.scale > 0)) return 0;
    const float steps = by.of(x);
    if constexpr (kBits == 8) return Fp8(steps).__x;  // saturates
    else return nearest_code(__fadd_rn(steps, kCodeMiddle), largest_code(kBits));
  }
}

// Lists what is stored of a vector's kept numbers, in their order, by the four lanes that have it.
// Lanes read all of their numbers four at a time, which are in banks of their own, and write those
// that are kept.
template <int kBits, int kWords, int kGroup, typename Room>
__device__ __forceinline__ void list_codes(const Choice<kWords, kGroup>& choice, const Room& room,
                                           int token, int channels, float scale,
                                           uint16_t* codes) {
  const Quotients by(scale);
  const float* numbers = room.numbers + token * room.pitch;
  int before = 0;  // groups of the runs before
  choice.each_quad([&](int w, int j, int first) {
    const uint32_t word = choice.words[w];
    if (j == 0) before = choice.before(w);
    const int group = first % kRun / kGroup;
    int at = (before + __popc(word & ((1u << group) - 1))) * kGroup;
    Pack<float, 4> four = {};
    if (first < channels) four = load<float, 4>(numbers + first);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t code = stored<kBits>(four.at[e], by);
      if (word >> (group + e / kGroup) & 1) codes[at++] = code;
    }
  });
}

// Eight codes of four bits, of as many listed ones.
__device__ __forceinline__ uint32_t eight_codes(const uint16_t* codes) {
  const uint4 pairs = *reinterpret_cast<const uint4*>(codes);
  const auto two = [](uint32_t pair) { return (pair | pair >> 12) & 0xFF; };
  return two(pairs.x) | two(pairs.y) << 8 | two(pairs.z) << 16 | two(pairs.w) << 24;
}

// Writes the codes of a vector's kept numbers, by the four lanes that have it; zeros where there is
// none.
__device__ __forceinline__ void put_codes(const TopRParams& of, const uint16_t* codes, bool there,
                                          unsigned char* to, int bytes) {
  const auto put_all = [&](auto* pieces, int bits) {
    const int each = 8 * sizeof(*pieces) / bits, count = bytes / sizeof(*pieces);
    for (int i = lane_of_four(); i < count; i += 4) {
      uint32_t word = 0;
      for (int e = 0; e < each && there; ++e) {
        word |= static_cast<uint32_t>(codes[i * each + e]) << (bits * e);
      }
      pieces[i] = word;
    }
  };
  if (bytes % 4 == 0 && of.bits == 4) {
    for (int i = lane_of_four(); i < bytes / 4; i += 4) {
      reinterpret_cast<uint32_t*>(to)[i] = there ? eight_codes(codes + 8 * i) : 0;
    }
  } else if (bytes % 4 == 0) {
    put_all(reinterpret_cast<uint32_t*>(to), of.bits);
  } else if (of.bits == 16) {
    put_all(reinterpret_cast<uint16_t*>(to), 16);
  } else {
    put_all(to, of.bits);
  }
}

// Writes a lane's bytes of the bitmap of a vector.
template <int kWords, int kGroup>
__device__ __forceinline__ void put_bitmap(const Choice<kWords, kGroup>& choice, bool there,
                                           unsigned char* to, int bytes) {
  constexpr int kOfRun = 4 / kGroup;  // bytes of a lane's channels
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const uint32_t word = there ? choice.words[w] : 0;
    const int first = (4 * w + lane_of_four()) * kOfRun;
    if (kGroup == 1 && bytes % 4 == 0) {
      if (first < bytes) *reinterpret_cast<uint32_t*>(to + first) = word;
      continue;
    }
#pragma unroll
    for (int i = 0; i < kOfRun; ++i) {
      if (first + i < bytes) to[first + i] = word >> (8 * i);
    }
  }
}

// The scale that is stored of a vector whose largest kept number is so large.
template <typename S>
__device__ __forceinline__ S scale_for(const TopRParams& of, float largest) {
  if (of.bits == 16) {
    const bool held = isfinite(Scales<__nv_bfloat16>::widen(__float2bfloat16_rn(largest)));
    return held ? static_cast<S>(0.0f) : Scales<S>::nan();
  }
  return scale_of<S>(largest, of.bits == 8 ? kFp8Reach : kCodeMiddle);
}

// As pack_tiles takes it, of heads of up to 32 · kSteps channels.
template <typename C, typename S, int kOfSteps>
struct TopR {
  using Element = C;
  static constexpr int kSteps = kOfSteps;
  static constexpr int kWords = kSteps * kStep / 128;

  const PackPagesParams& p;

  __device__ bool enter(int number, Rows& rows) const {
    const int page = blockIdx.x / 2, side = blockIdx.x % 2, dim = p.head_dim;
    const float* mean = basis_at(p.bases, number, page, side, dim);
    rows = {mean, mean + dim, static_cast<int>(p.top_r.channels)};
    return true;
  }

  template <typename Room>
  __device__ void put(const Tile& tile, const Room& room) const {
    if (p.top_r.group == 1) put_groups<1>(tile, room);
    if (p.top_r.group == 2) put_groups<2>(tile, room);
    if (p.top_r.group == 4) put_groups<4>(tile, room);
  }

  // Four lanes write a vector.
  template <int kGroup, typename Room>
  __device__ void put_groups(const Tile& tile, const Room& room) const {
    const Side side = side_of(p, tile);
    const TopRPlaces& at = side.places;
    const int token = threadIdx.x / 4, row = tile.first + token;
    const Choice<kWords, kGroup> choice(p.top_r, room, token);
    const S scale = scale_for<S>(p.top_r, choice.largest);
    const float wide = Scales<S>::widen(scale);
    // The integers of the vectors are not needed any more.
    uint16_t* codes = reinterpret_cast<uint16_t*>(room.bytes) + token * room.byte_pitch;
    const int channels = p.top_r.channels;
    if (p.top_r.bits == 16) list_codes<16>(choice, room, token, channels, wide, codes);
    if (p.top_r.bits == 8) list_codes<8>(choice, room, token, channels, wide, codes);
    if (p.top_r.bits == 4) list_codes<4>(choice, room, token, channels, wide, codes);
    __syncwarp();
    if (token >= tile.room) return;
    const bool there = token < tile.tokens;
    put_bitmap(choice, there, side.bytes + row * at.bitmap, at.bitmap);
    put_codes(p.top_r, codes, there, side.bytes + at.numbers + row * at.row, at.row);
    if (at.scale > 0 && lane_of_four() == 0) {
      reinterpret_cast<S*>(side.bytes + at.scales)[row] = there ? scale : static_cast<S>(0.0f);
    }
  }
};

// Spreads the kept numbers of a token over its channels, by a warp.
template <typename S>
__device__ void spread_vector(const TopRParams& of, const Side& side, int row, int token,
                              const Room& room) {
  const TopRPlaces& at = side.places;
  const float scale =
      at.scale == 0 ? 1.0f
                    : Scales<S>::widen(reinterpret_cast<const S*>(side.bytes + at.scales)[row]);
  const auto put = [&](int channel, const float (&numbers)[4], uint32_t is_kept) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      // Of what is not kept 0 stays, whatever the scale is.
      if ((is_kept >> e & 1) == 0) continue;
      room.tokens[(channel + e) * kTokenPitch + token] = __fmul_rn(scale, numbers[e]);
    }
  };
  spread_numbers(of, side.bytes + row * at.bitmap, side.bytes + at.numbers + row * at.row,
                 of.channels, put);
}

// What vectors stand for, or not kTurned their numbers.
template <typename C, typename S, bool kTurned>
__device__ void unpack_tile(const PackPagesParams& p, float* shared) {
  const Tile tile = unpacked_tile(p);
  if (tile.job.packed < 0 || tile.tokens == 0) return;
  const int dim = p.head_dim, channels = p.top_r.channels, warp = threadIdx.x / 32;
  const Side side = side_of(p, tile);
  const Room room = room_of(shared, channels, dim);
  const float* mean = mean_of(p, tile);
  clear_tokens(room, channels);
  for (int token = warp; token < tile.tokens; token += kThreads / 32) {
    spread_vector<S>(p.top_r, side, tile.first + token, token, room);
  }
  const auto is_nan = [](int) { return false; };
  if constexpr (kTurned) {
    write_vectors<C>(p, tile, room, mean, mean + dim, channels, is_nan);
  } else {
    write_numbers<C>(p, tile, room, channels, is_nan);
  }
}

}  // namespace

// Names as rust/cuda/src/pack_pages.rs builds them: the cache's elements, then the scales'; and of
// heads of more than 128 channels.
#define PACK(NAME, C, S, STEPS)                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads, STEPS > 4 ? 1 : 2)              \
      pack_top_r_##NAME(const __grid_constant__ PackPagesParams params) {                \
    extern __shared__ __align__(16) unsigned char shared[];                              \
    pack_tiles(params, TopR<C, S, STEPS>{params}, shared);                               \
  }
#define KERNELS(NAME, C, SCALES, S)                                                      \
  PACK(NAME##_##SCALES, C, S, 4)                                                         \
  PACK(NAME##_##SCALES##_wide, C, S, 8)                                                  \
  extern "C" __global__ void __launch_bounds__(kThreads)                                 \
      unpack_top_r_##NAME##_##SCALES(const __grid_constant__ PackPagesParams params) {   \
    extern __shared__ __align__(16) unsigned char shared[];                              \
    unpack_tile<C, S, true>(params, reinterpret_cast<float*>(shared));                   \
  }                                                                                      \
  extern "C" __global__ void __launch_bounds__(kThreads)                                 \
      spread_top_r_##NAME##_##SCALES(const __grid_constant__ PackPagesParams params) {   \
    extern __shared__ __align__(16) unsigned char shared[];                              \
    unpack_tile<C, S, false>(params, reinterpret_cast<float*>(shared));                  \
  }
#define EVERY(SCALES, S)                                                                 \
  KERNELS(f32, float, SCALES, S)                                                         \
  KERNELS(bf16, __nv_bfloat16, SCALES, S)                                                \
  KERNELS(f16, __half, SCALES, S)

EVERY(bf16, __nv_bfloat16)
EVERY(f16, __half)
