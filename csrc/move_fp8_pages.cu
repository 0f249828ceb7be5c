// move_fp8_pages: whole pages between slots on the device and where all pages lie in e4m3 numbers,
// pinned host memory; each page with a power of two for its keys and one for its values.
//
// The simple version:
//   for each of the first `count` moves (row, page, slot), for keys and for values:
//     fetch: slot = home · scale; spill: scale = that of the slot's greatest, home = slot ÷ scale
//
// What makes it as fast as the bus, which carries half the bytes of 16-bit pages:
// 1. into slots a warp asks for 4 KiB before it stores any, as move_pages does, and looks up where
//    its next piece lies meanwhile. Scales lie on the device: the bus carries none;
// 2. out of them a warp has the keys or the values of a page, and reads them twice: for the
//    greatest, and from the cache to round them.
//
// Scales are powers of two, so widening is exact and what is rounded is rounded once. Moves are not
// checked on the host: see move_pages.cu.

#include "api.h"
#include "row_pages.cuh"
#include "vector.cuh"

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kOwn = 8;    // loads of a lane that are under way together
constexpr int kWord = 16;  // numbers of a load of e4m3
constexpr uint32_t kPiece = kOwn * 32 * kWord;

// The greatest exponent of T's finite numbers: `Element::GREATEST_EXPONENT`.
template <typename T>
constexpr int kGreatestExponent = 127;
template <>
constexpr int kGreatestExponent<__half> = 15;

// The bits of the scale for numbers up to `greatest`, as rust/core/src/ops/page_scale.rs says.
template <typename T>
__device__ __forceinline__ uint8_t scale_of(float greatest) {
  const uint32_t bits = __float_as_uint(greatest);
  const int carry = (bits & 0x7fffffu) > 0x680000u ? 1 : 0;
  const int power = static_cast<int>(bits >> 23) - 127 - 8 + carry;
  const int least = max(-126, -kGreatestExponent<T>);
  return static_cast<uint8_t>(min(max(power, least), kGreatestExponent<T> - 8) + 127);
}

// A piece of a page: where it is read and written, the page's scales, how many of the page's
// numbers lie before it, and how many it has; 0 for one that is skipped.
template <typename T>
struct Route {
  const Fp8* from;
  T* to;
  const uint8_t* scales;
  uint32_t first;
  uint32_t numbers;
};

template <typename T>
__device__ __forceinline__ Route<T> route_of(const MoveFp8PagesParams& p, uint64_t piece,
                                             uint64_t pieces) {
  const Route<T> nowhere = {nullptr, nullptr, nullptr, 0, 0};
  if (piece >= pieces) return nowhere;
  const uint64_t move = piece / p.page_pieces;
  const uint32_t first = static_cast<uint32_t>(piece - move * p.page_pieces) * kPiece;
  const int32_t* numbers = p.moves + 3 * move;
  const int64_t page = page_of(p.home, numbers[0], numbers[1]);
  const int64_t slot = page_of(p.slots, numbers[0], numbers[2]);
  if (page < 0 || slot < 0) return nowhere;
  return {static_cast<const Fp8*>(p.home.data) + page * p.page + first,
          static_cast<T*>(p.slots.data) + slot * p.page + first, p.scales + 2 * page, first,
          min(p.page - first, kPiece)};
}

template <typename T>
__device__ __forceinline__ void fetch(const MoveFp8PagesParams& p) {
  const uint32_t warp = threadIdx.x / 32 * gridDim.x + blockIdx.x, warps = kWarps * gridDim.x;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t count = min(static_cast<uint32_t>(max(*p.count, 0)), p.most);
  const uint64_t pieces = uint64_t{count} * p.page_pieces;
  Route<T> route = route_of<T>(p, warp, pieces);
  for (uint64_t piece = warp; piece < pieces; piece += warps) {
    uint4 words[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t at = (i * 32 + lane) * kWord;
      if (at < route.numbers) words[i] = __ldcs(reinterpret_cast<const uint4*>(route.from + at));
    }
    const Route<T> next = route_of<T>(p, piece + warps, pieces);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t at = (i * 32 + lane) * kWord;
      if (at >= route.numbers) continue;
      const float factor = power_of(route.scales[route.first + at < p.page / 2 ? 0 : 1]);
      const Fp8* kept = reinterpret_cast<const Fp8*>(&words[i]);
      Pack<T, kWord> wide;
#pragma unroll
      for (int e = 0; e < kWord; ++e) {
        wide.at[e] = Arithmetic<T>::round(static_cast<float>(kept[e]) * factor);
      }
      store(route.to + at, wide);
    }
    route = next;
  }
}

template <typename T>
__device__ __forceinline__ void spill(const MoveFp8PagesParams& p) {
  const uint32_t warp = threadIdx.x / 32 * gridDim.x + blockIdx.x, warps = kWarps * gridDim.x;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t count = min(static_cast<uint32_t>(max(*p.count, 0)), p.most);
  const uint32_t side = p.page / 2;
  for (uint64_t half = warp; half < uint64_t{2} * count; half += warps) {
    const int32_t* numbers = p.moves + 3 * (half / 2);
    const int64_t page = page_of(p.home, numbers[0], numbers[1]);
    const int64_t slot = page_of(p.slots, numbers[0], numbers[2]);
    if (page < 0 || slot < 0) continue;
    const uint32_t first = half % 2 * side;
    const T* from = static_cast<const T*>(p.slots.data) + slot * p.page + first;
    Fp8* to = static_cast<Fp8*>(p.home.data) + page * p.page + first;
    float greatest = 0.0f;
    for (uint32_t at = lane * kWord; at < side; at += 32 * kWord) {
      const Pack<T, kWord> word = load<T, kWord>(from + at);
#pragma unroll
      for (int e = 0; e < kWord; ++e) {
        const float size = fabsf(static_cast<float>(word.at[e]));
        greatest = isfinite(size) ? fmaxf(greatest, size) : greatest;
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, step));
    }
    const uint8_t bits = scale_of<T>(greatest);
    const float factor = power_of(bits);
    for (uint32_t at = lane * kWord; at < side; at += 32 * kWord) {
      const Pack<T, kWord> word = load<T, kWord>(from + at);
      Pack<Fp8, kWord> kept;
#pragma unroll
      for (int e = 0; e < kWord; ++e) {
        kept.at[e] = divide_to_fp8(static_cast<float>(word.at[e]), factor);
      }
      store(to + at, kept);
    }
    if (lane == 0) p.scales[2 * page + half % 2] = bits;
  }
}

}  // namespace

// Names as rust/cuda/src/move_fp8_pages.rs builds them: the way, and the dtype of slots.
#define MOVE(WAY, NAME, T)                                                      \
  extern "C" __global__ void __launch_bounds__(kThreads, 8)                     \
      WAY##_fp8_##NAME(const __grid_constant__ MoveFp8PagesParams params) {     \
    WAY<T>(params);                                                             \
  }

MOVE(fetch, f32, float)
MOVE(fetch, bf16, __nv_bfloat16)
MOVE(fetch, f16, __half)
MOVE(spill, f32, float)
MOVE(spill, bf16, __nv_bfloat16)
MOVE(spill, f16, __half)
