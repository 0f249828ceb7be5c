// Numbers as integers of 16 bits, of two signed bytes, and how a warp's products have them.
#pragma once

#include <cmath>
#include <cstdint>

#include "codes.cuh"
#include "decode_units.cuh"

// Query heads of a product, each a column of upper bytes and of lower.
constexpr int kTileHeads = 4;
constexpr int kMostTiles = kQueries / kTileHeads;

constexpr float kMostUnits = 32512;  // 127 · 256: what is rounded to it has an upper byte of 127
constexpr float kLeastLargest = 1e-30f;  // of numbers below it nothing is left

// By what numbers are multiplied, of which this is the largest, and what a unit of them is then.
__device__ __forceinline__ float inverse_unit(float largest) {
  // By numbers above 2^126 that division would be 0.
  return largest > kLeastLargest ? __fdividef(kMostUnits / 4, largest / 4) : 0.0f;
}
__device__ __forceinline__ float unit_of(float largest) { return largest * (1 / kMostUnits); }

// Of a query's numbers, by the bits of the largest. One that is not finite has scores that are
// none.
struct QueryUnit {
  float inverse, size;

  __device__ __forceinline__ explicit QueryUnit(uint32_t bits) {
    const float largest = __uint_as_float(bits);
    const bool finite = largest < INFINITY;
    inverse = finite ? inverse_unit(largest) : 0.0f;
    size = finite ? unit_of(largest) : NAN;
  }
};

// A number in units, as its lowest two bytes, either of which is 128 too large.
__device__ __forceinline__ uint32_t sixteen_bits(float x, float inverse) {
  constexpr float kWhole = 12582912;  // 1.5 · 2^23: above it floats are integers
  return __float_as_uint(fmaf(x, inverse, kWhole + 0x8080));
}
__device__ __forceinline__ uint32_t signed_bytes(uint32_t bytes) { return bytes ^ 0x80808080u; }

// Of four numbers the upper bytes, or the lower.
__device__ __forceinline__ uint32_t bytes_of_four(const uint32_t (&numbers)[4], bool upper) {
  const uint32_t select = upper ? 0x0051 : 0x0040;
  return signed_bytes(permuted(permuted(numbers[0], numbers[1], select),
                               permuted(numbers[2], numbers[3], select), 0x5410));
}

// A sum by its products with upper and with lower bytes.
__device__ __forceinline__ float whole_of(int upper, int lower) {
  return static_cast<float>(256 * upper + lower);
}

// Of 32 keys those that a lane has scores of, j = 0 to 3: rows lane / 4 + 8 · j of two products.
__device__ __forceinline__ int key_of(int lane, int j) {
  return lane / 8 + lane / 4 % 2 * 4 + 8 * j;
}

// Of 32 tokens those whose values are columns of a lane, i = 0 to 7: as weights of keys come there
// when matrices are transposed, of rows lane % 4 · 2 and + 1.
__device__ __forceinline__ int value_of(int lane, int i) {
  return lane % 4 + 8 * (i % 2) + 4 * (i / 2 % 2) + 16 * (i / 4);
}
