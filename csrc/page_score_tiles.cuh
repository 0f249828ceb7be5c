// Scores of pages by tensor cores, of bounds of 16 or 8 bits.
//
// What a page may hold for a query is a plain product of two vectors: where an element of the query
// is negative the least key counts, elsewhere the greatest,
//   Σ_d max(q_d · least_d, q_d · greatest_d)
//     = Σ_d min(q_d, 0) · least_d + max(q_d, 0) · greatest_d,
// so with a page's bounds side by side sixteen pages are a matrix that is multiplied by the queries
// of a KV head. Reading is what it takes then.
//
// 1. A lane holds 16 bytes of each eighth of two pages' bounds, which are both operands' columns in
//    an order of their own: the sum is over columns. While it multiplies some it waits for others.
// 2. A query is two columns, its elements in 16 bits and what that rounded away: nothing of a query
//    as it is given, 2^-17 of one that was turned (2^-22 in f16).
// 3. A thread block has some windows of a row, and each of its four warps sixteen pages of each. It
//    goes over them once for each distance by which keys were rotated, mostly once.
//
// A page is left to PageScores where a sum is not a number, as of an infinite bound times the zero
// beside it. The rows of a product do not touch each other, so a score is that of its page alone.
#pragma once

#include "page_entries.cuh"
#include "tensor_core.cuh"

namespace {

constexpr uint32_t kTileThreads = 128;
constexpr uint32_t kTileQueries = 4;  // of a tile: eight columns
constexpr uint32_t kMostTiles = 4;    // TILED_QUERIES of the launch has their queries
constexpr int kChunk = 32;            // elements of a page that two products take
constexpr int kAtOnce = 4;            // chunks that a lane waits for at a time
constexpr uint32_t kSlot = 16;        // entries of a window that a warp has
constexpr uint32_t kMostSlots = 64;   // of a thread block: MOST_WINDOWS of the launch

// Entries of a thread block by bits, the sixteen of each warp in each window together.
struct TileShared {
  uint16_t open[kMostSlots];  // no score yet
  uint16_t left[kMostSlots];  // one that PageScores has to make
};

// Queries of T; bounds of B lie side by side, `kBounds` vectors of up to kDim elements.
template <typename T, typename B, int kDim, int kBounds>
class PageScoreTiles {
  static constexpr int kColumns = kDim * kBounds;
  static constexpr int kChunks = kColumns / kChunk;
  static constexpr int kPart = kChunks / 2 < kAtOnce ? kChunks / 2 : kAtOnce;
  static constexpr int kParts = kChunks / kPart;  // an even number
  // Of a query's row in shared memory: with the padding eight lanes read different banks.
  static constexpr uint32_t kStride = kColumns + 32;
  static constexpr int kWords = 2 * sizeof(B);  // of a lane's eight elements
  using Words = uint32_t[2][kPart][kWords];

  const ScorePagesParams& p;
  const EntryRow& row;
  T* const queries;  // [tiles · 8, kStride]
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t column = lane % 4 * 8;  // of this lane's elements in a chunk
  const uint32_t own = threadIdx.x / 32 * kSlot + lane / 4;  // entry of a window, and that 8 behind
  const uint32_t tiles;

  // Two pages of a window that a lane has, −1 where there is none of this distance.
  struct Pages {
    int64_t at[2] = {-1, -1};
    bool is_wanted[2] = {};
  };

 public:
  __device__ PageScoreTiles(const ScorePagesParams& params, const EntryRow& of, T* room)
      : p(params), row(of), queries(room), tiles((p.group + kTileQueries - 1) / kTileQueries) {}

  // Scores the windows from `begin` to `end`, but for pages that are then left.
  __device__ void run(uint32_t begin, uint32_t end, TileShared& sh) const {
    const uint32_t slots = (end - begin + kWindow - 1) / kWindow * (kWindow / kSlot);
    for (uint32_t i = threadIdx.x; i < slots; i += kTileThreads) {
      const uint32_t before = min(i * kSlot, end - begin), many = min(end - begin - before, kSlot);
      sh.open[i] = static_cast<uint16_t>((1u << many) - 1);
      sh.left[i] = tiles > kMostTiles ? sh.open[i] : 0;
    }
    __syncthreads();
    if (tiles > kMostTiles) return;
    for (uint32_t entry = begin;;) {
      const bool is_done = pass(begin, end, row.delta(entry), sh);
      if (__syncthreads_and(is_done)) return;
      uint32_t slot = 0;
      while (sh.open[slot] == 0) ++slot;
      entry = begin + slot * kSlot + __ffs(sh.open[slot]) - 1;
    }
  }

 private:
  // Scores the pages that were rotated by one distance. Whether this lane has none of another.
  __device__ __forceinline__ bool pass(uint32_t begin, uint32_t end, int delta,
                                       TileShared& sh) const {
    // Queries that are turned come first: bounds would not stay in registers meanwhile.
    if (delta != 0) turn(delta);
    bool is_done = true;
    Pages pages = pages_of(begin, begin, delta, sh, is_done);
    Words words[2];
    fetch(words[0], pages, 0);
    if (delta == 0) turn(0);
    __syncthreads();
    for (uint32_t window = begin; window < end; window += kWindow) {
      Pages next;
      if (window + kWindow < end) next = pages_of(begin, window + kWindow, delta, sh, is_done);
      float sums[kMostTiles][4] = {};
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const bool is_last = part + 1 == kParts;
        fetch(words[(part + 1) % 2], is_last ? next : pages, is_last ? 0 : part + 1);
#pragma unroll
        for (uint32_t tile = 0; tile < kMostTiles; ++tile) {
          if (tile < tiles) multiply(sums[tile], words[part % 2], part, tile);
        }
      }
      write(begin, window, sums, pages, sh);
      pages = next;
    }
    return is_done;
  }

  __device__ __forceinline__ Pages pages_of(uint32_t begin, uint32_t window, int delta,
                                            const TileShared& sh, bool& is_done) const {
    Pages pages;
    const uint32_t open = sh.open[slot_of(begin, window)];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t at = lane / 4 + 8 * i, entry = window + own + 8 * i;
      if ((open >> at & 1) == 0) continue;
      pages.is_wanted[i] = row.delta(entry) == delta;
      is_done &= pages.is_wanted[i];
      if (pages.is_wanted[i]) pages.at[i] = row.page(entry);
    }
    return pages;
  }

  // Of this warp in a window.
  __device__ __forceinline__ uint32_t slot_of(uint32_t begin, uint32_t window) const {
    return (window - begin + threadIdx.x / 32 * kSlot) / kSlot;
  }

  // Writes the scores of this warp's pages, and notes which are no more to be scored.
  __device__ __forceinline__ void write(uint32_t begin, uint32_t window,
                                        const float (&sums)[kMostTiles][4], const Pages& pages,
                                        TileShared& sh) const {
    uint32_t scored = 0, odd = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float whole = pages.at[i] >= 0 ? score(sums, pages.at[i], i) : -INFINITY;
      const bool is_first = lane % 4 == 0, is_wanted = pages.is_wanted[i] && is_first;
      if (is_wanted) row.scores[window + own + 8 * i] = whole;
      scored |= of_rows(__ballot_sync(~0u, is_wanted)) << 8 * i;
      odd |= of_rows(__ballot_sync(~0u, is_wanted && isnan(whole))) << 8 * i;
    }
    if (lane == 0 && scored != 0) {
      const uint32_t slot = slot_of(begin, window);
      sh.open[slot] = static_cast<uint16_t>(sh.open[slot] & ~scored);
      sh.left[slot] = static_cast<uint16_t>(sh.left[slot] | odd);
    }
  }

  // Every fourth bit.
  static __device__ __forceinline__ uint32_t of_rows(uint32_t lanes) {
    uint32_t rows = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) rows |= (lanes >> 4 * i & 1) << i;
    return rows;
  }

  // This lane's elements of two pages, zeros where there is none.
  __device__ __forceinline__ void fetch(Words& words, const Pages& pages, int part) const {
    const auto* bounds = static_cast<const unsigned char*>(p.bounds);
    const uint32_t elements = kBounds * p.head_dim;
#pragma unroll
    for (int c = 0; c < kPart; ++c) {
      const uint32_t at = (part * kPart + c) * kChunk + column;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) words[i][c][w] = 0;
        if (pages.at[i] >= 0 && at < elements) {
          load_words(words[i][c], bounds + sizeof(B) * (pages.at[i] * elements + at));
        }
      }
    }
  }

  // Brings the queries as keys of entries with this delta meet them, side by side as bounds are.
  __device__ __forceinline__ void turn(int delta) const {
    const uint32_t all = tiles * kTileQueries * kColumns;
    for (uint32_t i = threadIdx.x; i < all; i += kTileThreads) {
      const uint32_t query = i / kColumns, at = i % kColumns;
      const bool of_least = kBounds == 2 && at < p.head_dim;
      const uint32_t d = kBounds == 2 && !of_least ? at - p.head_dim : at;
      float x = 0.0f;
      if (query < p.group && d < p.head_dim) {
        x = row.query<T>(query, d, delta);
        // NaN stays in both.
        if (kBounds == 2 && (of_least ? x > 0.0f : x < 0.0f)) x = 0.0f;
      }
      const T kept = Arithmetic<T>::round(x);
      T* const to = queries + 2 * query * kStride + at;
      to[0] = kept;
      to[kStride] = Arithmetic<T>::round(x - Arithmetic<T>::widen(kept));
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[4], const Words& words, int part,
                                           uint32_t tile) const {
    const T* query = queries + (tile * 8 + lane / 4) * kStride + part * kPart * kChunk + column;
#pragma unroll
    for (int c = 0; c < kPart; ++c) {
      const uint4 q = *reinterpret_cast<const uint4*>(query + c * kChunk);
      const uint32_t first[4] = {wide(words[0][c], 0), wide(words[1][c], 0),
                                 wide(words[0][c], 1), wide(words[1][c], 1)};
      multiply_add<T>(sums, first, q.x, q.y);
      const uint32_t second[4] = {wide(words[0][c], 2), wide(words[1][c], 2),
                                  wide(words[0][c], 3), wide(words[1][c], 3)};
      multiply_add<T>(sums, second, q.z, q.w);
    }
  }

  // The i-th pair of a lane's eight elements, as two of T.
  static __device__ __forceinline__ uint32_t wide(const uint32_t (&words)[kWords], int i) {
    if constexpr (sizeof(B) == 1) {
      return widen_two<T>(words[i / 2] >> i % 2 * 16 & 0xffff);
    } else {
      return words[i];
    }
  }

  // The score of one of this lane's two pages: of its products with four lanes' queries.
  __device__ __forceinline__ float score(const float (&sums)[kMostTiles][4], int64_t page,
                                         int which) const {
    float factor = 1.0f;
    if constexpr (sizeof(B) == 1) factor = power_of(__ldg(p.scales + page));
    float whole = row.nothing();
#pragma unroll
    for (uint32_t tile = 0; tile < kMostTiles; ++tile) {
      if (tile * kTileQueries + lane % 4 < p.group) {
        const float dot = (sums[tile][2 * which] + sums[tile][2 * which + 1]) * factor;
        whole = row.joined(whole, row.finished(dot));
      }
    }
    // Lanes of one page are in step: they all have it, or none does.
    const uint32_t mates = 0xfu << lane / 4 * 4;
    for (int step = 2; step > 0; step /= 2) {
      whole = row.joined(whole, __shfl_xor_sync(mates, whole, step));
    }
    return whole;
  }
};

}  // namespace
