// unpack_pages of pages in a basis, into exact ones of 16 bits, whose sums need not run in the
// order of the definition: as near to what vectors stand for as one rounding of these.
//
// The simple version:
//   x = mean + scale · Σ code · direction
//
// What makes it fast:
// 1. A code is a number of at most 8 significant bits, so bf16 has it as it is; a direction is the
//    sum of two numbers in bf16, of which the second is what the first leaves. So the products are
//    those of tensor cores, and what they lose is far less than the rounding of a page's numbers.
// 2. A thread block has the directions of one head and side in shared memory, and goes through the
//    rows with them; rows of a text have the same.
// 3. The bytes of the tile behind the one in hand are on their way while that is multiplied.
// 4. A scale multiplies its vector's sums, and no code. Results leave by 16 bytes a thread.
//
// Launch: [pages · 2, chunks] blocks of 256 threads, of which each takes every chunk-th row. A row
// that points outside either side, or whose packed block has no basis, is skipped, and so is a page
// whose basis has bits that are no planes or too many. Head sizes are multiples of 16, up to 128.

#include "api.h"
#include "bases.cuh"
#include "pack_job.cuh"
#include "planes.cuh"
#include "tensor_core.cuh"
#include "top_r.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTokens = 64;    // of a tile: four times those of a product
constexpr int kMaxDim = 128;   // and channels; also in rust/cuda/src/pack_pages.rs
constexpr int kPitch = kMaxDim + 8;  // numbers between rows: each begins in other banks
constexpr int kHalf = kMaxDim / 2;   // numbers of a vector that a warp has
constexpr int kTokenBytes = kMaxDim / 8 + 2 * kMaxDim;  // a packed vector has at most
constexpr int kWord = 16;            // bytes that come and go at once
using Bf16 = __nv_bfloat16;
static_assert(kThreads == 4 * kTokens, "four threads write a vector");

// In shared memory.
struct Room {
  Bf16 high[kMaxDim][kPitch];  // directions [channels, D]: what bf16 has of them,
  Bf16 low[kMaxDim][kPitch];   // and what it leaves
  Bf16 codes[kTokens][kPitch];  // [tokens, channels]; then results, whatever 16 bits they have
  unsigned char packed[kTokens * kTokenBytes];  // of a tile, each of its parts behind the other
  float scales[kTokens];        // NaN: of a vector that is
  float mean[kMaxDim];
};

// Tokens of a page that a thread block has in hand, a multiple of kTokens behind its first.
struct Tile {
  const unsigned char* page;
  int first, tokens;
};

// Starts the copy of so many bytes, a multiple of kWord from a boundary of as many.
__device__ __forceinline__ void fetch(unsigned char* to, const unsigned char* from, int bytes) {
  for (int i = kWord * threadIdx.x; i < bytes; i += kWord * kThreads) {
    copy_async(shared_address(to + i), from + i, true);
  }
}

__device__ __forceinline__ int padded(int channels) { return (channels + 15) / 16 * 16; }

// Four neighbouring codes of a vector, which bf16 has as they are.
__device__ __forceinline__ void put_codes(Bf16* to, const float (&codes)[4]) {
  *reinterpret_cast<uint2*>(to) =
      make_uint2(pack<Bf16>(codes[0], codes[1]), pack<Bf16>(codes[2], codes[3]));
}

// Top-r pages, whose scales are S.
template <typename S>
class TopR {
 public:
  __device__ TopR(const PackPagesParams& params, int of_side)
      : of(params.top_r), at(top_r_places(params.top_r, params.page_tokens)), side(of_side) {}

  __device__ bool enter(const PackPagesParams& p, int number, int page) {
    mean = basis_at(p.bases, number, page, side, p.head_dim);
    directions = mean + p.head_dim;
    return true;
  }

  __device__ int channels() const { return of.channels; }

  // Starts to fetch bitmaps, numbers and scales of so many tokens of a page from a tile's first on.
  __device__ void fetch_tile(const Tile& tile, int tokens, Room& room) const {
    const unsigned char* from = tile.page + side * at.side;
    unsigned char* numbers = room.packed + kTokens * at.bitmap;
    unsigned char* scales = numbers + kTokens * at.row;
    fetch(room.packed, from + tile.first * at.bitmap, tokens * at.bitmap);
    fetch(numbers, from + at.numbers + tile.first * at.row, tokens * at.row);
    fetch(scales, from + at.scales + tile.first * at.scale, tokens * at.scale);
  }

  // The codes of a tile's tokens, 0 of what was not kept, and their scales.
  __device__ void spread(const Tile& tile, Room& room) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned char* numbers = room.packed + kTokens * at.bitmap;
    const S* scales = reinterpret_cast<const S*>(numbers + kTokens * at.row);
#pragma unroll 2
    for (int token = warp; token < tile.tokens; token += kWarps) {
      const auto put = [&](int channel, const float (&four)[4], uint32_t) {
        put_codes(&room.codes[token][channel], four);
      };
      spread_numbers(of, room.packed + token * at.bitmap, numbers + token * at.row,
                     padded(of.channels), put);
      if (lane == 0) room.scales[token] = at.scale == 0 ? 1.0f : Scales<S>::widen(scales[token]);
    }
  }

  const float *mean, *directions;

 private:
  const TopRParams& of;
  const TopRPlaces at;
  const int side;
};

class Planes {
  static constexpr int kFlagBytes = 64;  // of pages of up to 256 tokens

 public:
  __device__ Planes(const PackPagesParams& params, int of_side)
      : tokens(params.page_tokens), side(of_side) {}

  __device__ bool enter(const PackPagesParams& p, int number, int page) {
    const int dim = p.head_dim;
    const PlanesBasis keys = planes_basis(p.bases, number, page, kKeySide, dim);
    const PlanesBasis values = planes_basis(p.bases, number, page, kValueSide, dim);
    const PlaneWidths of_keys = widths_at(keys.bits, dim), of_values = widths_at(values.bits, dim);
    const PlanesBasis& basis = side == kKeySide ? keys : values;
    own = side == kKeySide ? of_keys : of_values;
    places = plane_places(of_keys, own, side, tokens);
    mean = basis.mean;
    directions = basis.steps;
    return have_room(p.bases, of_keys, of_values);
  }

  __device__ int channels() const { return own.channels(); }

  // Starts to fetch the flags of a tile's page, and the planes of so many tokens from its first on.
  __device__ void fetch_tile(const Tile& tile, int many, Room& room) const {
    fetch(room.packed, tile.page, plane_flag_bytes(tokens));
    unsigned char* to = room.packed + kFlagBytes;
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      const int row = own.row(plane);
      fetch(to, tile.page + places.starts[plane] + tile.first * row, many * row);
      to += kTokens * row;
    }
  }

  // The codes of a tile's tokens, around 0.
  __device__ void spread(const Tile& tile, Room& room) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, channel = 4 * lane;
    const int of_eight = kFlagBytes, of_four = of_eight + kTokens * own.row(0);
    const FourChannels four(own, {of_eight, of_four, of_four + kTokens * own.row(1)}, channel);
    const int largest = largest_code(four.bits);
    const float middle = 0.5f * static_cast<float>(largest);
#pragma unroll 2
    for (int token = warp; token < tile.tokens; token += kWarps) {
      const int row = tile.first + token;
      const uint32_t codes = four.load(four.at(room.packed, token));
      float steps[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        steps[e] = static_cast<float>(codes >> (four.bits * e) & largest) - middle;
      }
      if (channel < padded(channels())) put_codes(&room.codes[token][channel], steps);
      if (lane == 0) {
        const bool nan = (room.packed[places.flags + row / 8] >> (row % 8) & 1) != 0;
        room.scales[token] = nan ? NAN : 1.0f;
      }
    }
  }

  const float *mean, *directions;

 private:
  const int tokens, side;
  PlaneWidths own;
  PlanePlaces places;
};

// The mean and the directions of a basis, 0 behind the last of them.
__device__ void take_basis(const float* mean, const float* directions, int channels, int dim,
                           Room& room) {
  for (int i = threadIdx.x; i < dim; i += kThreads) room.mean[i] = mean[i];
  for (int i = threadIdx.x; i < padded(channels) * dim; i += kThreads) {
    const int c = i / dim, d = i % dim;
    const float x = c < channels ? directions[i] : 0.0f;
    const Bf16 high = __float2bfloat16_rn(x);
    room.high[c][d] = high;
    room.low[c][d] = __float2bfloat16_rn(x - __bfloat162float(high));
  }
}

// Codes by directions: of 16 tokens a half of their numbers, eight side by side.
__device__ void multiply(const Room& room, int channels, int dim, float (&sums)[kHalf / 8][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = warp % 4 * 16, begin = warp / 4 * kHalf;
  // Lane i says where row i % 8 of matrix i / 8 lies.
  const int row = lane % 8 + lane / 8 % 2 * 8, aside = lane / 16 * 8;
#pragma unroll 1
  for (int k = 0; k < padded(channels); k += 16) {
    uint32_t a[4];
    load_matrices(a, shared_address(&room.codes[token + row][k + aside]));
#pragma unroll
    for (int n = 0; n < kHalf; n += 16) {
      if (begin + n >= dim) break;
      uint32_t high[4], low[4];
      load_matrices_transposed(high, shared_address(&room.high[k + row][begin + n + aside]));
      load_matrices_transposed(low, shared_address(&room.low[k + row][begin + n + aside]));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float(&sum)[4] = sums[n / 8 + half];
        multiply_add<Bf16>(sum, a, low[2 * half], low[2 * half + 1]);
        multiply_add<Bf16>(sum, a, high[2 * half], high[2 * half + 1]);
      }
    }
  }
}

// Puts what a tile's vectors stand for where their codes were.
template <typename C>
__device__ void stage(int dim, Room& room, const float (&sums)[kHalf / 8][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = warp / 4 * kHalf + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = warp % 4 * 16 + 8 * half + lane / 4;
    const float scale = room.scales[token];
#pragma unroll
    for (int n = 0; n < kHalf / 8; ++n) {
      const int d = begin + 8 * n;
      if (d >= dim) break;
      const float low = __fmaf_rn(scale, sums[n][2 * half], room.mean[d]);
      const float high = __fmaf_rn(scale, sums[n][2 * half + 1], room.mean[d + 1]);
      *reinterpret_cast<uint32_t*>(&room.codes[token][d]) = pack<C>(low, high);
    }
  }
}

// Writes a tile's vectors of 16-bit numbers, each by four threads.
__device__ void write(const PackPagesParams& p, const Job& job, const Tile& tile, int side,
                      const Room& room) {
  const int dim = p.head_dim, token = threadIdx.x / 4;
  if (token >= tile.tokens) return;
  Bf16* to = static_cast<Bf16*>(p.cache) + side * int64_t{p.source_tokens} * dim +
             element_of(p, job, tile.first + token);
  for (int d = threadIdx.x % 4 * 8; d < dim; d += 32) {
    *reinterpret_cast<uint4*>(to + d) = *reinterpret_cast<const uint4*>(&room.codes[token][d]);
  }
}

// A tile of a page of one of the rows that a thread block goes through.
struct Place {
  int row, basis;
  Job job;
  Tile tile;
};

// The first tile from a row on; its row is none of the table's where there is no other.
__device__ Place tile_from(const PackPagesParams& p, int row, int page) {
  for (; row < static_cast<int>(p.rows); row += gridDim.y) {
    const Job job = job_of(p, row, page);
    // All pages of a block need a basis: otherwise none of them is packed.
    const int basis = job.packed < 0 ? -1 : basis_number(p.bases, job.block, p.pages - 1);
    const auto* bytes = static_cast<const unsigned char*>(p.packed) + job.packed;
    if (basis >= 0) return {row, basis, job, {bytes, 0, min(job.tokens, kTokens)}};
  }
  return {row, -1, {}, {}};
}

__device__ Place tile_behind(const PackPagesParams& p, const Place& at, int page) {
  const int first = at.tile.first + kTokens;
  if (first >= at.job.tokens) return tile_from(p, at.row + gridDim.y, page);
  return {at.row, at.basis, at.job, {at.tile.page, first, min(at.job.tokens - first, kTokens)}};
}

template <typename C, typename Format>
__device__ void restore(const PackPagesParams& p, Room& room) {
  const int page = blockIdx.x / 2, side = blockIdx.x % 2, dim = p.head_dim;
  const int rows = p.rows;
  Format format(p, side);
  int held = -1;  // the basis that is in shared memory
  bool sound = false, under_way = false;
  const auto begin = [&](const Tile& tile) {
    const int left = static_cast<int>(p.page_tokens) - tile.first;
    format.fetch_tile(tile, min(left, kTokens), room);
  };
  for (Place at = tile_from(p, blockIdx.y, page), next; at.row < rows; at = next) {
    next = tile_behind(p, at, page);
    if (at.basis != held) {
      sound = format.enter(p, at.basis, page);
      if (sound) take_basis(format.mean, format.directions, format.channels(), dim, room);
      held = at.basis;
    }
    if (!sound) continue;
    if (!under_way) begin(at.tile);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    format.spread(at.tile, room);
    __syncthreads();
    under_way = next.row < rows && next.basis == held;
    if (under_way) begin(next.tile);
    float sums[kHalf / 8][4] = {};
    multiply(room, format.channels(), dim, sums);
    __syncthreads();
    stage<C>(dim, room, sums);
    __syncthreads();
    write(p, at.job, at.tile, side, room);
  }
}

}  // namespace

// Names as rust/cuda/src/pack_pages.rs builds them: the cache's elements, then the scales' of top-r
// pages.
#define KERNEL(NAME, C, ...)                                            \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)             \
      restore_##NAME(const __grid_constant__ PackPagesParams params) {  \
    extern __shared__ __align__(16) unsigned char shared[];             \
    restore<C, __VA_ARGS__>(params, *reinterpret_cast<Room*>(shared));  \
  }

KERNEL(top_r_bf16_bf16, __nv_bfloat16, TopR<__nv_bfloat16>)
KERNEL(top_r_bf16_f16, __nv_bfloat16, TopR<__half>)
KERNEL(top_r_f16_bf16, __half, TopR<__nv_bfloat16>)
KERNEL(top_r_f16_f16, __half, TopR<__half>)
KERNEL(planes_bf16, __nv_bfloat16, Planes)
KERNEL(planes_f16, __half, Planes)
