// A warp's part of attention over top-r pages, in the basis of their text: rotated queries,
// weights, and what they add up to. The basis itself is turned_bases.cuh.
#pragma once

#include <cmath>

#include "api.h"
#include "decode_units.cuh"
#include "packed_rows.cuh"
#include "packed_softmax.cuh"
#include "paged.cuh"
#include "tensor_core.cuh"
#include "top_r.cuh"
#include "top_r_numbers.cuh"
#include "turned_bases.cuh"

// Rows of T over pages of numbers of so many bits, with scales of T.
template <typename T, int D, int kBits>
class TopRRows {
 public:
  using Element = T;
  static constexpr int kDim = D;
  static constexpr bool kTurned = true;
  static constexpr int kSteps = D / 16;

  struct Shared {
    uint32_t selectors[kSelectors];
    TurnedBases<T, D> turned;
  };

  __device__ explicit TopRRows(const AttendPackedParams& params)
      : p(params.attend),
        of_pages(params.top_r),
        lane(threadIdx.x % 32),
        shift(__ffs(params.top_r.group) - 1),
        places(top_r_places(params.top_r, params.attend.kv.page_tokens)) {}

  __device__ void prepare(Shared& sh) {
    selectors = sh.selectors;
    for (int i = threadIdx.x; i < kSelectors; i += blockDim.x) sh.selectors[i] = selectors_of(i);
  }

  // An entry whose block has no basis is one without tokens.
  __device__ Entry entry(int index, int rank) const {
    Entry found = read_entry(p.kv, index, rank);
    if (found.begin < found.end && basis_number(of_pages, found.block, rank) < 0) {
      found.end = found.begin;
    }
    return found;
  }

  // Pages are alike that have the same basis and delta; rotates the item's queries into it.
  template <int kThreads>
  __device__ int alike(Shared& sh, const Heads& of, const EntryRange& entries, int rank, int from,
                       int to) {
    const auto key_of = [&](int unit) {
      const Entry at = entry(entries[unit], rank);
      return at.begin < at.end ? BasisKey{basis_number(of_pages, at.block, rank), at.delta}
                               : BasisKey{-1, 0};
    };
    const int end = sh.turned.template alike<kThreads>(from, to, key_of);
    sh.turned.template turn_in<kThreads>(p, of_pages, of, rank);
    return end;
  }

  // Begins with the query heads of an item in the basis of its next pages.
  __device__ void begin(const Heads&, const Shared& sh) {
    sh.turned.take(queries, offsets);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[k][e] = 0;
    }
    state = {{-INFINITY, -INFINITY}, {0, 0}};
  }

  // Takes in what the row sees of a page.
  __device__ void attend(const Heads&, const PackedRun& run, const unsigned char* page) {
    if (run.entry.begin >= run.entry.end) return;
    const int tokens = static_cast<int>(p.kv.page_tokens);
    const bool whole = is_seen_whole(run, tokens);
#pragma unroll 1
    for (int token = run.entry.begin / 32 * 32; token < run.entry.end; token += 32) {
      const uint32_t mask = whole ? ~0u : mask_32(run, token, tokens);
      if (mask != 0) attend_32(page, token, mask);
    }
  }

  // As PackedRows; rows are in the basis.
  __device__ void leave(const Heads& of, float* part, int pitch, State* states, bool any) {
    state.leave(states);
    __syncwarp();
    if (!any || lane % 4 * 2 >= of.count) return;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = D / 8 * (lane / 4) + 2 * k + e / 2;
        part[(lane % 4 * 2 + e % 2) * pitch + column] = out[k][e];
      }
    }
  }

  // Takes what `sum` adds up of the warps' parts back into channels, and adds it to what pages of
  // other bases left there.
  template <int kThreads, typename Sum>
  __device__ void turn_back(Shared& sh, const Heads& of, const State* states, bool first,
                            Sum sum) {
    sum([&](int i, const float4& value) { sh.turned.put(i, value); });
    const float4 value = sh.turned.template turn_back<kThreads>(of_pages, of, states);
    const int q = threadIdx.x / (D / 4);
    if (q >= of.count) return;
    if (first) {
      held = value;
      of_held = states[q];
    } else {
      add(held, of_held, value, states[q]);
    }
  }

  // Calls put(i, value, state) with this thread's word of the result.
  template <typename Put>
  __device__ void result(const Heads& of, Put put) {
    if (threadIdx.x < of.count * (D / 4)) put(threadIdx.x, held, of_held);
  }

 private:
  static constexpr int kOfKey = D / 4;    // channels of a key that a lane takes
  static constexpr int kOfValue = D / 8;  // of a value
  using KeyNumbers = Numbers<T, kBits, kOfKey / 8>;
  using ValueNumbers = Numbers<T, kBits, kOfValue / 8>;

  const AttendParams& p;
  const TopRParams& of_pages;
  const int lane;
  const int shift;  // channels of a group, as a power of two
  const TopRPlaces places;
  const uint32_t* selectors;
  uint32_t queries[kSteps][2];  // B fragments: rows are channels, columns query heads
  float offsets[2];             // of queries lane % 4 · 2 and + 1: what all keys score beside
  float out[kSteps][4];         // of the same, by channels
  Softmax state;
  // Of all threads of a block: a word of the result in channels, and its query's sums.
  float4 held;
  State of_held;

  // Bits of the groups of `kCount` channels from `channel` on.
  template <int kCount>
  __device__ uint32_t group_bits(const unsigned char* side, int token, int channel) const {
    const int first = channel >> shift;
    const int left = min(static_cast<int>(of_pages.channels >> shift) - first, kCount >> shift);
    const int bit = 8 * token * places.bitmap + first;
    const auto* words = reinterpret_cast<const uint32_t*>(side) + (bit >> 5);
    const uint32_t bits = __funnelshift_r(words[0], words[1], bit);
    return left <= 0 ? 0u : bits & (~0u >> (32 - left));
  }

  // Of a token's channels those of these groups that are kept, behind so many groups that are; of
  // what is not `seen` none.
  template <typename Of>
  __device__ Of numbers_of(const unsigned char* page, int side, int token, uint32_t groups,
                           int before, bool seen) const {
    const int most = of_pages.kept >> shift;
    const int nth = min(before, most);
    const uint32_t bits = seen ? lowest_bits(groups, most - nth) : 0u;
    const int row = side + places.numbers + token * places.row;
    return Of(channel_bits(bits, shift), page, row, nth << shift);
  }

  __device__ float scale_of_vector(const unsigned char* side, int token) const {
    if (kBits == kBf16Numbers) return 1;
    const T scale = reinterpret_cast<const T*>(side + places.scales)[token];
    return KeyNumbers::kUnit * Scales<T>::widen(scale);
  }

  // Products with 16 keys: lane has keys lane / 4 and + 8 of queries lane % 4 · 2 and + 1.
  __device__ void score(float (&s)[4], const unsigned char* page, int slot) const {
    const int first = slot + lane / 4, channel = kOfKey * (lane % 4);
    const uint32_t low = group_bits<kOfKey>(page, first, channel);
    const uint32_t high = group_bits<kOfKey>(page, first + 8, channel);
    // Both counts in one register, added up over the lanes of a key.
    const uint32_t own = __popc(low) | __popc(high) << 16;
    uint32_t sum = own;
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const uint32_t lower = __shfl_up_sync(~0u, sum, step, 4);
      if (lane % 4 >= step) sum += lower;
    }
    sum -= own;
    auto of_low = numbers_of<KeyNumbers>(page, 0, first, low, sum & 0xFFFF, true);
    auto of_high = numbers_of<KeyNumbers>(page, 0, first + 8, high, sum >> 16, true);
    float dot[4] = {0, 0, 0, 0};
    multiply_keys<0>(dot, of_low, of_high);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = scale_of_vector(page, first + 8 * half);
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        s[2 * half + q] = fmaf(dot[2 * half + q], scale, offsets[q]);
      }
    }
  }

  // Adds what the keys' channels from the `kEight`-th eight of a lane on make with the queries.
  template <int kEight>
  __device__ __forceinline__ void multiply_keys(float (&dot)[4], KeyNumbers& low,
                                                KeyNumbers& high) const {
    if constexpr (kEight < kOfKey / 8) {
      const auto x = low.template take<kEight>(selectors);
      const auto y = high.template take<kEight>(selectors);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t a[4] = {
            KeyNumbers::channels(x, 2 * j), KeyNumbers::channels(y, 2 * j),
            KeyNumbers::channels(x, 2 * j + 1), KeyNumbers::channels(y, 2 * j + 1)};
        const uint32_t(&q)[2] = queries[2 * kEight + j];
        multiply_add<T>(dot, a, q[0], q[1]);
      }
      multiply_keys<kEight + 1>(dot, low, high);
    }
  }

  // Takes in 32 tokens, of which bit j of the mask says whether the row sees token + j.
  __device__ void attend_32(const unsigned char* page, int token, uint32_t mask) {
    float s[2][4] = {}, shrink[2], base[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if ((mask >> (16 * u) & 0xFFFF) != 0) score(s[u], page, token + 16 * u);
    }
    state.take_in(s, mask, p, shrink, base);
    if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[k][e] *= shrink[e % 2];
      }
    }
    const unsigned char* values = page + places.side;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const uint32_t of_unit = mask >> (16 * u) & 0xFFFF;
      if (of_unit == 0) continue;
      uint32_t weights[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = 8 * half + lane / 4;
        // Of what is not seen the scale may be anything, and nothing times infinity is not nothing.
        const bool seen = (of_unit >> key & 1) != 0;
        const float scale = seen ? scale_of_vector(values, token + 16 * u + key) : 0.0f;
        float of_value[2];
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          const float weight = exp2_fast(s[u][2 * half + q] - base[q]);
          state.l[q] += weight;
          of_value[q] = weight * scale;
        }
        weights[half] = transpose_matrix(pack<T>(of_value[0], of_value[1]));
      }
      add_values(page, token + 16 * u, of_unit, weights);
    }
  }

  // Values of 16 tokens by their weights. Of those that are not seen numbers count as zeros.
  __device__ void add_values(const unsigned char* page, int slot, uint32_t seen,
                             const uint32_t (&weights)[2]) {
    const unsigned char* side = page + places.side;
    const int channel = kOfValue * (lane / 4), first = lane % 4 * 2;
    const auto token_of = [&](int i) { return first + i % 2 + 8 * (i / 2); };
    uint32_t bits[4], own = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bits[i] = group_bits<kOfValue>(side, slot + token_of(i), channel);
      own |= __popc(bits[i]) << (8 * i);
    }
    // Four counts in one register, added up over the lanes of a token: 128 at most.
    uint32_t sum = own;
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      const uint32_t lower = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += lower;
    }
    sum -= own;
    const auto numbers = [&](int i) {
      return numbers_of<ValueNumbers>(page, places.side, slot + token_of(i), bits[i],
                                      sum >> (8 * i) & 0xFF, (seen >> token_of(i) & 1) != 0);
    };
    ValueNumbers of[4] = {numbers(0), numbers(1), numbers(2), numbers(3)};
    multiply_values<0>(of, weights);
  }

  // Adds the values' channels from the `kEight`-th eight of a lane on, times their weights.
  template <int kEight>
  __device__ __forceinline__ void multiply_values(ValueNumbers (&of)[4],
                                                  const uint32_t (&weights)[2]) {
    if constexpr (kEight < kOfValue / 8) {
      const typename ValueNumbers::Eight x[4] = {
          of[0].template take<kEight>(selectors), of[1].template take<kEight>(selectors),
          of[2].template take<kEight>(selectors), of[3].template take<kEight>(selectors)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint2 early = ValueNumbers::tokens(x[0], x[1], i);
        const uint2 late = ValueNumbers::tokens(x[2], x[3], i);
        const uint32_t a[4] = {early.x, early.y, late.x, late.y};
        multiply_add<T>(out[4 * kEight + i], a, weights[0], weights[1]);
      }
      multiply_values<kEight + 1>(of, weights);
    }
  }
};
