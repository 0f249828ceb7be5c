// Tiles of pages that are packed in a basis: a thread block has some tokens of one side of a page.
// And vectors out of it, by products with rows of the basis in the order of the definition.
#pragma once

#include "api.h"
#include "bases.cuh"
#include "pack_job.cuh"

constexpr int kThreads = 256;
constexpr int kTokens = 32;       // of a block that unpacks; also in rust/cuda/src/pack_pages.rs
constexpr int kTokenPitch = 36;   // floats between channels of a tile; there too
constexpr int kDepth = 16;        // products that are in shared memory at once; there too
constexpr int kWide = 128;        // results side by side
constexpr int kWidePitch = 132;   // there too

// What a thread block works on.
struct Tile {
  Job job;
  int number;        // of the basis
  int side, first;   // of the tile's tokens
  int tokens;        // that there are of them
  int room;          // tokens that the page has places for in this tile
};

// A tile of so many tokens, of one side of a row's page.
template <int kOfTile>
__device__ __forceinline__ Tile tile_of(const PackPagesParams& p, int row, int page, int side,
                                        int tile) {
  Tile of;
  of.job = job_of(p, row, page);
  of.side = side;
  of.first = tile * kOfTile;
  of.tokens = min(max(of.job.tokens - of.first, 0), kOfTile);
  of.room = min(static_cast<int>(p.page_tokens) - of.first, kOfTile);
  of.number = -1;
  if (of.job.packed < 0) {
    of.tokens = 0;
    return of;
  }
  // All pages of a block need a basis: otherwise none of them is packed.
  of.number = basis_number(p.bases, of.job.block, p.pages - 1);
  if (of.number < 0) of.job.packed = -1, of.tokens = 0;
  return of;
}

// What a thread block unpacks.
__device__ __forceinline__ Tile unpacked_tile(const PackPagesParams& p) {
  const int tiles = (p.page_tokens + kTokens - 1) / kTokens, number = blockIdx.x / tiles;
  const int page = number / 2;
  return tile_of<kTokens>(p, page / p.pages, page % p.pages, number % 2, blockIdx.x % tiles);
}

// Element 0 of a token's vector in the exact page.
__device__ __forceinline__ int64_t vector_at(const PackPagesParams& p, const Tile& of,
                                             int token) {
  const int64_t key = element_of(p, of.job, of.first + token);
  return key + of.side * int64_t{p.source_tokens} * p.head_dim;
}

struct Room {
  float *tokens;  // [depth, kTokenPitch]
  float *part;    // [kDepth, kWidePitch]: of the directions
  float *results; // [kTokens, pitch]
  int pitch;
};

__device__ __forceinline__ Room room_of(float* shared, int depth, int width) {
  const int rows = (depth + kDepth - 1) / kDepth * kDepth;
  float* part = shared + rows * kTokenPitch;
  return {shared, part, part + kDepth * kWidePitch, width + 4};
}

// results[token, n] = Σ_k tokens[k, token] · directions[k, n], summed in the order of k. Behind
// `depth` tokens are 0.
__device__ __forceinline__ void multiply(const Room& room, const float* directions, int depth,
                                         int width) {
  const int column = threadIdx.x % 32 * 4, token = threadIdx.x / 32 * 4;
  for (int first = 0; first < width; first += kWide) {
    float sums[4][4] = {};
    for (int k0 = 0; k0 < depth; k0 += kDepth) {
      __syncthreads();
      for (int i = threadIdx.x; i < kDepth * kWide; i += kThreads) {
        const int k = i / kWide, n = i % kWide;
        const bool inside = k0 + k < depth && first + n < width;
        room.part[k * kWidePitch + n] = inside ? directions[(k0 + k) * width + first + n] : 0.0f;
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

// The numbers of tokens along so many directions, into exact pages: 0 behind these, NaN where
// is_nan(token).
template <typename C, typename IsNan>
__device__ void write_numbers(const PackPagesParams& p, const Tile& tile, const Room& room,
                              int channels, IsNan is_nan) {
  const int dim = p.head_dim, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __syncthreads();
  for (int token = warp; token < tile.tokens; token += kThreads / 32) {
    C* to = static_cast<C*>(p.cache) + vector_at(p, tile, token);
    const bool nan = is_nan(token);
    for (int d = lane; d < dim; d += 32) {
      const float x = d < channels ? room.tokens[d * kTokenPitch + token] : 0.0f;
      to[d] = static_cast<C>(nan ? NAN : x);
    }
  }
}

// Zeros where numbers of `channels` directions are then put, with which `write_vectors` makes
// vectors.
__device__ __forceinline__ void clear_tokens(const Room& room, int channels) {
  const int rows = (channels + kDepth - 1) / kDepth * kDepth;
  for (int i = threadIdx.x; i < rows * kTokenPitch; i += kThreads) room.tokens[i] = 0.0f;
  __syncthreads();
}

// The mean and what the numbers along directions [channels, D] add to it, into exact pages; NaN
// where is_nan(token).
template <typename C, typename IsNan>
__device__ void write_vectors(const PackPagesParams& p, const Tile& tile, const Room& room,
                              const float* mean, const float* directions, int channels,
                              IsNan is_nan) {
  const int dim = p.head_dim, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  multiply(room, directions, channels, dim);
  for (int token = warp; token < tile.tokens; token += kThreads / 32) {
    C* to = static_cast<C*>(p.cache) + vector_at(p, tile, token);
    const bool nan = is_nan(token);
    for (int d = lane; d < dim; d += 32) {
      const float x = room.results[token * room.pitch + d];
      to[d] = static_cast<C>(nan ? NAN : __fadd_rn(x, mean[d]));
    }
  }
}
