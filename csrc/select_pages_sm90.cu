// targets: sm_90a
// select_pages for Hopper where rows are long and few: select_pages.cu with a row shared by the
// thread blocks of a cluster, as one alone would read a long row again in each pass, or leave most
// of the GPU idle.
//
// 1. Of the pages that a row lists, the blocks have equal parts, one behind the other.
// 2. Each counts its part in its own bins. Then all wait for each other, and the first warp of each
//    looks in the shared memory of all for the bin that is sought: first among sums of 64 bins each
//    and then among the 64. What a block writes for the others is never written again, so each
//    pass needs one barrier of the cluster.
// 3. On the way a block adds up how much of what is selected the parts before its own have. So it
//    knows where in the results its pages begin, and lists them without another word.
//
// What is selected is that of select_pages.cu, whatever the parts are.

#include "cluster.cuh"
#include "row_choice.cuh"
#include "tensor_core.cuh"

namespace {

constexpr int kParts = 8;   // thread blocks of a cluster: as many as any GPU of this kind grants
constexpr int kGroup = 64;  // bins whose sum is known
constexpr int kGroups = (1 << kBits) / kGroup;
static_assert(kGroups == 32 && kGroup == 64, "a lane has one sum, and two bins");

struct SharedByParts : Shared {
  uint32_t groups[kPasses][kGroups];
  // Of the bin that the last pass found and of those before it: what earlier parts have.
  uint32_t earlier_before, earlier_within;
};

// What all parts of the row count, and what those before this one do.
struct Counts {
  uint32_t all = 0, earlier = 0;

  __device__ __forceinline__ void add(uint32_t number, bool is_earlier) {
    all += number;
    earlier += is_earlier ? number : 0;
  }
};

// The lane at which the `wanted`-th is, counted from 1, and what those before it count.
struct Place {
  uint32_t lane;
  Counts before;
};

__device__ __forceinline__ Place place_of(const Counts& own, uint32_t wanted) {
  const uint32_t up_to = sum_up_to(own.all), earlier = sum_up_to(own.earlier);
  const uint32_t lane = __ffs(__ballot_sync(kAll, up_to >= wanted)) - 1;
  const Counts before{__shfl_sync(kAll, up_to - own.all, lane),
                      __shfl_sync(kAll, earlier - own.earlier, lane)};
  return {lane, before};
}

// A row that is a cluster's, for one of its blocks.
template <int kThreads, int kOwn>
class SharedRow : RowPart<kThreads, kOwn, kParts> {
  using Base = RowPart<kThreads, kOwn, kParts>;
  using Base::begin, Base::end, Base::first, Base::lane, Base::last, Base::p, Base::part, Base::row,
      Base::warp;
  SharedByParts& sh;
  uint32_t sure = 0, tied = 0;  // of earlier parts

 public:
  __device__ SharedRow(const SelectPagesParams& params, SharedByParts& shared)
      : Base(params, cluster_rank()), sh(shared) {}

  // All blocks of a cluster go the same way here, as what they ask is the row's alone.
  __device__ void run() {
    const int listed = p.counts[row], budget = max(p.budgets[row], 0);
    this->clear(sh);
    const uint32_t room = this->take_row(listed, budget);
    if (last - first <= room) {
      this->write_first(end);
      return;
    }
    const uint32_t selected = min(first + room + (end - last), p.most);
    take_part();
    this->read(0);
    __syncthreads();
    uint32_t bound = 0, equal = 0;
    int shift = 0;
    if (room > 0) {
      const auto find = [&](int pass, uint32_t wanted) { find_bin(pass, wanted); };
      this->search(sh, room, bound, shift, equal, find);
      // All that this block saw of others has passed a barrier: they may end. It stays itself until
      // no other looks at it.
      cluster_arrive_relaxed();
    }
    // Nothing is left to be told apart: the whole bin is selected.
    if (equal == 0) sure += tied;
    this->write(sh, bound, shift, equal, sure, tied);
    this->write_end(selected);
    if (room > 0) cluster_wait();
  }

 private:
  // Of the row's pages keeps those of the part: whole words of 32, but for the row's end.
  __device__ __forceinline__ void take_part() {
    const uint32_t count = end, each = (count + 32 * kParts - 1) / (32 * kParts) * 32;
    const uint32_t row_first = first, row_last = last;
    begin = min(part * each, count);
    end = min(begin + each, count);
    first = min(max(row_first, begin), end);
    last = min(max(row_last, begin), end);
    // Pages that are always selected, in earlier parts.
    sure = min(row_first, begin) + (max(row_last, begin) - row_last);
  }

  // Sums of 64 bins each, for all blocks to see.
  __device__ __forceinline__ void sum_groups(int pass) {
    constexpr int kBins = (1 << kBits) / kThreads, kLanes = kGroup / kBins;
    const uint32_t* own = sh.bins[pass] + kBins * threadIdx.x;
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kBins; ++i) sum += own[i];
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(kAll, sum, step);
    if (threadIdx.x % kLanes == 0) sh.groups[pass][threadIdx.x / kLanes] = sum;
  }

  __device__ __forceinline__ void find_bin(int pass, uint32_t wanted) {
    sum_groups(pass);
    cluster_arrive();
    cluster_wait();
    if (warp == 0) look_everywhere(pass, wanted);
    __syncthreads();
    sure += sh.earlier_before;
    tied = sh.earlier_within;
  }

  // The first warp's.
  __device__ __forceinline__ void look_everywhere(int pass, uint32_t wanted) {
    Counts group;
    const uint32_t of_lane = shared_address(&sh.groups[pass][lane]);
#pragma unroll
    for (int i = 0; i < kParts; ++i) group.add(load_number(address_in(of_lane, i)), i < part);
    const Place outer = place_of(group, wanted);
    Counts low, high;
    const uint32_t two = shared_address(&sh.bins[pass][kGroup * outer.lane + 2 * lane]);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const uint2 bins = load_pair(address_in(two, i));
      low.add(bins.x, i < part);
      high.add(bins.y, i < part);
    }
    const Counts both{low.all + high.all, low.earlier + high.earlier};
    const Place inner = place_of(both, wanted - outer.before.all);
    if (lane != inner.lane) return;
    const uint32_t before = outer.before.all + inner.before.all;
    const bool is_second = wanted > before + low.all;
    sh.bin = kGroup * outer.lane + 2 * lane + (is_second ? 1 : 0);
    sh.before = before + (is_second ? low.all : 0);
    sh.within = is_second ? high.all : low.all;
    sh.earlier_before =
        outer.before.earlier + inner.before.earlier + (is_second ? low.earlier : 0);
    sh.earlier_within = is_second ? high.earlier : low.earlier;
  }
};

}  // namespace

// Named for the scores of a row that a cluster holds.
#define KERNEL(HELD, THREADS, BLOCKS)                                                          \
  extern "C" __global__ void __cluster_dims__(kParts, 1, 1) __launch_bounds__(THREADS, BLOCKS) \
      select_pages_sm90_##HELD(const __grid_constant__ SelectPagesParams params) {             \
    __shared__ SharedByParts shared;                                                           \
    SharedRow<THREADS, (HELD) / (kParts * (THREADS))>(params, shared).run();                   \
  }

KERNEL(16384, 256, 4)
KERNEL(32768, 512, 2)
KERNEL(65536, 512, 2)
KERNEL(131072, 1024, 1)
