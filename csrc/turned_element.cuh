// Elements of queries turned back to where a segment's keys were, one at a time.
#pragma once

#include "rotation.cuh"

// An element of a query as keys of an entry with this delta meet it. This is rare, and not inlined.
template <typename T>
__device__ __noinline__ float turned(const T* vector, int d, int delta, const float* inv_freq,
                                     int pairs, bool interleaved) {
  return turned_element(vector, d, pairs, interleaved, [&](int pair) {
    float2 angle;
    cos_sin(half_turns(-delta, inv_freq[pair]), angle.x, angle.y);
    return angle;
  });
}
