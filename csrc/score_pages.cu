// score_pages: how much a row of queries may find in each page that its tables list.
//
// The simple version:
//   for each request, KV head, entry: score = max over the head's queries q of
//     softcap(scale · Σ_d max(q_d · least_d, q_d · greatest_d)), of bounds of the entry's page
//
// Thread blocks of neighbouring KV heads, whose bounds lie side by side, run at the same time. Of
// 16 or 8 bits bounds are multiplied by tensor cores (page_score_tiles.cuh); those of f32, and
// queries of f32, as the sum is written (page_scores.cuh).
//
// An entry whose page has no bounds, as one that points nowhere, scores −∞: a table that was made
// on the device cannot be checked on the host without waiting for it.

#include "page_score_tiles.cuh"
#include "page_scores.cuh"

namespace {

constexpr int kThreads = 256;

template <typename T, typename B, int kDim, int kFirst, int kBounds>
__device__ __forceinline__ void score_pages(const ScorePagesParams& params) {
  // Products of 16 bits and of what they rounded away.
  constexpr bool kTiled = sizeof(T) == 2 && sizeof(B) <= 2;
  __shared__ Shared shared;
  extern __shared__ float4 room[];
  const uint32_t head = blockIdx.x % params.kv_heads, rest = blockIdx.x / params.kv_heads;
  const EntryRow row(params, head, rest / params.chunks);
  // Thread blocks of a row share its windows.
  const uint32_t windows = (params.width + kWindow - 1) / kWindow;
  const uint32_t many = (windows + params.chunks - 1) / params.chunks * kWindow;
  const uint32_t begin = rest % params.chunks * many;
  row.close(begin, begin + many);
  if (begin >= row.count) return;
  const uint32_t end = min(row.count, begin + many);
  constexpr int kWorkers = kTiled ? kTileThreads : kThreads;
  auto* const queries = reinterpret_cast<float*>(room);
  PageScores<T, B, kDim, kFirst, kBounds, kWorkers> sums(params, row, shared, queries);
  if constexpr (kTiled) {
    __shared__ TileShared tiles;
    PageScoreTiles<T, B, kDim, kBounds>(params, row, reinterpret_cast<T*>(room))
        .run(begin, end, tiles);
    for (uint32_t window = begin; window < end; window += kWindow) {
      uint64_t left = 0;
      for (uint32_t warp = 0; warp < kWindow / kSlot; ++warp) {
        left |= uint64_t{tiles.left[(window - begin) / kSlot + warp]} << warp * kSlot;
      }
      sums.run(window, left);
    }
  } else {
    for (uint32_t window = begin; window < end; window += kWindow) sums.run(window, ~0ull);
  }
}

}  // namespace

// Names as rust/cuda/src/score_pages.rs builds them: dtype of queries, the largest head dim, and
// what a score is made of: bounds in f32, least and greatest keys in the queries' dtype, or e4m3.
#define KERNEL(DTYPE, TYPE, OF, DIM, KIND, FIRST, BOUNDS, THREADS, BLOCKS)                    \
  extern "C" __global__ void __launch_bounds__(THREADS, DIM > 128 ? (BLOCKS) / 2 : BLOCKS)    \
      score_pages_##DTYPE##_##DIM##_##KIND(const __grid_constant__ ScorePagesParams params) { \
    score_pages<TYPE, OF, DIM, FIRST, BOUNDS>(params);                                        \
  }
// So many thread blocks of a processor hold enough bounds to wait for, half as many of wide heads.
#define KINDS(DTYPE, TYPE, OF, KIND, FIRST, BOUNDS, THREADS, BLOCKS) \
  KERNEL(DTYPE, TYPE, OF, 64, KIND, FIRST, BOUNDS, THREADS, BLOCKS)  \
  KERNEL(DTYPE, TYPE, OF, 128, KIND, FIRST, BOUNDS, THREADS, BLOCKS) \
  KERNEL(DTYPE, TYPE, OF, 256, KIND, FIRST, BOUNDS, THREADS, BLOCKS)
#define BY_SUMS(DTYPE, TYPE)                           \
  KINDS(DTYPE, TYPE, float, minmax, 0, 2, kThreads, 4) \
  KINDS(DTYPE, TYPE, float, mean, 2, 1, kThreads, 4)
#define BY_TILES(DTYPE, TYPE)                                \
  KINDS(DTYPE, TYPE, TYPE, keys, 0, 2, kTileThreads, 4)      \
  KINDS(DTYPE, TYPE, Fp8, fp8_minmax, 0, 2, kTileThreads, 4) \
  KINDS(DTYPE, TYPE, Fp8, fp8_mean, 0, 1, kTileThreads, 4)

BY_SUMS(f32, float)
KINDS(f32, float, Fp8, fp8_minmax, 0, 2, kThreads, 2)
KINDS(f32, float, Fp8, fp8_mean, 0, 1, kThreads, 2)
BY_SUMS(bf16, __nv_bfloat16)
BY_TILES(bf16, __nv_bfloat16)
BY_SUMS(f16, __half)
BY_TILES(f16, __half)
