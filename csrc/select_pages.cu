// select_pages: of each row of scores the pages that a decode step reads.
//
// The simple version:
//   for each row: the first `sink` and the last `recent` pages, and of the others the best by
//   score, of equal ones the earlier, up to the row's budget; written in ascending order
//
// What makes it a few microseconds:
// 1. a row is a thread block's, and up to 16 scores lie in a thread's registers: scores are read
//    once. They are asked for before the row's own count is known, so that the two reads overlap.
//    A thread block has 256 threads for short rows and 1024 for the longest ones;
// 2. scores become whole numbers that order as they do, of which the least comes first. Where the
//    last one that is selected lies is found eleven bits at a time: a histogram in shared memory of
//    those that can still be it, and a sum over its bins. A pass that settles it is the last one;
// 3. a warp has neighbouring pages, and ballots make of 32 of them one word of a lane. What is
//    selected before a word is counted by its bits: results come out in ascending order, and of
//    equal scores the first ones are known without sorting. A lane lists the pages of its word
//    where they are few, else the warp does, word by word.
//
// Which scores are equal and which are NaN is decided on all 32 bits: no candidate is dropped, and
// a row's answer depends on that row alone. Rows too long for registers are read in each pass.
//
// What counts and budgets say is not checked on the host where they lie here: a count beyond the
// row is the row's width, and what does not fit into a row of results is left out.

#include <cmath>

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

// In which of the bins the `wanted`-th is, counted from 1; there are as many.
template <int kThreads, int kBins>
__device__ __forceinline__ void find_bin(Shared& sh, const uint32_t (&bins)[1 << kBits],
                                         uint32_t wanted) {
  constexpr int kOwn = kBins / kThreads;
  struct alignas(4 * kOwn) Own {
    uint32_t at[kOwn];
  };
  const Own own = reinterpret_cast<const Own*>(bins)[threadIdx.x];
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sum += own.at[i];
  const uint32_t up_to = sum_up_to(sum);
  const uint32_t of_own = __shfl_sync(kAll, up_to, 31);
  uint32_t before = sums_of_warps<kThreads / 32>(of_own, sh.of_warp).before + up_to - sum;
  if (before < wanted && wanted <= before + sum) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (before < wanted && wanted <= before + own.at[i]) {
        sh.bin = kOwn * threadIdx.x + i;
        sh.before = before;
        sh.within = own.at[i];
      }
      before += own.at[i];
    }
  }
  __syncthreads();
}

// One row: `kOwn` scores of each of `kThreads` threads at a time.
template <int kThreads, int kOwn>
class Row {
  const SelectPagesParams& p;
  Shared& sh;
  const float* scores;
  int32_t* pages;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t count, first, last;  // pages [first, last) are selected by score
  uint32_t keys[kOwn];

  static constexpr uint32_t kTile = kThreads * kOwn;

  // Key i of a thread is that of a page; a warp's are neighbours.
  __device__ __forceinline__ uint32_t page_of(uint32_t tile, int i) const {
    return tile * kTile + (warp * kOwn + i) * 32 + lane;
  }

 public:
  __device__ Row(const SelectPagesParams& params, Shared& shared) : p(params), sh(shared) {
    scores = p.scores + int64_t{blockIdx.x} * p.width;
    pages = p.pages + int64_t{blockIdx.x} * p.most;
  }

  __device__ void run() {
    float read[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t page = page_of(0, i);
      read[i] = page < p.width ? __ldg(scores + page) : 0.0f;
    }
    const int listed = p.counts[blockIdx.x], budget = max(p.budgets[blockIdx.x], 0);
    auto* bins = reinterpret_cast<uint4*>(sh.bins);
#pragma unroll
    for (int i = threadIdx.x; i < (kPasses << kBits) / 4; i += kThreads) bins[i] = uint4{};
    count = min(static_cast<uint32_t>(max(listed, 0)), p.width);
    first = min(p.sink, count);
    last = max(count - min(p.recent, count), first);
    const uint32_t always = first + (count - last);
    const uint32_t room = static_cast<uint32_t>(budget) > always ? budget - always : 0;
    if (last - first <= room) {
      write_first(count);
      return;
    }
    if (page_of(0, 0) - lane >= first && page_of(0, kOwn) - lane <= last) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) keys[i] = key_of(read[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) keys[i] = key_at(page_of(0, i), read[i]);
    }
    __syncthreads();
    // Keys whose bits from `shift` on are less than `bound` are selected, and of those with these
    // bits the first `equal`.
    uint32_t bound = 0, equal = 0;
    int shift = 0;
    if (room > 0) search(room, bound, shift, equal);
    write(bound, shift, equal);
  }

 private:
  __device__ __forceinline__ uint32_t tiles() const { return (count + kTile - 1) / kTile; }

  __device__ __forceinline__ uint32_t key_at(uint32_t page, float score) const {
    return page >= first && page < last ? key_of(score) : kNone;
  }

  // Brings the keys of a tile; those of a row that is one tile stay.
  __device__ __forceinline__ void fetch(uint32_t tile) {
    if (tiles() == 1) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t page = page_of(tile, i);
      keys[i] = page >= first && page < last ? key_of(__ldg(scores + page)) : kNone;
    }
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

  __device__ __forceinline__ void search(uint32_t room, uint32_t& bound, int& shift,
                                         uint32_t& equal) {
    equal = room;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      constexpr int kAbove[kPasses] = {32, 21, 10}, kShift[kPasses] = {21, 10, 0};
      shift = kShift[pass];
      count_keys(sh.bins[pass], bound, kAbove[pass], shift);
      if (pass + 1 < kPasses) {
        find_bin<kThreads, 1 << kBits>(sh, sh.bins[pass], equal);
      } else {
        find_bin<kThreads, 1 << (kBits - 1)>(sh, sh.bins[pass], equal);
      }
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

  // Selects pages [0, number).
  __device__ __forceinline__ void write_first(uint32_t number) const {
    const uint32_t selected = min(number, p.most);
    for (uint32_t i = threadIdx.x; i < p.most; i += kThreads) {
      pages[i] = i < selected ? static_cast<int32_t>(i) : -1;
    }
    if (threadIdx.x == 0) p.selected[blockIdx.x] = static_cast<int32_t>(selected);
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
  // with keys at the bound `tied`.
  __device__ __forceinline__ void write(uint32_t bound, int shift, uint32_t equal) {
    uint32_t sure = 0, tied = 0;
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
      if (lane < kOwn) better |= pages_between(base, 0, first) | pages_between(base, last, count);
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
    const uint32_t selected = min(sure + min(tied, equal), p.most);
    for (uint32_t i = selected + threadIdx.x; i < p.most; i += kThreads) pages[i] = -1;
    if (threadIdx.x == 0) p.selected[blockIdx.x] = static_cast<int32_t>(selected);
  }
};

}  // namespace

// Named for the scores of a row that a thread block holds.
#define KERNEL(HELD, THREADS, BLOCKS)                                                  \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                        \
      select_pages_##HELD(const __grid_constant__ SelectPagesParams params) {          \
    __shared__ Shared shared;                                                          \
    Row<THREADS, (HELD) / (THREADS)>(params, shared).run();                            \
  }

KERNEL(2048, 256, 4)
KERNEL(4096, 512, 2)
KERNEL(8192, 512, 2)
KERNEL(16384, 1024, 1)
