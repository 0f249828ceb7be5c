// targets: sm_90a
// The two passes of score_tokens for Hopper, by warpgroup products: the same sums as score_rows.cuh
// and score_keys.cuh.
//
// A block keeps 256 query vectors of a KV head in shared memory, and keys stream past them in tiles
// of 128. In the first pass query vectors are rows of the product, in the second keys are: a
// thread's sums again belong to rows that it has to itself. Each of two warpgroups has two products
// per tile; while the tensor cores work on one, its threads make weights of the other.
//
// Needs what the other tensor-core kernels need (rust/cuda/src/score_tokens.rs), D up to 128.

#include <climits>
#include <cmath>
#include <type_traits>

#include "api.h"
#include "hopper.cuh"
#include "score_rows.cuh"

namespace {

constexpr int kGroups = 2;
constexpr int kThreads = 128 * kGroups;
constexpr int kQueries = 256;
constexpr int kTile = 128;   // keys
constexpr int kStages = 4;   // tiles in shared memory
constexpr int kSlots = 8;    // tiles whose keys are known
constexpr int kRowBytes = 128;  // of one block of 64 columns

template <int D>
struct Shared {
  static constexpr int kBlocks = (D + 63) / 64;
  alignas(1024) unsigned char queries[kBlocks][kQueries * kRowBytes];
  alignas(1024) unsigned char keys[kStages][kBlocks][kTile * kRowBytes];
  int64_t key_at[kSlots][kTile];
  int delta_at[kSlots][kTile];
  int position[kQueries];
  float lse[kQueries];
  float2 turns[D / 2];
  int bounds[2][kThreads / 32];  // lowest and highest position of 32 vectors
};

// Where 16-byte word `word` of a vector is in a swizzled tile of `rows` vectors.
__device__ __forceinline__ uint32_t word_offset(int rows, int row, int word) {
  return word / 8 * rows * kRowBytes + row * kRowBytes + ((word ^ row) & 7) * 16;
}

// c [64, 128] (+)= a [64, 16] b [128, 16]ᵀ, both in shared memory; c is set where `add` is 0.
#define R8(i)                                                                               \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
      "+f"(c[i + 6]), "+f"(c[i + 7])
#define PRODUCT(TYPE)                                                                        \
  asm volatile(                                                                              \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                           \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                           \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "             \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "     \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "     \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "    \
      "%64, %65, p, 1, 1, 0, 0;\n}\n"                                                        \
      : R8(0), R8(8), R8(16), R8(24), R8(32), R8(40), R8(48), R8(56)                         \
      : "l"(a), "l"(b), "r"(add))

template <typename T>
__device__ __forceinline__ void add_product(float (&c)[64], uint64_t a, uint64_t b, int add) {
  if constexpr (std::is_same_v<T, __half>) {
    PRODUCT("f16");
  } else {
    PRODUCT("bf16");
  }
}
#undef PRODUCT
#undef R8

template <typename T, int D, bool kSumRows>
class Score {
  const ScoreParams& p;
  Shared<D>& sh;
  const int warp, lane, group, kv_head;
  const Reach reach;
  const Scaling scaling;
  KeyTurner<T> turner;
  int vectors;
  // Tiles of keys that any row of the block sees: [0, heads) and [tails, end).
  int heads, tails, end, first, last;
  int lowest[2], highest[2];  // positions of the rows of this warpgroup's two products
  // Rows: this thread's are part · 64 + warp · 16 + half · 8 + lane / 4 of its group's 128.
  float reference[4], sum[4], edge[4];
  float mass[2];  // keys: those of the tile are group · 64 + warp · 16 + half · 8 + lane / 4

 public:
  __device__ Score(const ScoreParams& params, Shared<D>& shared)
      : p(params), sh(shared), warp(threadIdx.x % 128 / 32), lane(threadIdx.x % 32),
        group(threadIdx.x / 128), kv_head(blockIdx.y), reach(reach_of(params.kv, blockIdx.y)),
        scaling(params), turner(params.kv, shared.turns), vectors(vectors_of(params)) {}

  __device__ void run() {
    open();
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      reference[r] = kNoReference;
      sum[r] = edge[r] = 0.0f;
    }
    if (first < last) stream();
    wait_for_copies<0>();
    if (kSumRows) write_rows(); else write_nothing();
  }

 private:
  __device__ int tile_at(int i) const { return i < heads ? i : i - heads + tails; }

  __device__ __forceinline__ void stream() {
    float one[64], two[64];
    ready<kStages - 2>(first);
    begin_products<0>(one, first);
    products_wait<0>();
    hold(one);
    for (int i = first; i < last; ++i) {
      begin_products<1>(two, i);
      mass[0] = mass[1] = 0.0f;
      take<0>(one, i);
      ready<kStages - 3>(i + 1);
      // Every warp is done with the tile before this one. Places of keys are fetched before keys.
      fetch(i + kStages - 1);
      learn(i + 2 * kStages - 3);
      commit_copies();
      // After the last tile too, where nobody reads the result: a branch around products would make
      // the compiler wait for each of them.
      begin_products<0>(one, i + 1);
      products_wait<1>();
      hold(two);
      take<1>(two, i);
      if (!kSumRows) write_keys(i);
      products_wait<0>();
      hold(one);
    }
  }

  template <int kPart>
  __device__ __forceinline__ void begin_products(float (&c)[64], int i) {
    constexpr int kBlockOfQueries = kQueries * kRowBytes, kBlockOfKeys = kTile * kRowBytes;
    const uint32_t queries = shared_address(sh.queries);
    const uint32_t keys = shared_address(sh.keys[i % kStages]);
    hold(c);
    products_begin();
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      const uint32_t of_queries = queries + k / 4 * kBlockOfQueries + k % 4 * 32;
      const uint32_t of_keys = keys + k / 4 * kBlockOfKeys + k % 4 * 32;
      const uint32_t a = kSumRows ? of_queries + (2 * group + kPart) * 64 * kRowBytes
                                  : of_keys + group * 64 * kRowBytes;
      const uint32_t b = kSumRows ? of_keys : of_queries + kPart * 128 * kRowBytes;
      add_product<T>(c, tile_of(a, 8 * kRowBytes, 16), tile_of(b, 8 * kRowBytes, 16), k > 0);
    }
    products_commit();
  }

  // ---- fetching -----------------------------------------------------------------------------

  template <int kRows, typename AddressOf>
  __device__ void copy_vectors(uint32_t to, AddressOf address_of) {
    constexpr int kWords = D / 8;
#pragma unroll
    for (int i = 0; i < kRows * kWords / kThreads; ++i) {
      const int index = threadIdx.x + i * kThreads;
      const int row = index / kWords, word = index % kWords;
      const T* from = address_of(row);
      const void* source = from == nullptr ? p.kv.cache : from + word * 8;
      copy_async(to + word_offset(kRows, row, word), source, from != nullptr);
    }
  }

  __device__ void open() {
    const int begin = blockIdx.x * kQueries, v = begin + threadIdx.x;
    copy_vectors<kQueries>(shared_address(sh.queries), [&](int row) {
      if (begin + row >= vectors) return static_cast<const T*>(nullptr);
      const QueryVector at = query_vector(p, kv_head, begin + row);
      return static_cast<const T*>(p.q) + at.row * p.q_row_stride + at.head * p.q_head_stride;
    });
    const int position = v < vectors ? p.positions[query_vector(p, kv_head, v).row] : -1;
    sh.position[threadIdx.x] = position;
    if (!kSumRows) {
      sh.lse[threadIdx.x] = v < vectors ? p.lse[int64_t{kv_head} * vectors + v] : INFINITY;
    }
    const int low = __reduce_min_sync(~0u, position < 0 ? INT_MAX : position);
    const int high = __reduce_max_sync(~0u, position);
    if (lane == 0) {
      sh.bounds[0][threadIdx.x / 32] = low;
      sh.bounds[1][threadIdx.x / 32] = high;
    }
    __syncthreads();
    int block_lowest = INT_MAX, block_highest = -1;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      lowest[part] = INT_MAX;
      highest[part] = -1;
    }
    for (int i = 0; i < kThreads / 32; ++i) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const bool mine = kSumRows ? i / 2 == 2 * group + part : i / 4 == part;
        if (mine) lowest[part] = min(lowest[part], sh.bounds[0][i]);
        if (mine) highest[part] = max(highest[part], sh.bounds[1][i]);
      }
      block_lowest = min(block_lowest, sh.bounds[0][i]);
      block_highest = max(block_highest, sh.bounds[1][i]);
    }
    cut(block_lowest, block_highest);
    for (int i = 0; i < 2 * kStages - 3; ++i) learn(first + i);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    for (int i = 0; i < kStages - 1; ++i) {
      fetch(first + i);
      commit_copies();
    }
  }

  // Finds the tiles that rows between two positions see, and this block's part of them.
  __device__ void cut(int low, int high) {
    const int seen = static_cast<int>(min(int64_t{high} + 1, int64_t{p.keys}));
    end = (seen + kTile - 1) / kTile;
    heads = tails = 0;
    if (reach.window > 0 && low >= reach.window) {
      tails = min((low - reach.window + 1) / kTile, end);
      heads = min((min(reach.sink, seen) + kTile - 1) / kTile, tails);
    }
    const int64_t count = heads + end - tails;
    first = static_cast<int>(count * blockIdx.z / p.splits);
    last = static_cast<int>(count * (blockIdx.z + 1) / p.splits);
  }

  // Starts the copies of where the keys of the i-th tile are.
  __device__ void learn(int i) {
    if (i >= last) return;
    const int slot = i % kSlots, key = threadIdx.x % kTile;
    const int64_t place = int64_t{reach.table} * p.padded_keys + int64_t{tile_at(i)} * kTile + key;
    if (threadIdx.x < kTile) {
      copy_async_bytes<8>(shared_address(&sh.key_at[slot][key]), p.key_at + place);
    } else {
      copy_async_bytes<4>(shared_address(&sh.delta_at[slot][key]), p.delta_at + place);
    }
  }

  __device__ void fetch(int i) {
    if (i >= last) return;
    const int64_t* key_at = sh.key_at[i % kSlots];
    const T* cache = static_cast<const T*>(p.kv.cache) + reach.rank * p.kv.head_stride;
    copy_vectors<kTile>(shared_address(sh.keys[i % kStages]), [&](int row) {
      return key_at[row] < 0 ? static_cast<const T*>(nullptr) : cache + key_at[row];
    });
  }

  // Waits for the i-th tile, and brings its keys to their positions.
  template <int kPending>
  __device__ __forceinline__ void ready(int i) {
    wait_for_copies<kPending>();
    show_to_async_units();
    __syncthreads();
    const int4 deltas = reinterpret_cast<const int4*>(sh.delta_at[i % kSlots])[lane];
    if (i < last && __any_sync(~0u, (deltas.x | deltas.y | deltas.z | deltas.w) != 0)) {
      unsigned char* tile = &sh.keys[i % kStages][0][0];
#pragma unroll 1
      for (int from = 0; from < kTile; from += 64) {
        turner.turn(sh.delta_at[i % kSlots] + from, [&](int row, int pair) {
          return reinterpret_cast<uint32_t*>(tile + word_offset(kTile, from + row, pair / 4)) +
                 pair % 4;
        });
      }
      show_to_async_units();
      __syncthreads();
    }
  }

  // ---- sums ---------------------------------------------------------------------------------

  template <int kPart>
  __device__ __forceinline__ void take(float (&scores)[64], int i) {
    if (p.softcap != 0.0f) {
#pragma unroll
      for (int e = 0; e < 64; ++e) scores[e] = scaling.capped(scores[e]);
    }
    if (kSumRows) take_rows<kPart>(scores, i); else take_keys<kPart>(scores, i);
  }

  template <int kPart>
  __device__ __forceinline__ void take_rows(float (&scores)[64], int i) {
    const int from = tile_at(i) * kTile, to = from + kTile - 1, window = reach.window;
    const int edge_window = p.edge_window, edge_sink = p.edge_sink;
    uint32_t keys[4];  // bit i of word w: there is a key w · 32 + i
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      keys[w] = __ballot_sync(~0u, sh.key_at[i % kSlots][w * 32 + lane] >= 0);
    }
    const bool all_held = (keys[0] & keys[1] & keys[2] & keys[3]) == ~0u;
    const bool all_seen = all_held && to <= lowest[kPart] &&
                          (window == 0 || from > highest[kPart] - window || to < reach.sink);
    const bool all_edge = from >= edge_sink && to <= lowest[kPart] - edge_window;
    const bool no_edge = p.edge == nullptr || to < edge_sink ||
                         from > highest[kPart] - edge_window;
    if (highest[kPart] < from) return;
    float tops[2] = {-INFINITY, -INFINITY};
    if (all_seen && (all_edge || no_edge)) {
#pragma unroll
      for (int e = 0; e < 64; ++e) tops[e / 2 % 2] = fmaxf(tops[e / 2 % 2], scores[e]);
      tops[0] *= scaling.factor;
      tops[1] *= scaling.factor;
      refer<kPart>(tops);
      // Sums come after all the powers: a power takes long, and a sum that waits for one holds up
      // the next.
#pragma unroll
      for (int e = 0; e < 64; ++e) {
        scores[e] = exp2_fast(scores[e] * scaling.factor - reference[2 * kPart + e / 2 % 2]);
      }
      float parts[4] = {};
#pragma unroll
      for (int e = 0; e < 64; ++e) parts[e % 4] += scores[e];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float part = parts[2 * half] + parts[2 * half + 1];
        sum[2 * kPart + half] += part;
        if (all_edge) edge[2 * kPart + half] += part;
      }
    } else {
      int positions[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        positions[half] = sh.position[row_of(kPart, half)];
      }
#pragma unroll
      for (int e = 0; e < 64; ++e) {
        const int place = e / 4 * 8 + lane % 4 * 2 + e % 2;
        const bool held = (keys[e / 16] >> (place % 32) & 1) != 0;
        const bool seen = held && sees(reach, positions[e / 2 % 2], from + place);
        scores[e] = seen ? scores[e] * scaling.factor : -INFINITY;
        tops[e / 2 % 2] = fmaxf(tops[e / 2 % 2], scores[e]);
      }
      refer<kPart>(tops);
#pragma unroll
      for (int e = 0; e < 64; ++e) {
        const int r = 2 * kPart + e / 2 % 2, key = from + e / 4 * 8 + lane % 4 * 2 + e % 2;
        const float weight = exp2_fast(scores[e] - reference[r]);
        sum[r] += weight;
        if (key >= edge_sink && key <= positions[e / 2 % 2] - edge_window) edge[r] += weight;
      }
    }
  }

  __device__ int row_of(int part, int half) const {
    return group * 128 + part * 64 + warp * 16 + half * 8 + lane / 4;
  }

  // Raises the references that the largest scores exceed by too much.
  template <int kPart>
  __device__ __forceinline__ void refer(const float (&tops)[2]) {
    const bool exceeded = tops[0] - reference[2 * kPart] > kSlack ||
                          tops[1] - reference[2 * kPart + 1] > kSlack;
    if (!exceeded) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = 2 * kPart + half;
      const float top = fmaxf(tops[half], reference[r]);
      const float less = exp2_fast(reference[r] - top);
      sum[r] *= less;
      edge[r] *= less;
      reference[r] = top;
    }
  }

  template <int kPart>
  __device__ __forceinline__ void take_keys(float (&scores)[64], int i) {
    const int from = tile_at(i) * kTile + group * 64 + warp * 16, to = from + 15;
    const int window = reach.window;
    if (highest[kPart] < from) return;
    if (window > 0 && from >= reach.sink && to <= lowest[kPart] - window) return;
    const bool all_seen = to <= lowest[kPart] &&
                          (window == 0 || from > highest[kPart] - window || to < reach.sink);
    const int column = kPart * 128 + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 lse = *reinterpret_cast<const float2*>(sh.lse + column + 8 * j);
#pragma unroll
      for (int e = 4 * j; e < 4 * j + 4; ++e) {
        scores[e] = exp2_fast(scores[e] * scaling.factor - (e % 2 == 0 ? lse.x : lse.y));
      }
    }
    if (!all_seen) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
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
    mass[0] += parts[0] + parts[1];
    mass[1] += parts[2] + parts[3];
  }

  // ---- results ------------------------------------------------------------------------------

  __device__ void write_rows() {
    const int64_t plane = int64_t{p.kv.kv_heads} * vectors;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        const float other = __shfl_xor_sync(~0u, reference[r], step);
        const float top = fmaxf(reference[r], other);
        const float mine = exp2_fast(reference[r] - top), theirs = exp2_fast(other - top);
        sum[r] = sum[r] * mine + __shfl_xor_sync(~0u, sum[r], step) * theirs;
        edge[r] = edge[r] * mine + __shfl_xor_sync(~0u, edge[r], step) * theirs;
        reference[r] = top;
      }
      const int v = blockIdx.x * kQueries + row_of(r / 2, r % 2);
      if (lane % 4 != 0 || v >= vectors) continue;
      float* to = p.partial + 3 * blockIdx.z * plane + int64_t{kv_head} * vectors + v;
      to[0] = reference[r];
      to[plane] = sum[r];
      to[2 * plane] = edge[r];
    }
  }

  __device__ float* mass_of(int key) const {
    const int64_t row = int64_t{blockIdx.x} * p.kv.kv_heads + kv_head;
    return p.head_mass + row * p.padded_keys + key;
  }

  __device__ void write_keys(int i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mass[half] += __shfl_xor_sync(~0u, mass[half], 1);
      mass[half] += __shfl_xor_sync(~0u, mass[half], 2);
      const int place = group * 64 + warp * 16 + half * 8 + lane / 4;
      if (lane % 4 == 0) {
        const bool held = sh.key_at[i % kSlots][place] >= 0;
        *mass_of(tile_at(i) * kTile + place) = held ? mass[half] : 0.0f;
      }
    }
  }

  // This block's part of the tiles that no row of it sees.
  __device__ void write_nothing() {
    const int between = tails - heads;
    const int64_t count = between + static_cast<int>(p.padded_keys) / kTile - end;
    const int stop = static_cast<int>(count * (blockIdx.z + 1) / p.splits);
    for (int i = static_cast<int>(count * blockIdx.z / p.splits); i < stop; ++i) {
      const int tile = i < between ? heads + i : end + i - between;
      if (threadIdx.x < kTile) *mass_of(tile * kTile + threadIdx.x) = 0.0f;
    }
  }
};

template <typename T, int D, bool kSumRows>
__device__ __forceinline__ void score(const ScoreParams& p) {
  extern __shared__ unsigned char shared[];
  // Swizzled tiles start where an address is a multiple of 1024, which a block's memory need not.
  const uint32_t skipped = -shared_address(shared) % 1024;
  Score<T, D, kSumRows>(p, *reinterpret_cast<Shared<D>*>(shared + skipped)).run();
}

}  // namespace

#define KERNEL(PASS, DTYPE, TYPE, D, SUM_ROWS)                                        \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)                           \
      score_tokens_sm90_##PASS##_##DTYPE##_##D(const __grid_constant__ ScoreParams p) { \
    score<TYPE, D, SUM_ROWS>(p);                                                      \
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
