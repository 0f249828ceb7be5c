// What vectors of top-r pages of every kind of numbers have in common, for a warp: their basis,
// their bitmaps, and where the parts of a page lie.
#pragma once

#include <cstdint>

#include "api.h"
#include "bases.cuh"
#include "top_r.cuh"
#include "top_r_bits.cuh"
#include "turned_bases.cuh"

// Of four counts in one register, or two, those of the lanes that come before: of so many lanes
// which are kStep apart, and of which this one is `own`.
template <int kStep, int kLanes>
__device__ __forceinline__ uint32_t counts_before(uint32_t counts, int own) {
  uint32_t sum = counts;
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const uint32_t lower = __shfl_up_sync(~0u, sum, kStep * step, kStep * kLanes);
    if (own >= step) sum += lower;
  }
  return sum - counts;
}

// `kWhole`: each channel has a bit of its own.
template <typename T, int D, bool kWhole>
class TopRPages {
 public:
  using Element = T;
  static constexpr int kDim = D;

  // By all threads of a block, as `directions`: begins with pages of a basis; which is no longer
  // known if they cannot be packed in it.
  template <typename Shared>
  __device__ void enter(Shared&, BasisKey&, int) const {}

  // Whether they have a basis. Of those without one no entry has tokens, unless `enter` said so.
  __device__ bool has_basis() const { return true; }

  __device__ Directions directions(const BasisKey& key, int rank, int side) const {
    if (!key.known()) return {nullptr, nullptr, 0};
    const float* mean = basis_at(bases, key.number, rank, side, D);
    return {mean, mean + D, bits.channels()};
  }

  // By all threads: keeps what `score` needs of rotated queries beside registers.
  template <typename Shared>
  __device__ void take_queries(Shared&, const TurnedBases<T, D>&) const {}

  // Before a warp reads a page.
  __device__ void open(unsigned char* page) const {
    bits.mend(page, page_tokens);
    bits.mend(page + places.side, page_tokens);
  }

 protected:
  static constexpr int kOfKey = D / 4;    // channels of a key that a lane takes
  static constexpr int kOfValue = D / 8;  // of a value

  const int lane;
  const GroupBits<D, kWhole> bits;
  const TopRPlaces places;

  __device__ explicit TopRPages(const AttendPackedParams& params)
      : lane(threadIdx.x % 32),
        bits(params.top_r),
        places(top_r_places(params.top_r, params.attend.kv.page_tokens)),
        bases(params.bases),
        page_tokens(static_cast<int>(params.attend.kv.page_tokens)) {}

 private:
  const BasesParams& bases;
  const int page_tokens;
};
