// targets: sm_90a
// The two passes of score_tokens for Hopper, by warpgroup products: the same sums as score_rows.cuh
// and score_keys.cuh.
//
// A block keeps 256 query vectors of a KV head in shared memory, and keys stream past them in tiles
// of 128. In the first pass query vectors are rows of the products, in the second keys are: a
// thread's sums again belong to rows that it has to itself. One warpgroup fetches keys and brings
// them to their positions; four have a product each of every tile, and wait for nobody but the
// tensor cores: while these work for one warpgroup, the others turn scores into weights.
//
// Needs what the other tensor-core kernels need (rust/cuda/src/score_tokens.rs), D up to 128.

#include <climits>
#include <cmath>

#include "api.h"
#include "hopper.cuh"
#include "score_rows.cuh"

namespace {

constexpr int kGroups = 4;  // warpgroups that multiply
constexpr int kFetchWarps = 4;
constexpr int kThreads = 128 * kGroups + 32 * kFetchWarps;
constexpr int kFetchRegisters = 64;
constexpr int kMultiplyRegisters = 104;
constexpr int kQueries = 256;
constexpr int kTile = 128;      // keys
constexpr int kStages = 4;      // tiles in shared memory
constexpr int kAhead = 2;       // tiles whose copies are under way while one is made ready
constexpr int kRowBytes = 128;  // of one block of 64 columns

template <int D>
struct Shared {
  static constexpr int kBlocks = (D + 63) / 64;
  alignas(1024) unsigned char queries[kBlocks][kQueries * kRowBytes];
  alignas(1024) unsigned char keys[kStages][kBlocks][kTile * kRowBytes];
  alignas(16) uint32_t held[kStages][4];  // bit i of word w: there is a key 32 w + i
  int delta_at[kStages][kTile];
  int position[kQueries];
  float lse[kQueries];
  float2 turns[kFetchWarps][D / 2];
  uint64_t full[kStages], empty[kStages];
  int bounds[2][kQueries / 32];  // lowest and highest position of 32 vectors
};

// Which tiles of keys a block streams: of those that any of its rows sees, which are [0, heads) and
// [tails, end), the first-th to before the last-th.
struct Tiles {
  int heads, tails, end, first, last;

  __device__ __forceinline__ int operator[](int i) const {
    return i < heads ? i : i - heads + tails;
  }
};

__device__ __forceinline__ Tiles cut(const ScoreParams& p, const Reach& reach, int lowest,
                                     int highest) {
  Tiles tiles = {};
  const int seen = static_cast<int>(min(int64_t{highest} + 1, int64_t{p.keys}));
  tiles.end = (seen + kTile - 1) / kTile;
  if (reach.window > 0 && lowest >= reach.window) {
    tiles.tails = min((lowest - reach.window + 1) / kTile, tiles.end);
    tiles.heads = min((min(reach.sink, seen) + kTile - 1) / kTile, tiles.tails);
  }
  const int64_t count = tiles.heads + tiles.end - tiles.tails;
  tiles.first = static_cast<int>(count * blockIdx.z / p.splits);
  tiles.last = static_cast<int>(count * (blockIdx.z + 1) / p.splits);
  return tiles;
}

// Where 16-byte word `word` of a vector is in a swizzled tile of `rows` vectors.
__device__ __forceinline__ uint32_t word_offset(int rows, int row, int word) {
  return (word / 8 * rows + row) * kRowBytes + ((word ^ row) & 7) * 16;
}

// One of the warps that fetch: 32 keys of every tile are its own.
template <typename T, int D>
__device__ __forceinline__ void fetch_keys(const ScoreParams& p, Shared<D>& sh,
                                           const Reach& reach, const Tiles& tiles) {
  constexpr int kWords = D / 8;
  const int warp = threadIdx.x / 32 % kFetchWarps, lane = threadIdx.x % 32;
  const int64_t place = int64_t{reach.table} * p.padded_keys + 32 * warp + lane;
  const T* cache = static_cast<const T*>(p.kv.cache) + reach.rank * p.kv.head_stride;
  KeyTurner<T, 1> turner(p.kv, sh.turns[warp]);
  int64_t next_at = p.key_at[place + int64_t{tiles[tiles.first]} * kTile];
  int next_delta = p.delta_at[place + int64_t{tiles[tiles.first]} * kTile];
  for (int i = tiles.first; i < tiles.last + kAhead; ++i) {
    if (i < tiles.last) {
      const Turn<kStages> turn(i - tiles.first);
      const int64_t key_at = next_at;
      const int delta = next_delta;
      if (i + 1 < tiles.last) {
        next_at = p.key_at[place + int64_t{tiles[i + 1]} * kTile];
        next_delta = p.delta_at[place + int64_t{tiles[i + 1]} * kTile];
      }
      barrier_wait(sh.empty[turn.place], turn.parity ^ 1);
      const uint32_t held = __ballot_sync(~0u, key_at >= 0);
      if (lane == 0) sh.held[turn.place][warp] = held;
      sh.delta_at[turn.place][32 * warp + lane] = delta;
      const uint32_t to = shared_address(sh.keys[turn.place]);
#pragma unroll 4
      for (int word = lane; word < 32 * kWords; word += 32) {
        const int row = word / kWords;
        const int64_t at = __shfl_sync(~0u, key_at, row);
        const void* from = at < 0 ? p.kv.cache : cache + at + word % kWords * 8;
        copy_async(to + word_offset(kTile, 32 * warp + row, word % kWords), from, at >= 0);
      }
    }
    commit_copies();
    if (i - kAhead < tiles.first) continue;
    const Turn<kStages> turn(i - kAhead - tiles.first);
    wait_for_copies<kAhead>();
    __syncwarp();
    const int* delta_at = sh.delta_at[turn.place] + 32 * warp;
    if (__any_sync(~0u, delta_at[lane] != 0)) {
      unsigned char* tile = &sh.keys[turn.place][0][0];
      turner.template turn<32>(delta_at, [&](int key, int pair) {
        return reinterpret_cast<uint32_t*>(tile + word_offset(kTile, 32 * warp + key, pair / 4)) +
               pair % 4;
      });
    }
    show_to_async_units();
    __syncwarp();
    if (lane == 0) barrier_arrive(sh.full[turn.place]);
  }
}

// A warpgroup that multiplies. kSumRows: 64 query vectors by all keys of a tile. Otherwise: half of
// its keys by half of the query vectors.
template <typename T, int D, bool kSumRows>
class Scorer {
  const ScoreParams& p;
  Shared<D>& sh;
  const Reach reach;
  const Tiles tiles;
  const int warp, lane, group, kv_head;
  const float factor;
  int lowest, highest;  // positions of the rows that it multiplies
  // Of this thread's two rows of the product: warp · 16 + half · 8 + lane / 4.
  float reference[2], sum[2], edge[2];

 public:
  __device__ __forceinline__ Scorer(const ScoreParams& params, Shared<D>& shared,
                                    const Reach& reach, const Tiles& tiles)
      : p(params), sh(shared), reach(reach), tiles(tiles), warp(threadIdx.x % 128 / 32),
        lane(threadIdx.x % 32), group(threadIdx.x / 128), kv_head(blockIdx.y),
        factor(factor_of(params)) {
    lowest = INT_MAX;
    highest = -1;
    const int part = kSumRows ? 2 * group : group / 2 * 4;
    for (int i = part; i < part + (kSumRows ? 2 : 4); ++i) {
      lowest = min(lowest, sh.bounds[0][i]);
      highest = max(highest, sh.bounds[1][i]);
    }
  }

  __device__ __forceinline__ void run() {
    if (!kSumRows) write_nothing();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reference[half] = kNoReference;
      sum[half] = edge[half] = 0.0f;
    }
    for (int i = tiles.first; i < tiles.last; ++i) {
      const Turn<kStages> turn(i - tiles.first);
      float scores[64];
      barrier_wait(sh.full[turn.place], turn.parity);
      multiply(scores, turn.place);
      const uint32_t* held = sh.held[turn.place];
      // Rows need to know of all keys of the tile, a warp's keys only of themselves.
      const uint4 all = *reinterpret_cast<const uint4*>(held);
      const uint32_t mine = held[group % 2 * 2 + warp / 2] >> (warp % 2 * 16);
      products_wait<0>();
      hold(scores);
      if (lane == 0) barrier_arrive(sh.empty[turn.place]);
      if (p.softcap != 0.0f) cap_scores(p, scores);
      if (kSumRows) {
        if (highest >= tiles[i] * kTile) sum_rows(scores, tiles[i] * kTile, all);
      } else {
        sum_keys(scores, tiles[i] * kTile, mine);
      }
    }
    if (kSumRows) write_rows();
  }

 private:
  __device__ __forceinline__ void multiply(float (&scores)[64], uint32_t stage) {
    const uint32_t queries = shared_address(sh.queries), keys = shared_address(sh.keys[stage]);
    const uint32_t rows = kSumRows ? queries + group * 64 * kRowBytes
                                   : keys + group % 2 * 64 * kRowBytes;
    const uint32_t columns = kSumRows ? keys : queries + group / 2 * 128 * kRowBytes;
    const uint64_t a = uniform(tile_of(rows, 8 * kRowBytes, 16));
    const uint64_t b = uniform(tile_of(columns, 8 * kRowBytes, 16));
    constexpr int kBlockOfA = (kSumRows ? kQueries : kTile) * kRowBytes;
    constexpr int kBlockOfB = (kSumRows ? kTile : kQueries) * kRowBytes;
    hold(scores);
    products_begin();
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      Products<T>::keys(scores, further(a, k / 4 * kBlockOfA + k % 4 * 32),
                        further(b, k / 4 * kBlockOfB + k % 4 * 32), k > 0);
    }
    products_commit();
  }

  // ---- first pass ---------------------------------------------------------------------------

  // Takes in a tile's keys, which are at positions from `from` on.
  __device__ __forceinline__ void sum_rows(float (&scores)[64], int from, uint4 held) {
    const int to = from + kTile - 1, window = reach.window;
    const int edge_window = p.edge_window, edge_sink = p.edge_sink;
    const bool all_held = (held.x & held.y & held.z & held.w) == ~0u;
    const bool all_seen = all_held && to <= lowest &&
                          (window == 0 || from > highest - window || to < reach.sink);
    const bool all_edge = from >= edge_sink && to <= lowest - edge_window;
    const bool no_edge = p.edge == nullptr || to < edge_sink || from > highest - edge_window;
    if (!all_seen || !(all_edge || no_edge)) {
      sum_some_rows(scores, from, held);
      return;
    }
    float tops[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
    for (int e = 0; e < 64; ++e) tops[e % 4] = fmaxf(tops[e % 4], scores[e]);
    refer(fmaxf(tops[0], tops[1]) * factor, fmaxf(tops[2], tops[3]) * factor);
#pragma unroll
    for (int e = 0; e < 64; ++e) {
      scores[e] = exp2_fast(scores[e] * factor - reference[e / 2 % 2]);
    }
    float parts[4] = {};
#pragma unroll
    for (int e = 0; e < 64; ++e) parts[e % 4] += scores[e];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float part = parts[2 * half] + parts[2 * half + 1];
      sum[half] += part;
      if (all_edge) edge[half] += part;
    }
  }

  // The same where rows differ in what they see, or keys are missing.
  __device__ __forceinline__ void sum_some_rows(float (&scores)[64], int from, uint4 held) {
    const uint32_t words[4] = {held.x, held.y, held.z, held.w};
    const int edge_window = p.edge_window, edge_sink = p.edge_sink;
    float tops[2] = {-INFINITY, -INFINITY};
    int positions[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) positions[half] = sh.position[row_of(half)];
#pragma unroll
    for (int e = 0; e < 64; ++e) {
      const int place = e / 4 * 8 + lane % 4 * 2 + e % 2;
      const bool is_held = (words[e / 16] >> (place % 32) & 1) != 0;
      const bool seen = is_held && sees(reach, positions[e / 2 % 2], from + place);
      scores[e] = seen ? scores[e] * factor : -INFINITY;
      tops[e / 2 % 2] = fmaxf(tops[e / 2 % 2], scores[e]);
    }
    refer(tops[0], tops[1]);
#pragma unroll
    for (int e = 0; e < 64; ++e) {
      const int half = e / 2 % 2, key = from + e / 4 * 8 + lane % 4 * 2 + e % 2;
      const float weight = exp2_fast(scores[e] - reference[half]);
      sum[half] += weight;
      if (key >= edge_sink && key <= positions[half] - edge_window) edge[half] += weight;
    }
  }

  // The block's query vector of one of this thread's rows.
  __device__ __forceinline__ int row_of(int half) const {
    return group * 64 + warp * 16 + half * 8 + lane / 4;
  }

  // Raises the references that the largest scores exceed by too much.
  __device__ __forceinline__ void refer(float top, float other_top) {
    const float tops[2] = {top, other_top};
    if (!(tops[0] - reference[0] > kSlack || tops[1] - reference[1] > kSlack)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float higher = fmaxf(tops[half], reference[half]);
      const float less = exp2_fast(reference[half] - higher);
      sum[half] *= less;
      edge[half] *= less;
      reference[half] = higher;
    }
  }

  __device__ __forceinline__ void write_rows() {
    const int vectors = vectors_of(p);
    const int64_t plane = int64_t{p.kv.kv_heads} * vectors;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        const float other = __shfl_xor_sync(~0u, reference[half], step);
        const float top = fmaxf(reference[half], other);
        const float mine = exp2_fast(reference[half] - top), theirs = exp2_fast(other - top);
        sum[half] = sum[half] * mine + __shfl_xor_sync(~0u, sum[half], step) * theirs;
        edge[half] = edge[half] * mine + __shfl_xor_sync(~0u, edge[half], step) * theirs;
        reference[half] = top;
      }
      const int v = blockIdx.x * kQueries + row_of(half);
      if (lane % 4 != 0 || v >= vectors) continue;
      float* to = p.partial + 3 * blockIdx.z * plane + int64_t{kv_head} * vectors + v;
      to[0] = reference[half];
      to[plane] = sum[half];
      to[2 * plane] = edge[half];
    }
  }

  // ---- second pass --------------------------------------------------------------------------

  // The masses of this warpgroup's keys of a tile, over its half of the query vectors.
  // Bit i of `held`: the warp has an i-th key.
  __device__ __forceinline__ void sum_keys(float (&scores)[64], int tile_from, uint32_t held) {
    const int from = tile_from + group % 2 * 64 + warp * 16, to = from + 15;
    const int window = reach.window;
    const bool some_seen = highest >= from && (window == 0 || from < reach.sink ||
                                               to > lowest - window);
    const bool all_seen = to <= lowest &&
                          (window == 0 || from > highest - window || to < reach.sink);
    float mass[2] = {0.0f, 0.0f};
    if (some_seen) add_weights(scores, from, all_seen, mass);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mass[half] += __shfl_xor_sync(~0u, mass[half], 1);
      mass[half] += __shfl_xor_sync(~0u, mass[half], 2);
      const int key = half * 8 + lane / 4;
      const bool is_held = (held >> key & 1) != 0;
      if (lane % 4 == 0) *mass_of(from + key) = is_held ? mass[half] : 0.0f;
    }
  }

  __device__ __forceinline__ void add_weights(float (&scores)[64], int from, bool all_seen,
                                              float (&mass)[2]) const {
    const int column = group / 2 * 128 + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      // Keeps the compiler from loading more of these ahead than there are registers for.
      if (j % 4 == 0) asm volatile("" ::: "memory");
      const float2 lse = *reinterpret_cast<const float2*>(sh.lse + column + 8 * j);
#pragma unroll
      for (int e = 4 * j; e < 4 * j + 4; ++e) {
        scores[e] = exp2_fast(scores[e] * factor - (e % 2 == 0 ? lse.x : lse.y));
      }
    }
    if (!all_seen) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        if (j % 4 == 0) asm volatile("" ::: "memory");
        const int2 position = *reinterpret_cast<const int2*>(sh.position + column + 8 * j);
#pragma unroll
        for (int e = 4 * j; e < 4 * j + 4; ++e) {
          const int key = from + e / 2 % 2 * 8 + lane / 4;
          if (!sees(reach, e % 2 == 0 ? position.x : position.y, key)) scores[e] = 0.0f;
        }
      }
    }
    float parts[4] = {};
#pragma unroll
    for (int e = 0; e < 64; ++e) parts[e % 4] += scores[e];
    mass[0] = parts[0] + parts[1];
    mass[1] = parts[2] + parts[3];
  }

  __device__ __forceinline__ float* mass_of(int key) const {
    const int64_t part = 2 * int64_t{blockIdx.x} + group / 2;
    return p.head_mass + (part * p.kv.kv_heads + kv_head) * p.padded_keys + key;
  }

  // This block's part of the tiles that no row of it sees.
  __device__ __forceinline__ void write_nothing() const {
    const int between = tiles.tails - tiles.heads;
    const int64_t count = between + static_cast<int>(p.padded_keys) / kTile - tiles.end;
    const int stop = static_cast<int>(count * (blockIdx.z + 1) / p.splits);
    for (int i = static_cast<int>(count * blockIdx.z / p.splits); i < stop; ++i) {
      const int tile = i < between ? tiles.heads + i : tiles.end + i - between;
      const int key = group % 2 * 64 + threadIdx.x % 128;
      if (threadIdx.x % 128 < 64) *mass_of(tile * kTile + key) = 0.0f;
    }
  }
};

// Brings the block's query vectors, and finds the bounds of their positions.
template <typename T, int D, bool kSumRows>
__device__ __forceinline__ void open(const ScoreParams& p, Shared<D>& sh) {
  constexpr int kWords = D / 8;
  const int vectors = vectors_of(p), begin = blockIdx.x * kQueries, kv_head = blockIdx.y;
  const uint32_t to = shared_address(sh.queries);
  for (int i = threadIdx.x; i < kQueries * kWords; i += kThreads) {
    const int row = i / kWords, word = i % kWords;
    const bool inside = begin + row < vectors;
    const QueryVector at = query_vector(p, kv_head, inside ? begin + row : 0);
    const T* from = static_cast<const T*>(p.q) + at.row * p.q_row_stride +
                    at.head * p.q_head_stride + word * 8;
    copy_async(to + word_offset(kQueries, row, word), from, inside);
  }
  commit_copies();
  if (threadIdx.x < kQueries) {
    const int v = begin + threadIdx.x;
    const int position = v < vectors ? p.positions[query_vector(p, kv_head, v).row] : -1;
    sh.position[threadIdx.x] = position;
    if (!kSumRows) {
      sh.lse[threadIdx.x] = v < vectors ? p.lse[int64_t{kv_head} * vectors + v] : INFINITY;
    }
    const int low = __reduce_min_sync(~0u, position < 0 ? INT_MAX : position);
    const int high = __reduce_max_sync(~0u, position);
    if (threadIdx.x % 32 == 0) {
      sh.bounds[0][threadIdx.x / 32] = low;
      sh.bounds[1][threadIdx.x / 32] = high;
    }
  }
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(sh.full[stage], kFetchWarps);
      barrier_init(sh.empty[stage], 4 * kGroups);
    }
    barrier_init_done();
  }
  wait_for_copies<0>();
  show_to_async_units();
  __syncthreads();
}

template <typename T, int D, bool kSumRows>
__device__ __forceinline__ void score(const ScoreParams& p) {
  extern __shared__ unsigned char shared[];
  // Swizzled tiles start where an address is a multiple of 1024, which a block's memory need not.
  const uint32_t skipped = -shared_address(shared) % 1024;
  Shared<D>& sh = *reinterpret_cast<Shared<D>*>(shared + skipped);
  open<T, D, kSumRows>(p, sh);
  int lowest = INT_MAX, highest = -1;
  for (int i = 0; i < kQueries / 32; ++i) {
    lowest = min(lowest, sh.bounds[0][i]);
    highest = max(highest, sh.bounds[1][i]);
  }
  const Reach reach = reach_of(p.kv, blockIdx.y);
  const Tiles tiles = cut(p, reach, lowest, highest);
  if (threadIdx.x >= 128 * kGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kFetchRegisters));
    if (tiles.first < tiles.last) fetch_keys<T, D>(p, sh, reach, tiles);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplyRegisters));
    Scorer<T, D, kSumRows>(p, sh, reach, tiles).run();
  }
}

}  // namespace

#define KERNEL(PASS, DTYPE, TYPE, D, SUM_ROWS)                                          \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)                             \
      score_tokens_sm90_##PASS##_##DTYPE##_##D(const __grid_constant__ ScoreParams p) { \
    score<TYPE, D, SUM_ROWS>(p);                                                        \
  }
#define KERNELS(DTYPE, TYPE, D)               \
  KERNEL(rows, DTYPE, TYPE, D, true)          \
  KERNEL(keys, DTYPE, TYPE, D, false)
#define ALL(DTYPE, TYPE)                                            \
  KERNELS(DTYPE, TYPE, 64)                                          \
  KERNELS(DTYPE, TYPE, 80)                                          \
  KERNELS(DTYPE, TYPE, 96)                                          \
  KERNELS(DTYPE, TYPE, 128)

ALL(bf16, __nv_bfloat16)
ALL(f16, __half)
