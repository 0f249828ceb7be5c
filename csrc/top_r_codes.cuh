// Vectors of top-r pages whose numbers are codes of four bits, as a warp takes them: scores of keys
// and sums of values in their basis, by products of bytes.
#pragma once

#include <cmath>
#include <cstdint>

#include "api.h"
#include "codes.cuh"
#include "decode_units.cuh"
#include "sixteen_bits.cuh"
#include "tensor_core.cuh"
#include "top_r_pages.cuh"

// Columns of a table of selectors: where thread blocks have much shared memory a lane reads one of
// its own, so that no two of a warp meet in a bank.
#if __CUDA_ARCH__ >= 900
constexpr int kSelectorColumns = 32;
#else
constexpr int kSelectorColumns = 1;
#endif
// Bytes that the others of 32 columns would take; also in rust/cuda/src/attend_packed.rs.
constexpr int kFewerSelectors = (32 - kSelectorColumns) * kSelectors * 4;

// For each mask of eight channels, which of the codes that follow each of them has.
struct CodeSelectors {
  uint32_t of[kSelectors][kSelectorColumns];

  // By all threads of a block.
  __device__ void fill() {
    for (int mask = threadIdx.x; mask < kSelectors; mask += blockDim.x) {
      const uint32_t own = selectors_of(mask);
      if constexpr (kSelectorColumns == 1) {
        of[mask][0] = own;
      } else {
        auto* row = reinterpret_cast<uint4*>(of[mask]);
#pragma unroll
        for (int i = 0; i < 8; ++i) row[(i + threadIdx.x) % 8] = {own, own, own, own};
      }
    }
  }
};

// A lane's column of them, by bytes.
struct SelectorColumn {
  const unsigned char* bytes;

  // Of the first four channels of a mask, or of the others.
  __device__ __forceinline__ uint32_t of(uint32_t mask, int half) const {
    const unsigned char* row = bytes + mask * sizeof(CodeSelectors::of[0]);
    return reinterpret_cast<const uint16_t*>(row)[half];
  }
};

// A lane's codes of `kEights` times eight channels of a vector, which are kept by the bits of
// masks: sixteen times each number in units of the scale, as signed bytes, and 0 where nothing is
// kept.
template <int kEights>
class KeptCodes {
 public:
  // `at`: the bit of the page where they begin. Reads a word more than it needs: behind codes lie
  // scales.
  __device__ __forceinline__ KeptCodes(const unsigned char* page, int at) {
    const auto* words = reinterpret_cast<const uint32_t*>(page + (at >> 3 & ~3));
    uint32_t word = words[0];
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      const uint32_t after = words[i + 1];
      codes[i] = __funnelshift_r(word, after, at);
      word = after;
    }
  }

  // Those of the next eight channels: the first four, and the others. So many eights follow.
  template <int kLeft>
  __device__ __forceinline__ uint2 take(uint32_t mask, const SelectorColumn& column) {
    const uint32_t even = masked_xor(codes[0] << 4, 0xF0F0F0F0u, 0x88888888u);
    // What is not kept is the last byte, and that is 0 unless all eight are kept.
    uint32_t odd = masked_xor(codes[0], 0x00F0F0F0u, 0x00888888u);
    if (mask == 255) odd = masked_xor(codes[0], 0xF0F0F0F0u, 0x88888888u);
    const int bits = 4 * __popc(mask);
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
      codes[i] = __funnelshift_rc(codes[i], codes[i + 1], bits);
    }
    return {permuted(even, odd, column.of(mask, 0)), permuted(even, odd, column.of(mask, 1))};
  }

 private:
  uint32_t codes[kEights];
};

// With scales of T, for so many tiles of query heads.
template <typename T, int D, bool kWhole, int kHeadTiles>
class TopRCodes : public TopRPages<T, D, kWhole> {
  using Pages = TopRPages<T, D, kWhole>;
  using Pages::bits, Pages::lane, Pages::places;
  using Pages::kOfKey, Pages::kOfValue;

 public:
  static constexpr int kTiles = kHeadTiles;
  static constexpr int kMasks = 1;
  static constexpr int kRowTiles = D / 16;  // of sixteen channels of values

  struct Shared {
    CodeSelectors selectors;
  };

  __device__ explicit TopRCodes(const AttendPackedParams& params)
      : Pages(params), row_bits(4 * static_cast<int>(params.top_r.kept)) {}

  // By all threads of a block.
  __device__ void prepare(Shared& sh) {
    sh.selectors.fill();
    const uint32_t* own = sh.selectors.of[0] + lane % kSelectorColumns;
    column = {reinterpret_cast<const unsigned char*>(own)};
  }

  __device__ void begin(const TurnedBases<T, D>& turned) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) take_tile(tile, turned);
  }

  // Scores of 32 keys: number j is of `key_of(lane, j)` with query head lane % 4 of a tile.
  __device__ void score(float (&s)[kTiles][1][4], const unsigned char* page, int token) const {
    const int own = token + key_of(lane, 0);
    uint32_t masks[4][kSteps], sum = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      bits.take(masks[j], page, own + 8 * j, lane % 4);
      sum += count_of(masks[j]) << (8 * j);
    }
    // Four counts in one register, added up over the lanes of a key: 128 at most.
    const uint32_t before = counts_before<1, 4>(sum, lane % 4);
    const int at = 8 * places.numbers + own * row_bits;
    uint32_t a[2][kSteps][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      KeptCodes<kSteps> codes(page, codes_at(at + 8 * j * row_bits, before, j));
      key_operands<0>(a[j / 2], j % 2, codes, masks[j]);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        int sums[4] = {0, 0, 0, 0};
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          multiply_bytes<true, true>(sums, a[u][k], queries[tile][k][0], queries[tile][k][1]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float scale = scale_at(page, own + 16 * u + 8 * half) * units[tile];
          s[tile][0][2 * u + half] =
              fmaf(whole_of(sums[2 * half], sums[2 * half + 1]), scale, offsets[tile]);
        }
      }
    }
  }

  // What the bytes of values are multiplied by, of tokens as of keys.
  __device__ void take_scales(float (&scales)[1][4], const unsigned char* page, int token) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      scales[0][j] = scale_at(page + places.side, token + key_of(lane, j));
    }
  }

  // Adds 32 values by their weights to `part`: row lane / 4 + 8 · half of operand m is channel
  // D / 8 · (lane / 4) + 2 · m + half.
  template <typename Part>
  __device__ void values(const unsigned char* page, int token, Part& part) const {
    uint32_t channels[2][kOfValue];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      values_of_16(channels[half], page, token + 16 * half + value_of(lane, 0));
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const uint32_t a[4] = {channels[0][2 * m], channels[0][2 * m + 1], channels[1][2 * m],
                             channels[1][2 * m + 1]};
      int sums[kTiles][4] = {};
      part.multiply(sums, a, 0);
      part.add(m, sums);
    }
  }

  // Leaves a query's sums of `values`, which are NaN where `odd` is, by channels.
  __device__ void leave(const float (&out)[kRowTiles][2], float, float odd, float* to) const {
#pragma unroll
    for (int i = 0; i < kOfValue; ++i) {
      to[kOfValue * (lane / 4) + i] = fmaf(kCode, out[i / 2][i % 2], odd);
    }
  }

 private:
  static constexpr int kSteps = D / 32;    // products of bytes
  static constexpr float kCode = 0.0625f;  // what a byte counts for

  const int row_bits;  // of a vector's codes
  SelectorColumn column;
  uint32_t queries[kTiles][kSteps][2];  // B fragments: rows are channels
  float units[kTiles], offsets[kTiles];  // of query heads lane % 4 and + 4

  __device__ void take_tile(int tile, const TurnedBases<T, D>& turned) {
    const int head = kTileHeads * tile + lane / 8;
    float own[kOfKey];
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kOfKey; i += 4) {
      const int place = turned.place_of(head, kOfKey * (lane % 4) + i);
      const float4 four = *reinterpret_cast<const float4*>(turned.queries + place);
      own[i] = four.x, own[i + 1] = four.y, own[i + 2] = four.z, own[i + 3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < kOfKey; ++i) largest = max(largest, __float_as_uint(fabsf(own[i])));
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      largest = max(largest, __shfl_xor_sync(~0u, largest, step));
    }
    const QueryUnit unit(largest);
    units[tile] = __shfl_sync(~0u, kCode * unit.size, lane % 4 * 8);
    offsets[tile] = turned.of_queries[kTileHeads * tile + lane % 4];
#pragma unroll
    for (int i = 0; i < kOfKey; i += 4) {
      uint32_t four[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) four[e] = sixteen_bits(own[i + e], unit.inverse);
      queries[tile][i / 8][i / 4 % 2] = bytes_of_four(four, lane / 4 % 2 == 0);
    }
  }

  __device__ float scale_at(const unsigned char* side, int token) const {
    return Scales<T>::widen(reinterpret_cast<const T*>(side + places.scales)[token]);
  }

  template <int kCount>
  static __device__ __forceinline__ uint32_t count_of(const uint32_t (&masks)[kCount]) {
    uint32_t count = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) count += __popc(masks[i]);
    return count;
  }

  // The bit of a page from which on a lane has codes, of a vector whose codes begin there, behind
  // as many as number i of four says.
  __device__ __forceinline__ int codes_at(int at, uint32_t before, int i) const {
    return at + 4 * static_cast<int>(permuted(before, 0, 0x4440 + i));
  }

  template <int kEight>
  __device__ __forceinline__ void key_operands(uint32_t (&a)[kSteps][4], int row,
                                               KeptCodes<kSteps>& codes,
                                               const uint32_t (&masks)[kSteps]) const {
    if constexpr (kEight < kSteps) {
      const uint2 x = codes.template take<kSteps - 1 - kEight>(masks[kEight], column);
      a[kEight][row] = x.x, a[kEight][2 + row] = x.y;
      key_operands<kEight + 1>(a, row, codes, masks);
    }
  }

  // Of each of a lane's channels the bytes of four of sixteen tokens, of which the first is `own`.
  __device__ void values_of_16(uint32_t (&channels)[kOfValue], const unsigned char* page,
                               int own) const {
    uint32_t masks[4][kOfValue / 8], sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bits.take(masks[i], page + places.side, own + value_of(0, i), lane / 4);
      sum += count_of(masks[i]) << (8 * i);
    }
    const uint32_t before = counts_before<4, 8>(sum, lane / 4);
    const int at = 8 * (places.side + places.numbers) + own * row_bits;
    uint32_t bytes[4][kOfValue / 4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      KeptCodes<kOfValue / 8> codes(page, codes_at(at + value_of(0, i) * row_bits, before, i));
      value_bytes<0>(bytes[i], codes, masks[i]);
    }
#pragma unroll
    for (int r = 0; r < kOfValue / 4; ++r) {
      const uint32_t tokens[4] = {bytes[0][r], bytes[1][r], bytes[2][r], bytes[3][r]};
      uint32_t four[4];
      transpose_bytes(four, tokens);
#pragma unroll
      for (int e = 0; e < 4; ++e) channels[4 * r + e] = four[e];
    }
  }

  template <int kEight>
  __device__ __forceinline__ void value_bytes(uint32_t (&bytes)[kOfValue / 4],
                                              KeptCodes<kOfValue / 8>& codes,
                                              const uint32_t (&masks)[kOfValue / 8]) const {
    if constexpr (kEight < kOfValue / 8) {
      const uint2 x = codes.template take<kOfValue / 8 - 1 - kEight>(masks[kEight], column);
      bytes[2 * kEight] = x.x, bytes[2 * kEight + 1] = x.y;
      value_bytes<kEight + 1>(bytes, codes, masks);
    }
  }
};
