// Numbers of a tile's vectors in a basis, to the bits of rust/core/src/ops/fixed_point.rs.
//
// The simple version:
//   n = Σ integer of the row · integer of the vector, in 64 bits
//   number = n · power of the row · power of the vector
//
// What makes it fast:
// 1. Sums of integers are the same in any order. So tensor cores multiply them byte by byte: two
//    bytes of a row's integers by three of a vector's.
// 2. A warp has the bytes of its rows in registers and goes through a text's pages with them, where
//    head sizes are up to 128. Of larger heads it rounds rows anew for each tile.
// 3. The vectors of the next tile are on their way while those in hand are packed.
#pragma once

#include "pack_tiles.cuh"
#include "tensor_core.cuh"
#include "vector.cuh"

constexpr int kPackTokens = 64;  // of a tile; also in rust/cuda/src/pack_pages.rs
constexpr int kVectorBytes = 3;  // of an integer; there too
constexpr int kStep = 32;        // channels of a product; there too
constexpr int kGap = 16;         // bytes between vectors, which begin in other banks; there too
constexpr int kRowBits = 15;     // below the sign, as the definition has them
constexpr int kVectorBits = 23;
constexpr int kLeastExponent = -104;
constexpr int kPackWarps = kThreads / 32;
constexpr int kRows = 8;       // of a basis, that a product has
constexpr int kProducts = 2;   // products that a warp makes of the same vectors
static_assert(kThreads == 4 * kPackTokens, "four threads round a vector");

// In shared memory, for heads of up to 32 · kSteps channels.
template <typename C, int kSteps>
struct NumbersRoom {
  unsigned char* exact;  // [kPackTokens, exact_pitch]: vectors of elements C
  unsigned char* bytes;  // [kVectorBytes, kPackTokens, byte_pitch]: integers, from the highest byte
  float* mean;           // [kSteps * kStep]
  float* powers;         // [kPackTokens]; NaN of vectors that are not finite
  float* numbers;        // [kPackTokens, pitch]
  int exact_pitch, byte_pitch, pitch;

  __device__ NumbersRoom(unsigned char* shared, int dim)
      : exact_pitch(dim * sizeof(C) + kGap),
        byte_pitch((dim + kStep - 1) / kStep * kStep + kGap),
        pitch((dim + kStep - 1) / kStep * kStep + 4) {
    exact = shared;
    bytes = exact + kPackTokens * exact_pitch;
    mean = reinterpret_cast<float*>(bytes + kVectorBytes * kPackTokens * byte_pitch);
    powers = mean + kSteps * kStep;
    numbers = powers + kPackTokens;
  }
};

// Bits of a number's size, which have its order.
__device__ __forceinline__ uint32_t size_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFF; }

template <int N>
__device__ __forceinline__ uint32_t largest_size(const float (&x)[N][4]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) largest = max(largest, size_bits(x[i][e]));
  }
  // Of the four lanes that have a vector, or a row.
  largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
  return max(largest, __shfl_xor_sync(~0u, largest, 2));
}

// What the integers of so many bits stand for in numbers of which the largest has this size, and
// what makes numbers integers; NaN where it is not finite.
struct Power {
  float one, inverse;

  __device__ Power(uint32_t largest, int bits) {
    const int exponent = max(static_cast<int>(largest >> 23) - 127, kLeastExponent) - (bits - 1);
    const bool finite = largest < 0x7F800000;
    one = finite ? __int_as_float((127 + exponent) << 23) : NAN;
    inverse = finite ? __int_as_float((127 - exponent) << 23) : 0.0f;
  }
};

// Integers of four numbers, of which byte b of each makes word b.
template <int kBits>
struct FourIntegers {
  int of[4];

  __device__ FourIntegers(const float (&x)[4], const Power& power) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Of what is not finite the integers are not read.
      of[i] = min(__float2int_rn(__fmul_rn(x[i], power.inverse)), (1 << kBits) - 1);
    }
  }
  __device__ uint32_t word(int byte) const {
    const uint32_t pick = byte | (byte + 4) << 4;
    return __byte_perm(__byte_perm(of[0], of[1], pick), __byte_perm(of[2], of[3], pick), 0x5410);
  }
};

// Starts to bring a tile's vectors, each by four threads.
template <typename C, int kSteps>
__device__ void fetch_vectors(const PackPagesParams& p, const Tile& tile,
                              const NumbersRoom<C, kSteps>& room) {
  const int token = threadIdx.x / 4, bytes = p.head_dim * sizeof(C);
  if (token < tile.tokens) {
    const C* vector = static_cast<const C*>(p.cache) + vector_at(p, tile, token);
    const auto* from = reinterpret_cast<const unsigned char*>(vector);
    const uint32_t to = shared_address(room.exact + token * room.exact_pitch);
    for (int at = threadIdx.x % 4 * 16; at < bytes; at += 64) copy_async(to + at, from + at, true);
  }
  commit_copies();
}

// Rounds a tile's vectors without their mean, each by four threads. What is behind the tile's last
// token is rounded too, and not looked at.
template <typename C, int kSteps>
__device__ void round_vectors(const NumbersRoom<C, kSteps>& room, int dim) {
  const int token = threadIdx.x / 4, first = threadIdx.x % 4 * 4;
  const C* exact = reinterpret_cast<const C*>(room.exact + token * room.exact_pitch);
  float centred[2 * kSteps][4] = {};
#pragma unroll
  for (int i = 0; i < 2 * kSteps; ++i) {
    const int d = first + 16 * i;
    if (d < dim) {
      const auto x = load<C, 4>(exact + d);
      const auto mean = load<float, 4>(room.mean + d);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        centred[i][e] = __fsub_rn(static_cast<float>(x.at[e]), mean.at[e]);
      }
    }
  }
  const Power power(largest_size(centred), kVectorBits);
#pragma unroll
  for (int i = 0; i < 2 * kSteps; ++i) {
    const int d = first + 16 * i;
    if (d < room.byte_pitch - kGap) {
      const FourIntegers<kVectorBits> four(centred[i], power);
#pragma unroll
      for (int b = 0; b < kVectorBytes; ++b) {
        unsigned char* to = room.bytes + (b * kPackTokens + token) * room.byte_pitch + d;
        *reinterpret_cast<uint32_t*>(to) = four.word(kVectorBytes - 1 - b);
      }
    }
  }
  if (first == 0) room.powers[token] = power.one;
}

// The bytes of eight rows of a basis as a lane has them for products: of row lane / 4.
template <int kSteps>
struct RowBytes {
  uint32_t high[2 * kSteps], low[2 * kSteps];
  float powers[2];  // of rows lane % 4 · 2 and + 1

  __device__ void round(const float (&numbers)[2 * kSteps][4]) {
    const int lane = threadIdx.x % 32;
    const Power power(largest_size(numbers), kRowBits);
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      const FourIntegers<kRowBits> four(numbers[i], power);
      high[i] = four.word(1);
      low[i] = four.word(0);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) powers[i] = __shfl_sync(~0u, power.one, 4 * (lane % 4 * 2 + i));
  }
};

// Brings a lane's numbers of eight rows of so many, from the first one on; 0 behind the last.
template <int kSteps>
__device__ __forceinline__ void load_rows(float (&numbers)[2 * kSteps][4], const float* rows,
                                          int first, int count, int dim) {
  const int lane = threadIdx.x % 32, row = first + lane / 4, begin = lane % 4 * 4;
#pragma unroll
  for (int i = 0; i < 2 * kSteps; ++i) {
    const int d = begin + 16 * i;
    Pack<float, 4> four = {};
    if (row < count && d < dim) four = load<float, 4>(rows + row * dim + d);
#pragma unroll
    for (int e = 0; e < 4; ++e) numbers[i][e] = four.at[e];
  }
}

// Rounds the rows that a warp multiplies with together: all are on their way before one is looked
// at, but for large heads, of which registers do not hold them.
template <int kSteps>
__device__ __forceinline__ void take_rows(RowBytes<kSteps> (&bytes)[kProducts], const float* rows,
                                          int first, int count, int dim) {
  constexpr int kAtOnce = kSteps > 4 ? 1 : kProducts;
#pragma unroll
  for (int r0 = 0; r0 < kProducts; r0 += kAtOnce) {
    float numbers[kAtOnce][2 * kSteps][4];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      load_rows<kSteps>(numbers[r], rows, first + kRows * kPackWarps * (r0 + r), count, dim);
    }
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) bytes[r0 + r].round(numbers[r]);
  }
}

// Sums of products by how far their bytes lie from the lowest, of 16 vectors and 8 rows.
struct ByteSums {
  int of[kVectorBytes + 1][4] = {};

  template <int kSteps>
  __device__ void add(const uint32_t (&vectors)[kVectorBytes][4], const RowBytes<kSteps>& rows,
                      int step) {
    const uint32_t high[2] = {rows.high[2 * step], rows.high[2 * step + 1]};
    const uint32_t low[2] = {rows.low[2 * step], rows.low[2 * step + 1]};
    multiply_bytes<true, true>(of[3], vectors[0], high[0], high[1]);
    multiply_bytes<true, false>(of[2], vectors[0], low[0], low[1]);
    multiply_bytes<false, false>(of[1], vectors[1], low[0], low[1]);
    multiply_bytes<false, false>(of[0], vectors[2], low[0], low[1]);
    multiply_bytes<false, true>(of[2], vectors[1], high[0], high[1]);
    multiply_bytes<false, true>(of[1], vectors[2], high[0], high[1]);
  }

  __device__ float sum(int e) const {
    const int64_t all = ((int64_t{of[3][e]} * 256 + of[2][e]) * 256 + of[1][e]) * 256 + of[0][e];
    return __ll2float_rn(all);
  }
};

// Products of a tile's vectors with a warp's rows, of which the first is row `first`.
template <typename C, int kSteps>
__device__ void multiply_tile(const NumbersRoom<C, kSteps>& room, int tokens, int first,
                              const RowBytes<kSteps> (&rows)[kProducts]) {
  const int lane = threadIdx.x % 32, steps = (room.byte_pitch - kGap) / kStep;
#pragma unroll 1
  for (int token = 0; token < tokens; token += 16) {
    ByteSums sums[kProducts];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step >= steps) break;
      const int at = (token + lane % 16) * room.byte_pitch + kStep * step + lane / 16 * 16;
      uint32_t vectors[kVectorBytes][4];
#pragma unroll
      for (int b = 0; b < kVectorBytes; ++b) {
        load_matrices(vectors[b],
                      shared_address(room.bytes + b * kPackTokens * room.byte_pitch + at));
      }
#pragma unroll
      for (int r = 0; r < kProducts; ++r) sums[r].add(vectors, rows[r], step);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int of = token + 8 * half + lane / 4;
      const float power = room.powers[of];
#pragma unroll
      for (int r = 0; r < kProducts; ++r) {
        const int row = first + kRows * kPackWarps * r + lane % 4 * 2;
        float number[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float sum = sums[r].sum(2 * half + i);
          number[i] = __fmul_rn(__fmul_rn(sum, rows[r].powers[i]), power);
        }
        if (row + 1 < room.pitch) {
          *reinterpret_cast<float2*>(room.numbers + of * room.pitch + row) =
              make_float2(number[0], number[1]);
        }
      }
    }
  }
}

// What numbers are along: the mean [D] and rows [count, D] of one side of a page's basis.
struct Rows {
  const float *mean, *rows;
  int count;
};

// Packs a block's part of a launch: one side of a page of every gridDim.y-th row. `Format` has the
// elements C, kSteps, and the functions
//   bool enter(number, Rows&): of a basis, by all threads; false: its pages are not packed
//   void put(tile, room): writes what the numbers of a tile's tokens are packed as
template <typename Format>
__device__ void pack_tiles(const PackPagesParams& p, Format format, unsigned char* shared) {
  constexpr int kSteps = Format::kSteps;
  constexpr bool kHeld = kRows * kPackWarps * kProducts >= kStep * kSteps;
  const int dim = p.head_dim, first = kRows * (threadIdx.x / 32);
  const NumbersRoom<typename Format::Element, kSteps> room(shared, dim);
  const int tiles = (p.page_tokens + kPackTokens - 1) / kPackTokens;
  int row = blockIdx.y, nth = 0;  // of the next tile
  const auto next_tile = [&] {
    const Tile tile = tile_of<kPackTokens>(p, row, blockIdx.x / 2, blockIdx.x % 2, nth);
    if (++nth == tiles) nth = 0, row += gridDim.y;
    fetch_vectors(p, tile, room);
    return tile;
  };
  Tile next = next_tile();
  RowBytes<kSteps> bytes[kProducts];
  Rows rows = {};
  int entered = -1;
  bool sound = false;
#pragma unroll 1
  for (bool more = true; more;) {
    const Tile tile = next;
    const bool there = tile.job.packed >= 0;
    if (there && tile.number != entered) {
      entered = tile.number;
      sound = format.enter(entered, rows);
      for (int d = threadIdx.x; d < dim; d += kThreads) room.mean[d] = rows.mean[d];
      if constexpr (kHeld) take_rows(bytes, rows.rows, first, rows.count, dim);
    }
    wait_for_copies<0>();
    __syncthreads();
    round_vectors(room, dim);
    __syncthreads();
    more = row < static_cast<int>(p.rows);
    if (more) next = next_tile();
    if (!there || !sound) continue;
    if constexpr (kHeld) {
      if (first < rows.count) multiply_tile(room, tile.tokens, first, bytes);
    } else {
#pragma unroll 1
      for (int at = first; at < rows.count; at += kRows * kPackWarps * kProducts) {
        take_rows(bytes, rows.rows, at, rows.count, dim);
        multiply_tile(room, tile.tokens, at, bytes);
      }
    }
    __syncthreads();
    format.put(tile, room);
  }
}
