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
// a row's answer depends on that row alone. Rows too long for registers are read in each pass; on
// Hopper select_pages_sm90.cu takes them, and others that are long, where rows are few.
//
// What counts and budgets say is not checked on the host where they lie here: a count beyond the
// row is the row's width, and what does not fit into a row of results is left out.

#include "row_choice.cuh"

namespace {

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

// A row that is one thread block's.
template <int kThreads, int kOwn>
class Row : RowPart<kThreads, kOwn, 1> {
  using Base = RowPart<kThreads, kOwn, 1>;
  using Base::end, Base::first, Base::keys, Base::lane, Base::last, Base::p, Base::page_of,
      Base::row, Base::scores;
  Shared& sh;

 public:
  __device__ Row(const SelectPagesParams& params, Shared& shared) : Base(params, 0), sh(shared) {}

  __device__ void run() {
    float read[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t page = page_of(0, i);
      read[i] = page < p.width ? __ldg(scores + page) : 0.0f;
    }
    const int listed = p.counts[row], budget = max(p.budgets[row], 0);
    this->clear(sh);
    const uint32_t room = this->take_row(listed, budget);
    if (last - first <= room) {
      this->write_first(end);
      return;
    }
    if (page_of(0, 0) - lane >= first && page_of(0, kOwn) - lane <= last) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) keys[i] = key_of(read[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) keys[i] = this->key_at(page_of(0, i), read[i]);
    }
    __syncthreads();
    uint32_t bound = 0, equal = 0;
    int shift = 0;
    const auto find = [&](int pass, uint32_t wanted) {
      if (pass + 1 < kPasses) {
        find_bin<kThreads, 1 << kBits>(sh, sh.bins[pass], wanted);
      } else {
        find_bin<kThreads, 1 << (kBits - 1)>(sh, sh.bins[pass], wanted);
      }
    };
    if (room > 0) this->search(sh, room, bound, shift, equal, find);
    this->write_end(this->write(sh, bound, shift, equal, 0, 0));
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
