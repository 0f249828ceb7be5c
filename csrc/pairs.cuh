// Rotated pairs of a vector as threads hold them: two packs of V elements, V pairs.
//
// Half pairing: pair e has element e of each pack. Interleaved: a pack of several elements has
// whole pairs, and the second pack lies as far from the first as with half pairing, so that threads
// next to each other read side by side; a pack of a single element has its partner next to it.
#pragma once

#include "vector.cuh"

// Whether a vector has both elements of its pairs.
template <int V, bool kInterleaved>
constexpr bool kWholePairs = kInterleaved && V > 1;

// What a thread needs to rotate its two vectors: a number of each pair, of the pairs' `numbers`.
template <int V, bool kInterleaved, typename Wide>
__device__ __forceinline__ Pack<Wide, V> of_pairs(const Wide* numbers, int pairs, int column) {
  if constexpr (kWholePairs<V, kInterleaved>) {
    const auto first = load<Wide, V / 2>(numbers + column * (V / 2));
    const auto second = load<Wide, V / 2>(numbers + pairs / 2 + column * (V / 2));
    Pack<Wide, V> both;
#pragma unroll
    for (int e = 0; e < V; ++e) both.at[e] = e < V / 2 ? first.at[e] : second.at[e - V / 2];
    return both;
  } else {
    return load<Wide, V>(numbers + column * V);
  }
}

// The first element of a column's first pack.
template <int V, bool kInterleaved>
__device__ __forceinline__ int first_of_pairs(int column) {
  return (kInterleaved && V == 1 ? 2 : V) * column;
}

// From the first pack to the second, in a vector of so many pairs.
template <int V, bool kInterleaved>
__device__ __forceinline__ int pair_distance(int pairs) {
  return kInterleaved && V == 1 ? 1 : pairs;
}

// Calls turn(e, x, y) for each of the V pairs.
template <int V, bool kInterleaved, typename T, typename Turn>
__device__ __forceinline__ void for_each_pair(Pack<T, V>& first, Pack<T, V>& second, Turn turn) {
#pragma unroll
  for (int e = 0; e < V; ++e) {
    T& x = !kInterleaved ? first.at[e] : 2 * e < V ? first.at[(2 * e) % V] : second.at[(2 * e) % V];
    T& y = !kInterleaved    ? second.at[e]
           : 2 * e + 1 < V  ? first.at[(2 * e + 1) % V]
                            : second.at[(2 * e + 1) % V];
    turn(e, x, y);
  }
}
