// Pieces of the kernels that select pages of a row of scores: a row, or the part of it that one
// thread block has. select_pages.cu says how it goes.
#pragma once

#include <cmath>
#include <cstdint>

#include "api.h"

namespace {

constexpr int kMostWarps = 32;
constexpr uint32_t kAll = ~0u;
constexpr uint32_t kNone = ~0u;  // the key of no score: that of −∞ is less
constexpr int kPasses = 3;
constexpr int kBits = 11;  // of a pass; the last one has 10
constexpr int kFew = 6;    // pages of a word that its lane lists alone

// A number that is less where a score comes first: NaN, then the higher one; 0 and −0 are equal.
__device__ __forceinline__ uint32_t key_of(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);
  // All bits but the sign are turned where that is 0.
  const uint32_t key = bits ^ (0x7fffffffu & ~static_cast<uint32_t>(int32_t(bits) >> 31));
  return isnan(score) ? 0 : key;
}

struct Shared {
  alignas(16) uint32_t bins[kPasses][1 << kBits];
  uint32_t of_warp[kMostWarps];
  uint32_t bin, before, within;  // what the last pass found
};

// Of what the warps before this one have, and of what all have.
struct Sums {
  uint32_t before, all;
};

// The bits of those of 32 pages from `base` on that lie in [from, to).
__device__ __forceinline__ uint32_t pages_between(uint32_t base, uint32_t from, uint32_t to) {
  const uint32_t low = min(max(from, base) - base, 32u), high = min(max(to, base) - base, 32u);
  return low < high ? (kAll >> (32 - (high - low))) << low : 0;
}

// The first `number` of the bits that are set.
__device__ __forceinline__ uint32_t first_bits(uint32_t bits, uint32_t number) {
  for (uint32_t set = __popc(bits); set > number; --set) bits &= ~(0x80000000u >> __clz(bits));
  return bits;
}

// The sum over the lanes up to this one.
__device__ __forceinline__ uint32_t sum_up_to(uint32_t part) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAll, part, step);
    if (lane >= step) part += other;
  }
  return part;
}

// Nobody may still be reading `of_warp`; whoever writes to it again waits for a barrier first.
template <int kWarps>
__device__ __forceinline__ Sums sums_of_warps(uint32_t of_own, uint32_t (&of_warp)[kMostWarps]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) of_warp[warp] = of_own;
  __syncthreads();
  const uint32_t up_to = sum_up_to(lane < kWarps ? of_warp[lane] : 0);
  const uint32_t before = __shfl_sync(kAll, up_to, max(warp - 1, 0));
  return {warp == 0 ? 0 : before, __shfl_sync(kAll, up_to, kWarps - 1)};
}

// Part `part` of the `kParts` of a row: `kOwn` scores of each of `kThreads` threads at a time.
template <int kThreads, int kOwn, int kParts>
class RowPart {
 protected:
  const SelectPagesParams& p;
  const uint32_t row, part;
  const float* scores;
  int32_t* pages;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Of the row's pages [begin, end) are the part's, and of these [first, last) are selected by
  // score, the others always.
  uint32_t begin = 0, first, last, end;
  uint32_t keys[kOwn];

  static constexpr uint32_t kTile = kThreads * kOwn;

  __device__ RowPart(const SelectPagesParams& params, uint32_t of_row)
      : p(params), row(blockIdx.x / kParts), part(of_row) {
    scores = p.scores + int64_t{row} * p.width;
    pages = p.pages + int64_t{row} * p.most;
  }

  // Key i of a thread is that of a page; a warp's are neighbours.
  __device__ __forceinline__ uint32_t page_of(uint32_t tile, int i) const {
    return begin + tile * kTile + (warp * kOwn + i) * 32 + lane;
  }

  __device__ __forceinline__ uint32_t tiles() const { return (end - begin + kTile - 1) / kTile; }

  // Takes the row for the part, and returns how many of its pages there is room for by score.
  __device__ __forceinline__ uint32_t take_row(int listed, int budget) {
    end = min(static_cast<uint32_t>(max(listed, 0)), p.width);
    first = min(p.sink, end);
    last = max(end - min(p.recent, end), first);
    const uint32_t always = first + (end - last);
    return static_cast<uint32_t>(budget) > always ? budget - always : 0;
  }

  // Sets all bins to 0; nobody may count before a barrier.
  __device__ __forceinline__ void clear(Shared& sh) const {
    auto* bins = reinterpret_cast<uint4*>(sh.bins);
#pragma unroll
    for (int i = threadIdx.x; i < (kPasses << kBits) / 4; i += kThreads) bins[i] = uint4{};
  }

  __device__ __forceinline__ uint32_t key_at(uint32_t page, float score) const {
    return page >= first && page < last ? key_of(score) : kNone;
  }

  __device__ __forceinline__ void read(uint32_t tile) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t page = page_of(tile, i);
      keys[i] = page >= first && page < last ? key_of(__ldg(scores + page)) : kNone;
    }
  }

  // Brings the keys of a tile; those of a part that is one tile stay.
  __device__ __forceinline__ void fetch(uint32_t tile) {
    if (tiles() == 1) return;
    read(tile);
  }

  // Counts the keys whose bits from `above` on are `bound`, by the bits from `shift` on below.
  // Those of no score are the greatest of all: the first pass may count them.
  __device__ __forceinline__ void count_keys(uint32_t (&bins)[1 << kBits], uint32_t bound,
                                             int above, int shift) {
    const uint32_t mask = (1u << (above - shift)) - 1;
    for (uint32_t tile = 0; tile < tiles(); ++tile) {
      fetch(tile);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const bool counts = above == 32 || keys[i] >> (above % 32) == bound;
        if (counts) atomicAdd(&bins[keys[i] >> shift & mask], 1u);
      }
    }
    __syncthreads();
  }

  // Keys whose bits from `shift` on are less than `bound` become selected, and of those with these
  // bits the first `equal` of the row. `find` says in `sh` in which bin of a pass the so-manieth
  // is, counted from 1; there are as many. It ends with a barrier.
  template <typename Find>
  __device__ __forceinline__ void search(Shared& sh, uint32_t room, uint32_t& bound, int& shift,
                                         uint32_t& equal, Find find) {
    equal = room;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      constexpr int kAbove[kPasses] = {32, 21, 10}, kShift[kPasses] = {21, 10, 0};
      shift = kShift[pass];
      count_keys(sh.bins[pass], bound, kAbove[pass], shift);
      find(pass, equal);
      bound = bound << (kAbove[pass] - shift) | sh.bin;
      equal -= sh.before;
      // All of a bin: what tells them apart does not matter.
      if (equal == sh.within) {
        ++bound;
        equal = 0;
        return;
      }
    }
  }

  // Selects pages [0, number) of the row; each part writes some of the results.
  __device__ __forceinline__ void write_first(uint32_t number) const {
    const uint32_t selected = min(number, p.most);
    for (uint32_t i = part * kThreads + threadIdx.x; i < p.most; i += kParts * kThreads) {
      pages[i] = i < selected ? static_cast<int32_t>(i) : -1;
    }
    if (part == 0 && threadIdx.x == 0) p.selected[row] = static_cast<int32_t>(selected);
  }

  // Lists from `at` on the pages from `base` on of which a lane's word has the bits.
  __device__ __forceinline__ void list(uint32_t bits, uint32_t base, uint32_t at) const {
    if (__any_sync(kAll, __popc(bits) > kFew)) {
      const uint32_t first_base = base - lane * 32;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const uint32_t word = __shfl_sync(kAll, bits, i), from = __shfl_sync(kAll, at, i);
        const uint32_t own = from + __popc(word & ((1u << lane) - 1));
        if ((word >> lane & 1) != 0 && own < p.most) {
          pages[own] = static_cast<int32_t>(first_base + i * 32 + lane);
        }
      }
      return;
    }
    for (; bits != 0; bits &= bits - 1, ++at) {
      if (at < p.most) pages[at] = static_cast<int32_t>(base + __ffs(bits) - 1);
    }
  }

  // What is selected of a tile goes behind what is of those before: `sure` pages, and of those
  // with keys at the bound `tied`; both count those of earlier parts too. Returns how many pages
  // are selected up to the part's end.
  __device__ __forceinline__ uint32_t write(Shared& sh, uint32_t bound, int shift, uint32_t equal,
                                            uint32_t sure, uint32_t tied) {
    for (uint32_t tile = 0; tile < tiles(); ++tile) {
      fetch(tile);
      // Lane i has the i-th 32 pages of the warp. No key of no score is below a bound or at it.
      uint32_t better = 0, level = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const uint32_t below = __ballot_sync(kAll, keys[i] >> shift < bound);
        if (lane == i) better = below;
      }
      if (equal > 0) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          const uint32_t at_bound = __ballot_sync(kAll, keys[i] >> shift == bound);
          if (lane == i) level = at_bound;
        }
      }
      const uint32_t base = page_of(tile, lane) - lane;
      if (lane < kOwn) better |= pages_between(base, 0, first) | pages_between(base, last, end);
      const uint32_t own = __popc(better) | __popc(level) << 16, up_to = sum_up_to(own);
      const Sums sums = sums_of_warps<kThreads / 32>(__shfl_sync(kAll, up_to, 31), sh.of_warp);
      const uint32_t before = sums.before + up_to - own;
      const uint32_t tied_before = tied + (before >> 16);
      const uint32_t room = equal - min(tied_before, equal);
      list(better | first_bits(level, room), base,
           sure + (before & 0xffff) + min(tied_before, equal));
      sure += sums.all & 0xffff;
      tied += sums.all >> 16;
      // The next tile writes its sums where these lie.
      if (tile + 1 < tiles()) __syncthreads();
    }
    return min(sure + min(tied, equal), p.most);
  }

  // What lies behind the `selected` pages of the row; each part writes some of it.
  __device__ __forceinline__ void write_end(uint32_t selected) const {
    const uint32_t from = selected + part * kThreads + threadIdx.x;
    for (uint32_t i = from; i < p.most; i += kParts * kThreads) pages[i] = -1;
    if (part == 0 && threadIdx.x == 0) p.selected[row] = static_cast<int32_t>(selected);
  }
};

}  // namespace
