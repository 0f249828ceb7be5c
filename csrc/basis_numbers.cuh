// Numbers of a tile's vectors in a basis, to the bits of rust/core/src/ops/fixed_point.rs.
//
// The simple version:
//   n = Σ integer of the row · integer of the vector, in 64 bits
//   number = n · power of the row · power of the vector
//
// What makes it fast: sums of integers are the same in any order. So tensor cores multiply them
// byte by byte: two bytes of a row's integers, which the warp that has the row rounds in its
// registers, by three of a vector's, which lie in shared memory.
#pragma once

#include "pack_tiles.cuh"
#include "tensor_core.cuh"
#include "vector.cuh"

constexpr int kPackTokens = 64;  // of a thread block; also in rust/cuda/src/pack_pages.rs
constexpr int kVectorBytes = 3;  // of an integer; there too
constexpr int kStep = 32;        // channels of a product; there too
constexpr int kByteGap = 16;     // between tokens, whose rows begin in other banks; there too
constexpr int kRowBits = 15;     // below the sign, as the definition has them
constexpr int kVectorBits = 23;
constexpr int kLeastExponent = -104;
constexpr int kMaxSteps = 8;  // of the largest head size

struct NumbersRoom {
  unsigned char* bytes;  // [kVectorBytes, kPackTokens, byte_pitch], the highest first
  float* numbers;        // [kPackTokens, pitch]
  float* powers;         // [kPackTokens]; NaN of vectors that are not finite
  int steps, byte_pitch, pitch;

  __device__ NumbersRoom(float* shared, int dim, int channels)
      : steps((dim + kStep - 1) / kStep),
        byte_pitch(steps * kStep + kByteGap),
        pitch((channels + 7) / 8 * 8 + 4) {
    bytes = reinterpret_cast<unsigned char*>(shared);
    numbers = shared + kVectorBytes * kPackTokens * byte_pitch / 4;
    powers = numbers + kPackTokens * pitch;
  }
};

// Bits of a number's size, which have its order.
__device__ __forceinline__ uint32_t size_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFF; }

// What the integers of so many bits stand for in numbers of which the largest has this size: 2 to
// the exponent, times 1; NaN where it is not finite.
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

__device__ __forceinline__ uint32_t size_of_four(const float (&x)[4]) {
  return max(max(size_bits(x[0]), size_bits(x[1])), max(size_bits(x[2]), size_bits(x[3])));
}

// Rounds the vectors of a tile without their mean, a warp each; zeros where there is no token.
template <typename C>
__device__ void round_vectors(const PackPagesParams& p, const Tile& tile, const NumbersRoom& room,
                              const float* mean) {
  const int dim = p.head_dim, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kParts = kMaxSteps * kStep / 128;
#pragma unroll 2
  for (int token = warp; token < kPackTokens; token += kThreads / 32) {
    const bool there = token < tile.tokens;
    const C* from = static_cast<const C*>(p.cache) + (there ? vector_at(p, tile, token) : 0);
    float centred[kParts][4] = {};
    uint32_t largest = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int d = 128 * part + 4 * lane;
      if (d < dim && there) {
        const auto x = load<C, 4>(from + d);
        const auto of_mean = load<float, 4>(mean + d);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          centred[part][i] = __fsub_rn(static_cast<float>(x.at[i]), of_mean.at[i]);
        }
        largest = max(largest, size_of_four(centred[part]));
      }
    }
    const Power power(__reduce_max_sync(~0u, largest), kVectorBits);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int d = 128 * part + 4 * lane;
      if (d < kStep * room.steps) {
        const FourIntegers<kVectorBits> four(centred[part], power);
#pragma unroll
        for (int b = 0; b < kVectorBytes; ++b) {
          unsigned char* to = room.bytes + (b * kPackTokens + token) * room.byte_pitch + d;
          *reinterpret_cast<uint32_t*>(to) = four.word(kVectorBytes - 1 - b);
        }
      }
    }
    if (lane == 0) room.powers[token] = power.one;
  }
}

// c += a b, with a 16 × 32, b 32 × 8 bytes, of which some have a sign.
template <bool kSignedA, bool kSignedB>
__device__ __forceinline__ void multiply_bytes(int (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
#define MULTIPLY(A, B)                                                                          \
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." A "." B                                 \
               ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"         \
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (kSignedA && kSignedB) MULTIPLY("s8", "s8");
  if constexpr (kSignedA && !kSignedB) MULTIPLY("s8", "u8");
  if constexpr (!kSignedA && kSignedB) MULTIPLY("u8", "s8");
  if constexpr (!kSignedA && !kSignedB) MULTIPLY("u8", "u8");
#undef MULTIPLY
}

// The bytes of eight rows of a basis as a lane has them for products: of row lane / 4.
struct RowBytes {
  uint32_t high[2 * kMaxSteps], low[2 * kMaxSteps];
  float power;  // of that row

  __device__ RowBytes(const float* row, int dim, int steps) {
    const int first = threadIdx.x % 4 * 4;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 2 * kMaxSteps; ++i) {
      if (i < 2 * steps) {
        const auto four = four_of(row, first + 16 * i, dim);
        largest = max(largest, size_of_four(four.at));
      }
    }
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
    const Power of_row(largest, kRowBits);
    power = of_row.one;
#pragma unroll
    for (int i = 0; i < 2 * kMaxSteps; ++i) {
      if (i < 2 * steps) {
        const FourIntegers<kRowBits> four(four_of(row, first + 16 * i, dim).at, of_row);
        high[i] = four.word(1);
        low[i] = four.word(0);
      }
    }
  }

 private:
  // Zeros behind the last channel, and of a row that is none.
  static __device__ Pack<float, 4> four_of(const float* row, int d, int dim) {
    if (row != nullptr && d < dim) return load<float, 4>(row + d);
    return {};
  }
};

// Sums of products by how far their bytes lie from the lowest, of 16 vectors and 8 rows.
struct ByteSums {
  int of[kVectorBytes + 1][4] = {};

  __device__ void add(const NumbersRoom& room, int first, int step, const RowBytes& rows) {
    const int lane = threadIdx.x % 32;
    const int row = first + lane % 16, column = kStep * step + lane / 16 * 16;
    uint32_t high[4], middle[4], low[4];
    const auto bring = [&](uint32_t (&to)[4], int b) {
      load_matrices(to, shared_address(room.bytes + (b * kPackTokens + row) * room.byte_pitch +
                                       column));
    };
    bring(high, 0), bring(middle, 1), bring(low, 2);
    const uint32_t rows_high[2] = {rows.high[2 * step], rows.high[2 * step + 1]};
    const uint32_t rows_low[2] = {rows.low[2 * step], rows.low[2 * step + 1]};
    multiply_bytes<true, true>(of[3], high, rows_high[0], rows_high[1]);
    multiply_bytes<true, false>(of[2], high, rows_low[0], rows_low[1]);
    multiply_bytes<false, true>(of[2], middle, rows_high[0], rows_high[1]);
    multiply_bytes<false, false>(of[1], middle, rows_low[0], rows_low[1]);
    multiply_bytes<false, true>(of[1], low, rows_high[0], rows_high[1]);
    multiply_bytes<false, false>(of[0], low, rows_low[0], rows_low[1]);
  }

  __device__ float sum(int e) const {
    const int64_t all = ((int64_t{of[3][e]} * 256 + of[2][e]) * 256 + of[1][e]) * 256 + of[0][e];
    return __ll2float_rn(all);
  }
};

// Numbers of a tile's vectors along so many rows of a basis [channels, D]; by all threads.
template <typename C>
__device__ void basis_numbers(const PackPagesParams& p, const Tile& tile, const NumbersRoom& room,
                              const float* mean, const float* rows, int channels) {
  const int dim = p.head_dim, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  round_vectors<C>(p, tile, room, mean);
  __syncthreads();
#pragma unroll 1
  for (int first = 8 * warp; first < channels; first += 8 * (kThreads / 32)) {
    const int row = first + lane / 4;
    const RowBytes bytes(row < channels ? rows + row * dim : nullptr, dim, room.steps);
    float powers[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      powers[i] = __shfl_sync(~0u, bytes.power, 4 * (lane % 4 * 2 + i));
    }
#pragma unroll 1
    for (int token = 0; token < tile.tokens; token += 16) {
      ByteSums sums;
#pragma unroll
      for (int step = 0; step < kMaxSteps; ++step) {
        if (step < room.steps) sums.add(room, token, step, bytes);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int of = token + 8 * half + lane / 4;
        float number[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          number[i] = __fmul_rn(__fmul_rn(sums.sum(2 * half + i), powers[i]), room.powers[of]);
        }
        *reinterpret_cast<float2*>(room.numbers + of * room.pitch + first + lane % 4 * 2) =
            make_float2(number[0], number[1]);
      }
    }
  }
  __syncthreads();
}

// Whether a vector and its numbers are finite: by a warp, to all lanes.
__device__ __forceinline__ bool is_finite(const NumbersRoom& room, int token, int channels) {
  bool finite = isfinite(room.powers[token]);
  const float* numbers = room.numbers + token * room.pitch;
  for (int c = threadIdx.x % 32; c < channels; c += 32) finite = finite && isfinite(numbers[c]);
  return __all_sync(~0u, finite);
}
