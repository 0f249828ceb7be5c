// pack_pages and unpack_pages of top-r pages: rust/reference/src/top_r.rs, to the same bytes.
//
// The simple version:
//   for each vector: c = directions · (x − mean); keep the groups of c with the most energy
//   back: x = mean + Σ c · direction
//
// What makes it fast:
// 1. A thread block packs 64 tokens of one side of a page, all pages of all rows in one launch. The
//    products are those of integers, on tensor cores: basis_numbers.cuh.
// 2. A warp chooses among the groups of a vector by halving an interval of their energies, until
//    as many lie above it as are kept: some ten counts, and no sorting.
// 3. One unpacks 32 tokens: the products are those of two matrices, of which a thread has 4 × 4
//    results. These sums run in the order of the definition, one rounding after the other.
//
// Launch: rows · pages · 2 · tiles blocks of 256 threads. A row that points outside either side,
// or whose packed block has no basis, is skipped.

#include "api.h"
#include "basis_numbers.cuh"
#include "pack_tiles.cuh"
#include "top_r.cuh"

namespace {

constexpr int kMaxKept = 256;
constexpr int kSlots = kMaxKept / 32;  // groups of a lane

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

// How far below the bits of the largest number those lie that are most often kept.
template <typename Number>
constexpr Number kRange = 0;
template <>
constexpr uint32_t kRange<uint32_t> = 4u << 23;
template <>
constexpr uint64_t kRange<uint64_t> = uint64_t{8} << 52;

__device__ __forceinline__ uint32_t largest_in_warp(uint32_t x) {
  return __reduce_max_sync(~0u, x);
}

__device__ __forceinline__ uint64_t largest_in_warp(uint64_t x) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) x = max(x, __shfl_xor_sync(~0u, x, apart));
  return x;
}

// Bit i of word s: group 32·s + i is kept. The same in all lanes.
struct Bitmap {
  uint32_t words[kSlots];
};

// Of so many numbers of a warp, of which a lane has every 32nd, `wanted` of the largest ones, of
// equal ones the first. Numbers behind the last are 0.
template <typename Number>
__device__ Bitmap largest_of(const Number (&numbers)[kSlots], int count, int wanted) {
  const int lane = threadIdx.x % 32;
  const auto at_least = [&](Number bound) {
    int found = 0;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) found += numbers[s] >= bound;
    return static_cast<int>(__reduce_add_sync(~0u, found));
  };
  Number most = 0;
#pragma unroll
  for (int s = 0; s < kSlots; ++s) most = max(most, numbers[s]);
  most = largest_in_warp(most);
  // So many are at least `low`, as many as wanted or more, and fewer at least `high`.
  Number low = 0, high = most + 1;
  int found = count;
  // Most vectors keep none of which the root is below a sixteenth of the largest one's.
  Number middle = most - min(most, kRange<Number>);
  while (found != wanted && high - low > 1) {
    if (middle <= low) middle = low + (high - low) / 2;
    const int above = at_least(middle);
    if (above >= wanted) {
      low = middle;
      found = above;
    } else {
      high = middle;
    }
    middle = low + (high - low) / 2;
  }
  Bitmap kept;
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const bool there = 32 * s + lane < count;
    kept.words[s] = __ballot_sync(~0u, there && numbers[s] >= low);
  }
  if (found == wanted) return kept;
  // `low` is that of the last one wanted, and of others.
  int ties = wanted - at_least(low + 1);
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const bool tied = numbers[s] == low && 32 * s + lane < count;
    const uint32_t all = __ballot_sync(~0u, tied);
    const bool first = __popc(all & ((1u << lane) - 1)) < ties;
    kept.words[s] = __ballot_sync(~0u, numbers[s] > low || (tied && first));
    ties -= min(__popc(all), max(ties, 0));
  }
  return kept;
}

// Of a vector's groups those of the most energy, of equal ones the first; where a number is not
// finite the first of all.
__device__ Bitmap choose(const TopRParams& of, const float* numbers, bool finite) {
  const int lane = threadIdx.x % 32, size = of.group;
  const int groups = of.channels / of.group, wanted = of.kept / of.group;
  // Of numbers that are not below 0 the bits have the same order; so have numbers their squares.
  if (size == 1) {
    uint32_t sizes[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int group = 32 * s + lane;
      sizes[s] = group < groups && finite ? size_bits(numbers[group]) : 0;
    }
    return largest_of(sizes, groups, wanted);
  }
  uint64_t energies[kSlots];
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const int group = 32 * s + lane;
    double energy = 0;
    for (int i = 0; i < size && group < groups && finite; ++i) {
      const double c = numbers[group * size + i];
      energy = __dadd_rn(energy, __dmul_rn(c, c));
    }
    energies[s] = static_cast<uint64_t>(__double_as_longlong(energy));
  }
  return largest_of(energies, groups, wanted);
}

// The bits of a kept number.
template <typename S>
__device__ __forceinline__ uint32_t stored(const TopRParams& of, float x, float scale) {
  if (of.bits == 16) {
    return __bfloat16_as_ushort(isnan(scale) ? Scales<__nv_bfloat16>::nan()
                                             : __float2bfloat16_rn(x));
  }
  if (!(scale > 0)) return 0;
  const float steps = __fdiv_rn(x, scale);
  if (of.bits == 8) return Fp8(steps).__x;  // saturates
  return nearest_code(__fadd_rn(steps, kCodeMiddle), largest_code(4));
}

// By a warp.
__device__ void put_bitmap(const Bitmap& bitmap, unsigned char* to, int bytes) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    if (bytes % 4 == 0) {
      if (lane == s && 4 * s < bytes) reinterpret_cast<uint32_t*>(to)[s] = bitmap.words[s];
    } else if (lane / 4 == s && lane < bytes) {
      to[lane] = bitmap.words[s] >> (8 * (lane % 4));
    }
  }
}

// Writes a vector of rotated numbers, by a warp; `kept` is memory for them.
template <typename S>
__device__ void put_vector(const TopRParams& of, const Side& side, int row, const float* numbers,
                           bool finite, float* kept) {
  const int lane = threadIdx.x % 32, size = of.group;
  const Bitmap bitmap = choose(of, numbers, finite);
  float largest = 0;
  int before = 0;
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const uint32_t word = bitmap.words[s];
    if (word >> lane & 1) {
      const int nth = before + __popc(word & ((1u << lane) - 1));
      for (int i = 0; i < size; ++i) {
        const float c = numbers[(32 * s + lane) * size + i];
        kept[nth * size + i] = c;
        largest = fmaxf(largest, fabsf(c));
      }
    }
    before += __popc(word);
  }
  largest = __uint_as_float(largest_in_warp(__float_as_uint(largest)));
  __syncwarp();
  if (!finite) largest = NAN;
  S scale = static_cast<S>(0.0f);
  if (of.bits == 16) {
    if (!isfinite(Scales<__nv_bfloat16>::widen(__float2bfloat16_rn(largest)))) {
      scale = Scales<S>::nan();
    }
  } else {
    scale = scale_of<S>(largest, of.bits == 8 ? kFp8Reach : kCodeMiddle);
  }
  const float wide = Scales<S>::widen(scale);
  const TopRPlaces& at = side.places;
  put_bitmap(bitmap, side.bytes + row * at.bitmap, at.bitmap);
  unsigned char* to = side.bytes + at.numbers + row * at.row;
  for (int i = lane; i < static_cast<int>(of.bits == 4 ? of.kept / 2 : of.kept); i += 32) {
    if (of.bits == 16) {
      reinterpret_cast<uint16_t*>(to)[i] = stored<S>(of, kept[i], wide);
    } else if (of.bits == 8) {
      to[i] = stored<S>(of, kept[i], wide);
    } else {
      to[i] = stored<S>(of, kept[2 * i], wide) | stored<S>(of, kept[2 * i + 1], wide) << 4;
    }
  }
  if (at.scale > 0 && lane == 0) reinterpret_cast<S*>(side.bytes + at.scales)[row] = scale;
  __syncwarp();
}

// Zeros in the place of a vector, by a warp.
__device__ void put_nothing(const Side& side, int row) {
  const TopRPlaces& at = side.places;
  const int lane = threadIdx.x % 32;
  for (int i = lane; i < at.bitmap; i += 32) side.bytes[row * at.bitmap + i] = 0;
  for (int i = lane; i < at.row; i += 32) side.bytes[at.numbers + row * at.row + i] = 0;
  if (lane < at.scale) side.bytes[at.scales + row * at.scale + lane] = 0;
}

template <typename C, typename S>
__device__ void pack_tile(const PackPagesParams& p, float* shared) {
  __shared__ float kept[kThreads / 32][kMaxKept];
  const Tile tile = tile_of<kPackTokens>(p);
  if (tile.job.packed < 0) return;
  const int dim = p.head_dim, channels = p.top_r.channels, warp = threadIdx.x / 32;
  const Side side = side_of(p, tile);
  const NumbersRoom room(shared, dim, channels);
  const float* mean = mean_of(p, tile);
  basis_numbers<C>(p, tile, room, mean, mean + dim, channels);
  for (int token = warp; token < tile.room; token += kThreads / 32) {
    if (token >= tile.tokens) {
      put_nothing(side, tile.first + token);
      continue;
    }
    const float* numbers = room.numbers + token * room.pitch;
    const bool finite = is_finite(room, token, channels);
    put_vector<S>(p.top_r, side, tile.first + token, numbers, finite, kept[warp]);
  }
}

// What kept number i of a vector stands for.
__device__ __forceinline__ float number_at(const TopRParams& of, const unsigned char* row, int i,
                                           float scale) {
  if (of.bits == 16) {
    return __uint_as_float(static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(row)[i]) << 16);
  }
  if (of.bits == 8) {
    Fp8 x;
    x.__x = row[i];
    return __fmul_rn(scale, static_cast<float>(x));
  }
  const uint32_t code = row[i / 2] >> (4 * (i % 2)) & largest_code(4);
  return __fmul_rn(scale, __fsub_rn(static_cast<float>(code), kCodeMiddle));
}

// Spreads the kept numbers of a token over its channels, by a warp.
template <typename S>
__device__ void spread_vector(const TopRParams& of, const Side& side, int row, int token,
                              const Room& room) {
  const TopRPlaces& at = side.places;
  const int lane = threadIdx.x % 32, size = of.group;
  const int groups = of.channels / of.group, most = of.kept / of.group;
  const float scale =
      at.scale == 0 ? 1.0f
                    : Scales<S>::widen(reinterpret_cast<const S*>(side.bytes + at.scales)[row]);
  const unsigned char* numbers = side.bytes + at.numbers + row * at.row;
  int before = 0;
  for (int first = 0; first < groups; first += 32) {
    const int group = first + lane;
    const bool marked = group < groups &&
                        (side.bytes[row * at.bitmap + group / 8] >> (group % 8) & 1) != 0;
    const uint32_t word = __ballot_sync(~0u, marked);
    const int nth = before + __popc(word & ((1u << lane) - 1));
    for (int i = 0; i < size && marked && nth < most; ++i) {
      room.tokens[(group * size + i) * kTokenPitch + token] =
          number_at(of, numbers, nth * size + i, scale);
    }
    before += __popc(word);
  }
}

// What vectors stand for, or not kTurned their numbers.
template <typename C, typename S, bool kTurned>
__device__ void unpack_tile(const PackPagesParams& p, float* shared) {
  const Tile tile = tile_of<kTokens>(p);
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

// Names as rust/cuda/src/pack_pages.rs builds them: the cache's elements, then the scales'.
#define KERNELS(NAME, C, SCALES, S)                                              \
  extern "C" __global__ void __launch_bounds__(kThreads)                         \
      pack_top_r_##NAME##_##SCALES(const __grid_constant__ PackPagesParams params) { \
    extern __shared__ __align__(16) float shared[];                              \
    pack_tile<C, S>(params, shared);                                             \
  }                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads)                         \
      unpack_top_r_##NAME##_##SCALES(const __grid_constant__ PackPagesParams params) { \
    extern __shared__ __align__(16) float shared[];                              \
    unpack_tile<C, S, true>(params, shared);                                     \
  }                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads)                         \
      spread_top_r_##NAME##_##SCALES(const __grid_constant__ PackPagesParams params) { \
    extern __shared__ __align__(16) float shared[];                              \
    unpack_tile<C, S, false>(params, shared);                                    \
  }
#define EVERY(SCALES, S)                  \
  KERNELS(f32, float, SCALES, S)          \
  KERNELS(bf16, __nv_bfloat16, SCALES, S) \
  KERNELS(f16, __half, SCALES, S)

EVERY(bf16, __nv_bfloat16)
EVERY(f16, __half)
