// score_pages: how much a row of queries may find in each page that its tables list.
//
// The simple version:
//   for each request, KV head, entry: score = max over the head's queries q of
//     softcap(scale · Σ_d max(q_d · least_d, q_d · greatest_d)), of bounds of the entry's page
//
// Of 16 or 8 bits bounds are multiplied by tensor cores (page_score_tiles.cuh); those of f32, and
// queries of f32, as the sum is written (page_scores.cuh).
//
// Which rows have entries, and how many, is known on the device alone: in most decode steps few of
// the requests are ranked. So thread blocks share the windows of all rows evenly, each those that
// follow each other; where rows are more than a block has room to count, and of sums, each row has
// as many blocks as it would need if it were full. Blocks of neighbouring KV heads, whose bounds
// lie side by side, run at the same time.
//
// An entry whose page has no bounds, as one that points nowhere, scores −∞: a table that was made
// on the device cannot be checked on the host without waiting for it.

#include "page_score_tiles.cuh"
#include "page_scores.cuh"

namespace {

constexpr int kThreads = 256;

constexpr uint32_t kMostRows = 2048;  // that a thread block counts: SHARED_ROWS of the launch
constexpr uint32_t kClosed = 1024;    // places of a row that a thread block closes at once
constexpr uint32_t kMostWindows = kMostSlots * kSlot / kWindow;  // MOST_WINDOWS of it

// Windows of a thread block where each row has some of its own.
__device__ __forceinline__ uint32_t windows_of_chunk(const ScorePagesParams& params) {
  const uint32_t windows = (params.width + kWindow - 1) / kWindow;
  return (windows + params.chunks - 1) / params.chunks;
}

// How many windows the rows up to each have: what thread blocks share evenly.
class RowWindows {
  const ScorePagesParams& p;
  uint32_t* const ends;

 public:
  __device__ RowWindows(const ScorePagesParams& params, uint32_t* room) : p(params), ends(room) {}

  // Counts them; all of `kTileThreads` threads take part.
  __device__ void count() {
    __shared__ uint32_t of_warps[kTileThreads / 32];
    const uint32_t each = (p.rows + kTileThreads - 1) / kTileThreads, first = threadIdx.x * each;
    uint32_t own = 0;
    for (uint32_t i = first; i < min(p.rows, first + each); ++i) {
      const EntryRow row(p, i % p.kv_heads, i / p.kv_heads);
      ends[i] = own += (row.count + kWindow - 1) / kWindow;
    }
    uint32_t before = own;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (uint32_t step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, before, step);
      if (lane >= step) before += other;
    }
    if (lane == 31) of_warps[warp] = before;
    before -= own;
    __syncthreads();
    for (uint32_t i = 0; i < warp; ++i) before += of_warps[i];
    for (uint32_t i = first; i < min(p.rows, first + each); ++i) ends[i] += before;
    __syncthreads();
  }

  __device__ uint32_t all() const { return ends[p.rows - 1]; }
  __device__ uint32_t begin(uint32_t row) const { return row == 0 ? 0 : ends[row - 1]; }
  __device__ uint32_t end(uint32_t row) const { return ends[row]; }

  // The row that one of the windows is of.
  __device__ uint32_t row_of(uint32_t window) const {
    uint32_t low = 0, high = p.rows - 1;
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      if (ends[middle] > window) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
};

// Scores windows by products, and what these leave as sums; then gives −∞ to what is not listed.
template <typename T, typename B, int kDim, int kBounds>
__device__ __forceinline__ void score_by_tiles(const ScorePagesParams& params) {
  __shared__ Shared shared;
  __shared__ TileShared tiles;
  __shared__ uint32_t ends[kMostRows];
  extern __shared__ float4 room[];
  const bool shares = params.rows != 0;
  RowWindows rows(params, ends);
  uint32_t number, at, until;
  if (shares) {
    rows.count();
    const uint32_t each = (rows.all() + gridDim.x - 1) / gridDim.x;
    at = blockIdx.x * each, until = min(rows.all(), at + each);
  } else {
    number = blockIdx.x / params.kv_heads / params.chunks * params.kv_heads;
    number += blockIdx.x % params.kv_heads;
    at = blockIdx.x / params.kv_heads % params.chunks * windows_of_chunk(params);
    until = at + windows_of_chunk(params);
  }
  const uint32_t begin_of_chunk = at;
  for (uint32_t last; at < until; at = last) {
    uint32_t first = 0;
    last = until;
    if (shares) {
      number = rows.row_of(at), first = rows.begin(number);
      last = min(min(until, rows.end(number)), at + kMostWindows);
    }
    const EntryRow row(params, number % params.kv_heads, number / params.kv_heads);
    const uint32_t begin = (at - first) * kWindow, end = min(row.count, (last - first) * kWindow);
    if (begin >= end) break;
    PageScoreTiles<T, B, kDim, kBounds>(params, row, reinterpret_cast<T*>(room))
        .run(begin, end, tiles);
    PageScores<T, B, kDim, 0, kBounds, kTileThreads> sums(params, row, shared,
                                                          reinterpret_cast<float*>(room));
    for (uint32_t window = begin; window < end; window += kWindow) {
      uint64_t left = 0;
      for (uint32_t warp = 0; warp < kWindow / kSlot; ++warp) {
        left |= uint64_t{tiles.left[(window - begin) / kSlot + warp]} << warp * kSlot;
      }
      sums.run(window, left);
    }
    // The next row's queries lie where this one's were read.
    __syncthreads();
  }
  if (!shares) {
    EntryRow(params, number % params.kv_heads, number / params.kv_heads)
        .close(begin_of_chunk * kWindow, until * kWindow);
  }
  // Some places of a row each.
  const uint32_t parts = (params.width + kClosed - 1) / kClosed;
  for (uint32_t i = blockIdx.x; i < params.rows * parts; i += gridDim.x) {
    const uint32_t row = i / parts, first = i % parts * kClosed;
    EntryRow(params, row % params.kv_heads, row / params.kv_heads).close(first, first + kClosed);
  }
}

template <typename T, typename B, int kDim, int kFirst, int kBounds>
__device__ __forceinline__ void score_by_sums(const ScorePagesParams& params) {
  __shared__ Shared shared;
  extern __shared__ float4 room[];
  const uint32_t head = blockIdx.x % params.kv_heads, rest = blockIdx.x / params.kv_heads;
  const EntryRow row(params, head, rest / params.chunks);
  const uint32_t many = windows_of_chunk(params) * kWindow;
  const uint32_t begin = rest % params.chunks * many;
  row.close(begin, begin + many);
  PageScores<T, B, kDim, kFirst, kBounds, kThreads> sums(params, row, shared,
                                                         reinterpret_cast<float*>(room));
  for (uint32_t window = begin; window < min(row.count, begin + many); window += kWindow) {
    sums.run(window, ~0ull);
  }
}

template <typename T, typename B, int kDim, int kFirst, int kBounds>
__device__ __forceinline__ void score_pages(const ScorePagesParams& params) {
  // Products of 16 bits and of what they rounded away.
  if constexpr (sizeof(T) == 2 && sizeof(B) <= 2) {
    score_by_tiles<T, B, kDim, kBounds>(params);
  } else {
    score_by_sums<T, B, kDim, kFirst, kBounds>(params);
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
