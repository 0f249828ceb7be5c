// Which numbers of vectors a top-r page keeps: rust/reference/src/top_r.rs, bit for bit.
//
// The simple version:
//   sort a vector's groups by energy; keep the first of them
//
// What makes it fast: four lanes have a vector, so a warp chooses for eight at once. They guess the
// least energy that is kept until as many groups have it as are: some six counts, and no sorting.
#pragma once

#include <cstdint>

#include "basis_numbers.cuh"

constexpr int kRun = 32;  // neighbouring channels that a lane has, of every 128

// Of the four lanes that have a vector.
__device__ __forceinline__ int lane_of_four() { return threadIdx.x % 4; }

template <typename T>
__device__ __forceinline__ T sum_of_four(T x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

template <typename T>
__device__ __forceinline__ T largest_of_four(T x) {
  x = max(x, __shfl_xor_sync(~0u, x, 1));
  return max(x, __shfl_xor_sync(~0u, x, 2));
}

// What the lanes before have together.
__device__ __forceinline__ int sum_before(int x) {
  int sum = x;
#pragma unroll
  for (int apart = 1; apart < 4; apart *= 2) {
    const int other = __shfl_up_sync(~0u, sum, apart, 4);
    if (lane_of_four() >= apart) sum += other;
  }
  return sum - x;
}

// How large the last of the `wanted` largest of numbers is, found by their bits.
template <typename Number>
class Threshold {
 public:
  // Of so many numbers, of which this is the largest.
  __device__ Threshold(Number most, int count, int of_wanted)
      : low(0), wanted(of_wanted), found(count), high(most + 1), above(0), rounds(0) {}

  // Whether as many as wanted are at least `low`, or those that are too many are equal.
  __device__ bool is_found() const { return found == wanted || high - low == 1; }

  // Where it may lie: at first eight powers of two below the largest number; then where it were if
  // numbers lay evenly; and in every third round half way, as they may lie in any way.
  __device__ Number guess() const {
    const Number range = high - low;
    if (rounds == 0 && high - 1 > kRange) return high - 1 - kRange;
    if (rounds % 3 == 2) return low + range / 2;
    const float share = __fdividef(found - wanted, found - above);
    const Number further = static_cast<Number>(static_cast<float>(range) * share);
    return low + min(max(further, Number{1}), range - 1);
  }

  // So many numbers are at least a guess.
  __device__ void take(Number at, int count) {
    if (is_found()) return;
    ++rounds;
    if (count >= wanted) {
      low = at;
      found = count;
    } else {
      high = at;
      above = count;
    }
  }

  Number low;  // so many numbers are at least this: as many as wanted, or more
  int wanted, found;

 private:
  static constexpr Number kRange = sizeof(Number) == 4 ? Number{8} << 23 : Number{16} << 52;
  Number high;  // fewer than wanted are at least this:
  int above;    // so many
  int rounds;
};

// Energies of groups of so many channels: of one, the size of its number has the same order. Of
// numbers that are not below 0 the bits have the order of the numbers.
template <int kGroup>
struct Energy {
  using Number = uint64_t;
  double value;

  __device__ static Energy of(const float* numbers) {
    double energy = 0;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const double c = numbers[i];
      energy = __dadd_rn(energy, __dmul_rn(c, c));
    }
    return {energy};
  }
  __device__ Number bits() const { return static_cast<Number>(__double_as_longlong(value)); }
  __device__ bool is_least(Number bound) const {
    return value >= __longlong_as_double(static_cast<long long>(bound));
  }
};

template <>
struct Energy<1> {
  using Number = uint32_t;
  float value;

  __device__ static Energy of(const float* numbers) { return {fabsf(numbers[0])}; }
  __device__ Number bits() const { return __float_as_uint(value); }
  __device__ bool is_least(Number bound) const { return value >= __uint_as_float(bound); }
};

// What is kept of a vector of a tile, in all of the four lanes that have it. Lane i has channels
// 128 · w + 32 · i and those behind it; bit b of its word w is that of their group b.
template <int kWords, int kGroup>
struct Choice {
  static constexpr int kOfQuad = 4 / kGroup;      // groups of four channels
  static constexpr int kOfRun = kRun / kGroup;    // of a lane's channels
  using Number = typename Energy<kGroup>::Number;

  uint32_t words[kWords];
  float largest;  // of the numbers that are kept; NaN where one of the vector's is not finite

  template <typename Room>
  __device__ Choice(const TopRParams& of, const Room& room, int token) {
    const int channels = of.channels, groups = channels / kGroup;
    const float* numbers = room.numbers + token * room.pitch;
    Energy<kGroup> energies[kWords][kOfRun];
    uint32_t most = 0;
    each_quad([&](int w, int j, int first) {
      Pack<float, 4> four = {};
      if (first < channels) four = load<float, 4>(numbers + first);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (first + e >= channels) four.at[e] = 0.0f;
        most = max(most, size_bits(four.at[e]));
      }
#pragma unroll
      for (int b = 0; b < kOfQuad; ++b) {
        energies[w][j * kOfQuad + b] = Energy<kGroup>::of(four.at + b * kGroup);
      }
    });
    most = largest_of_four(most);
    const bool finite = most < 0x7F800000 && isfinite(room.powers[token]);
    Number most_energy = 0;
    // Of a vector that is not finite the first groups are kept.
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll
      for (int b = 0; b < kOfRun; ++b) {
        if (!finite) energies[w][b].value = 0;
        most_energy = max(most_energy, energies[w][b].bits());
      }
    }
    Threshold<Number> threshold(largest_of_four(most_energy), groups,
                                static_cast<int>(of.kept) / kGroup);
    while (__any_sync(~0u, !threshold.is_found())) {
      const Number guess = threshold.guess();
      threshold.take(guess, sum_of_four(count(energies, guess)));
    }
    choose(energies, threshold, groups);
    // The largest number is kept where each is a group.
    if (kGroup > 1) most = largest_kept(numbers);
    largest = finite ? __uint_as_float(most) : NAN;
  }

  // Calls what(w, j, channel) for quads j of each run, which lanes begin with in other banks.
  template <typename Do>
  static __device__ __forceinline__ void each_quad(Do what) {
    const int lane = lane_of_four();
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll
      for (int j = 0; j < kRun / 4; ++j) {
        what(w, j, 128 * w + kRun * lane + (j + 2 * lane) % (kRun / 4) * 4);
      }
    }
  }

  // Groups that are kept of what lies before the lane's channels of a word.
  __device__ __forceinline__ int before(int word) const {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int own = __popc(words[w]);
      if (w < word) sum += sum_of_four(own);
      if (w == word) sum += sum_before(own);
    }
    return sum;
  }

 private:
  using Energies = Energy<kGroup>[kWords][kOfRun];

  static __device__ int count(const Energies& energies, Number bound) {
    int found = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll
      for (int b = 0; b < kOfRun; ++b) found += energies[w][b].is_least(bound);
    }
    return found;
  }

  // Bits of groups for which is_marked(energy), in the places of their channels.
  template <typename IsMarked>
  static __device__ void mark(const Energies& energies, int groups, uint32_t (&marked)[kWords],
                              IsMarked is_marked) {
    for (uint32_t& word : marked) word = 0;
    each_quad([&](int w, int j, int first) {
      uint32_t four = 0;
#pragma unroll
      for (int b = 0; b < kOfQuad; ++b) {
        four |= static_cast<uint32_t>(is_marked(energies[w][j * kOfQuad + b])) << b;
      }
      const int there = groups - first / kGroup;
      if (there < kOfQuad) four &= there > 0 ? (1u << there) - 1 : 0;
      marked[w] |= four << (first % kRun / kGroup);
    });
  }

  __device__ uint32_t largest_kept(const float* numbers) const {
    uint32_t most = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const float* run = numbers + 128 * w + kRun * lane_of_four();
      for (uint32_t left = words[w]; left != 0; left &= left - 1) {
        const float* group = run + (__ffs(static_cast<int>(left)) - 1) * kGroup;
#pragma unroll
        for (int i = 0; i < kGroup; ++i) most = max(most, size_bits(group[i]));
      }
    }
    return largest_of_four(most);
  }

  // Of equal energies the first groups are kept.
  __device__ void choose(const Energies& energies, const Threshold<Number>& threshold,
                         int groups) {
    mark(energies, groups, words,
         [&](const Energy<kGroup>& energy) { return energy.is_least(threshold.low); });
    if (!__any_sync(~0u, threshold.found != threshold.wanted)) return;
    uint32_t tied[kWords];
    mark(energies, groups, tied,
         [&](const Energy<kGroup>& energy) { return energy.bits() == threshold.low; });
    int left = threshold.found - threshold.wanted;  // so many of the last are not kept
#pragma unroll
    for (int w = kWords - 1; w >= 0; --w) {
      const int own = __popc(tied[w]), all = sum_of_four(own);
      const int behind = all - sum_before(own) - own;
      for (int n = min(max(left - behind, 0), own); n > 0; --n) {
        const uint32_t last = 1u << (31 - __clz(static_cast<int>(tied[w])));
        tied[w] &= ~last;
        words[w] &= ~last;
      }
      left = max(left - all, 0);
    }
  }
};
