// pack_pages and unpack_pages of top-r pages: rust/reference/src/top_r.rs, to the same bytes.
//
// The simple version:
//   for each vector: c = directions · (x − mean); keep the groups of c with the most energy
//   back: x = mean + Σ c · direction
//
// What makes it fast:
// 1. One thread block has 32 tokens of one side of a page, all pages of all rows in one launch.
// 2. The products are those of two matrices, of which a thread has 4 × 4 results. All sums run in
//    the order of the definition, one rounding after the other: so no tensor core, no fused step.
// 3. A warp chooses among the groups of a vector by bits of their energies, from the highest on,
//    and ends where a bit tells kept ones from others: some 15 votes, and no sorting.
//
// Launch: rows · pages · 2 · tiles blocks of 256 threads. A row that points outside either side,
// or whose packed block has no basis, is skipped.

#include "api.h"
#include "pack_job.cuh"
#include "top_r.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 32;       // of a thread block; also in rust/cuda/src/pack_pages.rs
constexpr int kTokenPitch = 36;   // floats between channels of a tile; there too
constexpr int kDepth = 16;        // products that are in shared memory at once; there too
constexpr int kWide = 128;        // results side by side
constexpr int kWidePitch = 132;   // there too
constexpr int kMaxKept = 256;
constexpr int kSlots = kMaxKept / 32;  // groups of a lane

// What a thread block works on.
struct Tile {
  Job job;
  Basis basis;
  TopRPlaces places;
  int side, first;       // of the tile's tokens
  int tokens;            // that there are of them
  int room;              // tokens that the page has places for in this tile
  unsigned char* bytes;  // of the side
};

__device__ Tile tile_of(const PackPagesParams& p) {
  const int tiles = (p.page_tokens + kTokens - 1) / kTokens;
  const int tile = blockIdx.x % tiles, side = blockIdx.x / tiles % 2;
  Tile of;
  of.job = job_of(p, blockIdx.x / (2 * tiles));
  of.places = top_r_places(p.top_r, p.page_tokens);
  of.side = side;
  of.first = tile * kTokens;
  of.tokens = min(max(of.job.tokens - of.first, 0), kTokens);
  of.room = min(static_cast<int>(p.page_tokens) - of.first, kTokens);
  if (of.job.packed < 0) return of;
  // All pages of a block need a basis: otherwise none of them is packed.
  const int number = basis_number(p.top_r, of.job.block, p.pages - 1);
  if (number < 0) {
    of.job.packed = -1;
    return of;
  }
  of.basis = basis_at(p.top_r, number, of.job.page, side, p.head_dim);
  of.bytes = static_cast<unsigned char*>(p.packed) + of.job.packed + side * of.places.side;
  return of;
}

// Element 0 of a token's vector in the exact page.
__device__ __forceinline__ int64_t vector_at(const PackPagesParams& p, const Tile& of, int token) {
  const int64_t key = element_of(p, of.job, of.first + token);
  return key + of.side * int64_t{p.source_tokens} * p.head_dim;
}

struct Room {
  float *tokens;  // [depth, kTokenPitch]
  float *part;    // [kDepth, kWidePitch]: of the directions
  float *results; // [kTokens, pitch]
  int pitch;
};

__device__ Room room_of(float* shared, int depth, int width) {
  const int rows = (depth + kDepth - 1) / kDepth * kDepth;
  float* part = shared + rows * kTokenPitch;
  return {shared, part, part + kDepth * kWidePitch, width + 4};
}

// results[token, n] = Σ_k tokens[k, token] · of(k, n), summed in the order of k, where of(k, n) is
// directions[n, k] or, not kTurned, directions[k, n]. Behind `depth` tokens are 0.
template <bool kTurned>
__device__ void multiply(const Room& room, const float* directions, int depth, int width) {
  const int column = threadIdx.x % 32 * 4, token = threadIdx.x / 32 * 4;
  for (int first = 0; first < width; first += kWide) {
    float sums[4][4] = {};
    for (int k0 = 0; k0 < depth; k0 += kDepth) {
      __syncthreads();
      for (int i = threadIdx.x; i < kDepth * kWide; i += kThreads) {
        const int k = kTurned ? i % kDepth : i / kWide, n = kTurned ? i / kDepth : i % kWide;
        const bool inside = k0 + k < depth && first + n < width;
        const int at = kTurned ? (first + n) * depth + k0 + k : (k0 + k) * width + first + n;
        room.part[k * kWidePitch + n] = inside ? directions[at] : 0.0f;
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kDepth; ++k) {
        const auto x4 =
            *reinterpret_cast<const float4*>(room.tokens + (k0 + k) * kTokenPitch + token);
        const auto d4 = *reinterpret_cast<const float4*>(room.part + k * kWidePitch + column);
        const float x[4] = {x4.x, x4.y, x4.z, x4.w}, d[4] = {d4.x, d4.y, d4.z, d4.w};
#pragma unroll
        for (int t = 0; t < 4; ++t) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            sums[t][c] = __fadd_rn(sums[t][c], __fmul_rn(d[c], x[t]));
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int n = first + column + c;
        if (n < width) room.results[(token + t) * room.pitch + n] = sums[t][c];
      }
    }
  }
  __syncthreads();
}

// Bit i of word s: group 32·s + i is kept. The same in all lanes.
struct Bitmap {
  uint32_t words[kSlots];
};

// Of a vector's groups those of the most energy, of equal ones the first; where a number is not
// finite the first of all.
__device__ Bitmap choose(const TopRParams& of, const float* numbers, bool finite) {
  const int lane = threadIdx.x % 32, size = of.group;
  const int groups = of.channels / of.group, wanted = of.kept / of.group;
  uint64_t energies[kSlots];
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const int group = 32 * s + lane;
    double energy = 0;
    for (int i = 0; i < size && group < groups && finite; ++i) {
      const double c = numbers[group * size + i];
      energy = __dadd_rn(energy, __dmul_rn(c, c));
    }
    // Of numbers that are not below 0 the bits have the same order.
    energies[s] = static_cast<uint64_t>(__double_as_longlong(energy));
  }
  uint64_t least = 0;  // so many energies are not below it
  int found = groups;
  for (int bit = 62; bit >= 0 && found != wanted; --bit) {
    const uint64_t higher = least | uint64_t{1} << bit;
    int count = 0;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (32 * s < groups) count += __popc(__ballot_sync(~0u, energies[s] >= higher));
    }
    if (count >= wanted) {
      least = higher;
      found = count;
    }
  }
  int above = 0;
#pragma unroll
  for (int s = 0; s < kSlots; ++s) above += __popc(__ballot_sync(~0u, energies[s] > least));
  Bitmap kept;
  int ties = wanted - above;
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const bool tied = energies[s] == least && 32 * s + lane < groups;
    const uint32_t all = __ballot_sync(~0u, tied);
    const bool first = __popc(all & ((1u << lane) - 1)) < ties;
    kept.words[s] = __ballot_sync(~0u, energies[s] > least || (tied && first));
    ties -= min(__popc(all), max(ties, 0));
  }
  return kept;
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
  const float code = rintf(__fadd_rn(steps, kCodeMiddle));
  return static_cast<uint32_t>(fminf(fmaxf(code, 0.0f), static_cast<float>(kCodes)));
}

// Writes a vector of rotated numbers, by a warp; `kept` is memory for them.
template <typename S>
__device__ void put_vector(const TopRParams& of, const Tile& tile, int token, const float* numbers,
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
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, apart));
  }
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
  const TopRPlaces& at = tile.places;
  const int row = tile.first + token;
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    // Four bytes of a word.
    const int byte = 4 * s + lane;
    if (lane < 4 && byte < at.bitmap) {
      tile.bytes[row * at.bitmap + byte] = bitmap.words[s] >> (8 * lane);
    }
  }
  unsigned char* to = tile.bytes + at.numbers + row * at.row;
  for (int i = lane; i < static_cast<int>(of.bits == 4 ? of.kept / 2 : of.kept); i += 32) {
    if (of.bits == 16) {
      reinterpret_cast<uint16_t*>(to)[i] = stored<S>(of, kept[i], wide);
    } else if (of.bits == 8) {
      to[i] = stored<S>(of, kept[i], wide);
    } else {
      to[i] = stored<S>(of, kept[2 * i], wide) | stored<S>(of, kept[2 * i + 1], wide) << 4;
    }
  }
  if (at.scale > 0 && lane == 0) reinterpret_cast<S*>(tile.bytes + at.scales)[row] = scale;
  __syncwarp();
}

// Zeros in the place of a vector, by a warp.
__device__ void put_nothing(const Tile& tile, int token) {
  const TopRPlaces& at = tile.places;
  const int lane = threadIdx.x % 32, row = tile.first + token;
  for (int i = lane; i < at.bitmap; i += 32) tile.bytes[row * at.bitmap + i] = 0;
  for (int i = lane; i < at.row; i += 32) tile.bytes[at.numbers + row * at.row + i] = 0;
  if (lane < at.scale) tile.bytes[at.scales + row * at.scale + lane] = 0;
}

template <typename C, typename S>
__device__ void pack_tile(const PackPagesParams& p, float* shared) {
  __shared__ float kept[kThreads / 32][kMaxKept];
  __shared__ int odd[kTokens];  // whether a number is not finite
  const Tile tile = tile_of(p);
  if (tile.job.packed < 0) return;
  const int dim = p.head_dim, channels = p.top_r.channels;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Room room = room_of(shared, dim, channels);
  for (int token = warp; token < kTokens; token += kThreads / 32) {
    const bool there = token < tile.tokens;
    const C* from = static_cast<const C*>(p.cache) + (there ? vector_at(p, tile, token) : 0);
    bool finite = true;
    for (int d = lane; d < dim; d += 32) {
      const float x = there ? static_cast<float>(from[d]) : 0.0f;
      finite = finite && isfinite(x);
      room.tokens[d * kTokenPitch + token] = there ? __fsub_rn(x, tile.basis.mean[d]) : 0.0f;
    }
    finite = __all_sync(~0u, finite);
    if (lane == 0) odd[token] = !finite;
  }
  multiply<true>(room, tile.basis.directions, dim, channels);
  for (int token = warp; token < tile.room; token += kThreads / 32) {
    if (token >= tile.tokens) {
      put_nothing(tile, token);
      continue;
    }
    const float* numbers = room.results + token * room.pitch;
    bool finite = odd[token] == 0;
    for (int c = lane; c < channels; c += 32) finite = finite && isfinite(numbers[c]);
    finite = __all_sync(~0u, finite);
    put_vector<S>(p.top_r, tile, token, numbers, finite, kept[warp]);
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
  const uint32_t code = row[i / 2] >> (4 * (i % 2)) & kCodes;
  return __fmul_rn(scale, __fsub_rn(static_cast<float>(code), kCodeMiddle));
}

// Spreads the kept numbers of a token over its channels, by a warp.
template <typename S>
__device__ void spread_vector(const TopRParams& of, const Tile& tile, int token,
                              const Room& room) {
  const TopRPlaces& at = tile.places;
  const int lane = threadIdx.x % 32, row = tile.first + token, size = of.group;
  const int groups = of.channels / of.group, most = of.kept / of.group;
  const float scale =
      at.scale == 0 ? 1.0f
                    : Scales<S>::widen(reinterpret_cast<const S*>(tile.bytes + at.scales)[row]);
  const unsigned char* numbers = tile.bytes + at.numbers + row * at.row;
  int before = 0;
  for (int first = 0; first < groups; first += 32) {
    const int group = first + lane;
    const bool marked = group < groups &&
                        (tile.bytes[row * at.bitmap + group / 8] >> (group % 8) & 1) != 0;
    const uint32_t word = __ballot_sync(~0u, marked);
    const int nth = before + __popc(word & ((1u << lane) - 1));
    for (int i = 0; i < size && marked && nth < most; ++i) {
      room.tokens[(group * size + i) * kTokenPitch + token] =
          number_at(of, numbers, nth * size + i, scale);
    }
    before += __popc(word);
  }
}

template <typename C, typename S>
__device__ void unpack_tile(const PackPagesParams& p, float* shared) {
  const Tile tile = tile_of(p);
  if (tile.job.packed < 0 || tile.tokens == 0) return;
  const int dim = p.head_dim, channels = p.top_r.channels;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Room room = room_of(shared, channels, dim);
  const int rows = (channels + kDepth - 1) / kDepth * kDepth;
  for (int i = threadIdx.x; i < rows * kTokenPitch; i += kThreads) room.tokens[i] = 0.0f;
  __syncthreads();
  for (int token = warp; token < tile.tokens; token += kThreads / 32) {
    spread_vector<S>(p.top_r, tile, token, room);
  }
  multiply<false>(room, tile.basis.directions, channels, dim);
  for (int token = warp; token < tile.tokens; token += kThreads / 32) {
    C* to = static_cast<C*>(p.cache) + vector_at(p, tile, token);
    for (int d = lane; d < dim; d += 32) {
      const float x = room.results[token * room.pitch + d];
      to[d] = static_cast<C>(__fadd_rn(x, tile.basis.mean[d]));
    }
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
    unpack_tile<C, S>(params, shared);                                           \
  }
#define EVERY(SCALES, S)                  \
  KERNELS(f32, float, SCALES, S)          \
  KERNELS(bf16, __nv_bfloat16, SCALES, S) \
  KERNELS(f16, __half, SCALES, S)

EVERY(bf16, __nv_bfloat16)
EVERY(f16, __half)
