// Cosines and sines of rotary embedding, accurate for any whole number of positions.
#pragma once

#include <cstdint>

// The angle delta · inv_freq as a multiple of π within [-1, 1], or a rounding past it. The product
// is exact in f64 while |delta| < 2^29, and 2π is subtracted in two parts, so that a million
// positions cost no digits that a float has.
__device__ __forceinline__ double half_turns(int32_t delta, float inv_freq) {
  constexpr double kTurn = 6.283185307179586;         // 2π rounded to f64
  constexpr double kTurnRest = 2.4492935982947064e-16;  // what the rounding left
  constexpr double kPerTurn = 0.15915494309189535;
  constexpr double kPerPi = 0.3183098861837907;
  const double angle = static_cast<double>(delta) * static_cast<double>(inv_freq);
  const double turns = rint(angle * kPerTurn);
  const double rest = fma(-turns, kTurnRest, fma(-turns, kTurn, angle));
  return rest * kPerPi;
}

__device__ __forceinline__ void cos_sin(double half_turns, float& cosine, float& sine) {
  sincospif(static_cast<float>(half_turns), &sine, &cosine);
}

__device__ __forceinline__ void cos_sin(double half_turns, double& cosine, double& sine) {
  sincospi(half_turns, &sine, &cosine);
}

// Element d of a vector, turned. `angle_of(pair)` has the cosine and sine of a pair's angle; with
// `interleaved`, pairs are neighbours.
template <typename T, typename AngleOf>
__device__ __forceinline__ float turned_element(const T* vector, int d, int pairs,
                                                bool interleaved, AngleOf angle_of) {
  const float raw = static_cast<float>(vector[d]);
  if (d >= 2 * pairs) return raw;
  const bool is_first = interleaved ? d % 2 == 0 : d < pairs;
  const int other = interleaved ? d ^ 1 : (is_first ? d + pairs : d - pairs);
  const float2 angle = angle_of(interleaved ? d / 2 : min(d, other));
  const float rest = static_cast<float>(vector[other]) * angle.y;
  return raw * angle.x + (is_first ? -rest : rest);
}
