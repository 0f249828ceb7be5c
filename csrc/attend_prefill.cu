// attend_prefill: rows at any positions over paged keys, causal by position. Any tensor core from
// sm_80 on; attend_prefill_sm90.cu is the faster one where it applies.
//
// The simple version:
//   for each row and query head: out = Σ softmax(scale · qᵀ R(delta) k) v over the keys it sees
//
// What makes scattered rows run like dense ones:
// 1. a tile is 64 (row, query head) pairs of one KV head, and a row's mask is its position compared
//    with the keys': nothing asks the rows to be neighbours;
// 2. pages are copied as they lie, the next tile while this one is multiplied; tiles that no row
//    sees are never read, and only tiles that some row sees in part are masked;
// 3. few rows over many keys are split along the keys, and merged by their log-sum-exp;
// 4. an fp8 cache's tiles are widened in shared memory, once for all rows of the block.
//
// A key that a row does not see has weight 0, and 0 times a NaN or an infinity is NaN: a value that
// is one reaches all rows of a tile that has a row which sees it. Tiles never mix requests.

#include <cmath>

#include <type_traits>

#include "api.h"
#include "fp8.cuh"
#include "paged.cuh"
#include "powers.cuh"
#include "prefill_tiles.cuh"
#include "rotation.cuh"
#include "tensor_core.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kPairs = 16 * kWarps;
constexpr int kKeys = 64;
constexpr int kStages = 2;

// Tiles as they come from a cache of 8 bits an element, to be widened.
template <int D>
struct NarrowTiles {
  alignas(16) unsigned char narrow[kStages][2][kKeys * D];  // K, V
};
struct NoTiles {};

// Rows of T over a cache of C.
template <typename T, typename C, int D>
class Prefill {
 public:
  static constexpr bool kWidens = sizeof(C) == 1;
  static constexpr int kWideStages = kWidens ? 1 : kStages;
  static constexpr int kSteps = D / 16;
  static constexpr int kPitch = 2 * D + 16;  // bytes of a row: rows 8 apart share no bank
  static constexpr int kChunks = D / 8;      // of 16 bytes, in a row
  static constexpr int kWords = D * sizeof(C) / 16;  // the same of the cache
  static constexpr bool kHoldsQueries = D <= 128;  // in registers

  struct Shared : std::conditional_t<kWidens, NarrowTiles<D>, NoTiles> {
    alignas(16) unsigned char queries[kPairs * kPitch];
    alignas(16) unsigned char keys[kWideStages][kKeys * kPitch];
    alignas(16) unsigned char values[kWideStages][kKeys * kPitch];
    KeyTile<kKeys> tiles[kStages + 1];
    float cosines[D / 2], sines[D / 2];
  };

  __device__ Prefill(const AttendParams& params, Shared& shared)
      : p(params), sh(shared), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

  __device__ void run() {
    rows = row_tile(p, kPairs, blockIdx.y);
    if (rows.begin == rows.end) return;
    kv_head = blockIdx.x;
    group = static_cast<int>(p.query_heads / p.kv.kv_heads);
    reach = reach_of(p.kv, kv_head);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pair = rows.begin + 16 * warp + lane / 4 + 8 * i;
      positions[i] = pair < rows.end ? p.positions[rows.first_row + pair / group] : -1;
    }
    int lowest = INT_MAX, highest = -1;
    for (int pair = rows.begin + lane; pair < rows.end; pair += 32) {
      const int position = p.positions[rows.first_row + pair / group];
      lowest = min(lowest, position);
      highest = max(highest, position);
    }
    lowest = __reduce_min_sync(~0u, lowest);
    highest = __reduce_max_sync(~0u, highest);

    const auto place_of = [&](const Entry& entry) {
      return entry.offset + reach.rank * p.kv.head_stride;
    };
    KeyWalk<kKeys> walk(p.kv, reach, rows.request, lowest, highest, blockIdx.z, p.splits);
    if (warp == 0) {
      walk.write(sh.tiles[0], place_of);
      walk.write(sh.tiles[1], place_of);
    }
    load_queries(0);
    __syncthreads();
    if (kHoldsQueries) hold_queries();
    copy_tile(0, 0);

    for (int t = 0;; ++t) {
      const KeyTile<kKeys>& tile = sh.tiles[t % (kStages + 1)];
      if (tile.pages == 0) break;
      wait_for_copies<0>();
      __syncthreads();
      copy_tile((t + 1) % kStages, (t + 1) % (kStages + 1));
      if constexpr (kWidens) {
        widen_tile(t % kStages);
        __syncthreads();
      }
      if (tile.delta != turned_by) {
        load_queries(tile.delta);
        __syncthreads();
        if (kHoldsQueries) hold_queries();
      }
      attend(t % kWideStages, tile);
      if (warp == 0) walk.write(sh.tiles[(t + 2) % (kStages + 1)], place_of);
      __syncthreads();
    }
    write_results();
  }

 private:
  const AttendParams& p;
  Shared& sh;
  const int warp, lane;
  RowTile rows;
  Reach reach;
  int kv_head, group;
  int positions[2];  // of pairs lane / 4 and + 8 of this warp's 16
  int turned_by;
  uint32_t queries[kHoldsQueries ? kSteps : 1][4];
  float out[2 * kSteps][4] = {};
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};

  // The tile's queries, turned back by delta, into shared memory.
  __device__ void load_queries(int delta) {
    turned_by = delta;
    const int pairs = static_cast<int>(p.kv.pairs);
    if (delta != 0) {
      for (int i = threadIdx.x; i < pairs; i += kThreads) {
        cos_sin(half_turns(-delta, p.kv.inv_freq[i]), sh.cosines[i], sh.sines[i]);
      }
      __syncthreads();
    }
    const bool interleaved = p.kv.interleaved != 0;
    const auto angle_of = [&](int pair) { return float2{sh.cosines[pair], sh.sines[pair]}; };
    for (int i = threadIdx.x; i < kPairs * kChunks; i += kThreads) {
      const int pair = rows.begin + i / kChunks, chunk = i % kChunks;
      uint32_t packed[4] = {0, 0, 0, 0};
      if (pair < rows.end) {
        const T* query = static_cast<const T*>(p.q) +
                         (rows.first_row + pair / group) * p.q_row_stride +
                         (kv_head * group + pair % group) * p.q_head_stride;
        float x[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          x[e] = turned_element(query, chunk * 8 + e, delta == 0 ? 0 : pairs, interleaved,
                                angle_of);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) packed[e] = pack<T>(x[2 * e], x[2 * e + 1]);
      }
      *reinterpret_cast<uint4*>(sh.queries + i / kChunks * kPitch + chunk * 16) = {
          packed[0], packed[1], packed[2], packed[3]};
    }
  }

  __device__ uint32_t query_address() const {
    return shared_address(sh.queries) + (16 * warp + lane % 16) * kPitch + lane / 16 * 16;
  }

  __device__ void hold_queries() {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) load_matrices(queries[kHoldsQueries ? k : 0],
                                                   query_address() + 32 * k);
  }

  // Starts the copies of a tile; slots without a key become zeros.
  __device__ void copy_tile(int stage, int which) {
    const KeyTile<kKeys>& tile = sh.tiles[which];
    if (tile.pages > 0) {
      const C* cache = static_cast<const C*>(p.kv.cache);
      const int page = static_cast<int>(p.kv.page_tokens);
      uint32_t keys, values;
      if constexpr (kWidens) {
        keys = shared_address(sh.narrow[stage][0]);
        values = shared_address(sh.narrow[stage][1]);
      } else {
        keys = shared_address(sh.keys[stage]);
        values = shared_address(sh.values[stage]);
      }
#pragma unroll 4
      for (int i = threadIdx.x; i < kKeys * kWords; i += kThreads) {
        const int row = i / kWords, word = i % kWords;
        const bool there = tile.positions[row] != kNoKey;
        const int64_t offset = there ? tile.places[row / page] : 0;
        const C* key = cache + offset + row % page * p.kv.token_stride +
                       word * static_cast<int>(16 / sizeof(C));
        const int place = kWidens ? 16 * i : row * kPitch + word * 16;
        copy_async(keys + place, key, there);
        copy_async(values + place, key + p.kv.value_offset, there);
      }
    }
    commit_copies();
  }

  // Brings a tile that has come to 16 bits an element.
  __device__ void widen_tile(int stage) {
#pragma unroll 2
    for (int i = threadIdx.x; i < 2 * kKeys * kWords; i += kThreads) {
      const int which = i / (kKeys * kWords), at = i % (kKeys * kWords);
      const uint4 narrow = reinterpret_cast<const uint4*>(sh.narrow[stage][which])[at];
      const uint32_t from[4] = {narrow.x, narrow.y, narrow.z, narrow.w};
      uint32_t wide[8];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        wide[2 * w] = widen_two<T>(from[w]);
        wide[2 * w + 1] = widen_two<T>(from[w] >> 16);
      }
      unsigned char* tile = which == 0 ? sh.keys[0] : sh.values[0];
      uint4* to = reinterpret_cast<uint4*>(tile + at / kWords * kPitch + at % kWords * 32);
      to[0] = {wide[0], wide[1], wide[2], wide[3]};
      to[1] = {wide[4], wide[5], wide[6], wide[7]};
    }
  }

  __device__ void attend(int stage, const KeyTile<kKeys>& tile) {
    float s[kKeys / 8][4] = {};
    const uint32_t keys = shared_address(sh.keys[stage]) +
                          (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t held[4];
      if (!kHoldsQueries) load_matrices(held, query_address() + 32 * k);
      const uint32_t(&a)[4] = kHoldsQueries ? queries[kHoldsQueries ? k : 0] : held;
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        load_matrices(b, keys + 16 * n * kPitch + 32 * k);
        multiply_add<T>(s[2 * n], a, b[0], b[1]);
        multiply_add<T>(s[2 * n + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[n][e] = (p.softcap > 0 ? p.softcap * tanhf(s[n][e] * p.scale / p.softcap)
                                 : s[n][e] * p.scale) * kLog2e;
      }
    }
    if (tile.masked) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = tile.positions[8 * n + lane % 4 * 2 + e % 2];
          if (!sees(reach, positions[e / 2], key)) s[n][e] = -INFINITY;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = m[i];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        largest = fmaxf(largest, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const float base = largest == -INFINITY ? 0.0f : largest;
      const float shrink = exp2_fast(m[i] - base);
      m[i] = largest;
      l[i] *= shrink;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        s[n][2 * i] = exp2_fast(s[n][2 * i] - base);
        s[n][2 * i + 1] = exp2_fast(s[n][2 * i + 1] - base);
        l[i] += s[n][2 * i] + s[n][2 * i + 1];
      }
#pragma unroll
      for (int d = 0; d < 2 * kSteps; ++d) {
        out[d][2 * i] *= shrink;
        out[d][2 * i + 1] *= shrink;
      }
    }
    const uint32_t values = shared_address(sh.values[stage]) + lane % 16 * kPitch + lane / 16 * 16;
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      const uint32_t a[4] = {pack<T>(s[2 * n][0], s[2 * n][1]), pack<T>(s[2 * n][2], s[2 * n][3]),
                             pack<T>(s[2 * n + 1][0], s[2 * n + 1][1]),
                             pack<T>(s[2 * n + 1][2], s[2 * n + 1][3])};
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint32_t b[4];
        load_matrices_transposed(b, values + 16 * n * kPitch + 32 * k);
        multiply_add<T>(out[2 * k], a, b[0], b[1]);
        multiply_add<T>(out[2 * k + 1], a, b[2], b[3]);
      }
    }
  }

  __device__ void write_results() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      l[i] += __shfl_xor_sync(~0u, l[i], 1);
      l[i] += __shfl_xor_sync(~0u, l[i], 2);
      const int64_t at =
          result_row(p, rows, kv_head, rows.begin + 16 * warp + lane / 4 + 8 * i);
      if (at < 0) continue;
      const bool nothing = m[i] == -INFINITY && l[i] == 0;
      const float factor = nothing ? 0.0f : p.value_scale / l[i];
      const float lse = nothing ? -INFINITY : (m[i] + log2f(l[i])) * kLn2;
      if (lane % 4 == 0) {
        (p.splits > 1 ? partial_lse(p, blockIdx.z, D) : p.lse)[at] = lse;
      }
      const int column = lane % 4 * 2;
      if (p.splits > 1) {
        float* to = partial_out(p, blockIdx.z, D) + at * D + column;
#pragma unroll
        for (int d = 0; d < 2 * kSteps; ++d) {
          *reinterpret_cast<float2*>(to + 8 * d) = {out[d][2 * i] * factor,
                                                    out[d][2 * i + 1] * factor};
        }
      } else {
        T* to = static_cast<T*>(p.out) + at * D + column;
#pragma unroll
        for (int d = 0; d < 2 * kSteps; ++d) {
          *reinterpret_cast<uint32_t*>(to + 8 * d) =
              pack<T>(out[d][2 * i] * factor, out[d][2 * i + 1] * factor);
        }
      }
    }
  }
};

// Merges the splits of one (row, query head): a warp each.
template <typename T>
__device__ void merge_splits(const AttendParams& p) {
  const int64_t count = int64_t{p.rows} * p.query_heads;
  const int64_t at = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (at >= count) return;
  const int lane = threadIdx.x % 32, D = static_cast<int>(p.kv.head_dim);
  const int splits = static_cast<int>(p.splits);
  const float* lses = partial_lse(p, 0, D) + at;
  float largest = -INFINITY;
  for (int s = 0; s < splits; ++s) largest = fmaxf(largest, lses[s * count]);
  float sum = 0;
  for (int s = 0; s < splits; ++s) {
    if (lses[s * count] != -INFINITY) sum += expf(lses[s * count] - largest);
  }
  for (int d = lane; d < D; d += 32) {
    float value = 0;
    for (int s = 0; s < splits; ++s) {
      const float lse = lses[s * count];
      if (lse != -INFINITY) value += expf(lse - largest) * partial_out(p, s, D)[at * D + d];
    }
    static_cast<T*>(p.out)[at * D + d] = T(sum == 0 ? 0.0f : value / sum);
  }
  if (lane == 0) p.lse[at] = sum == 0 ? -INFINITY : largest + logf(sum);
}

}  // namespace

// Names and bytes of shared memory as rust/cuda/src/attend_plan.rs has them.
#define KERNEL(NAME, T, C, D, BLOCKS, BYTES)                                            \
  extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)                        \
      attend_prefill_##NAME##_##D(const __grid_constant__ AttendParams params) {        \
    using Kernel = Prefill<T, C, D>;                                                    \
    static_assert(sizeof(typename Kernel::Shared) == BYTES, "as attend_plan.rs has");   \
    extern __shared__ __align__(16) unsigned char shared[];                             \
    Kernel(params, *reinterpret_cast<typename Kernel::Shared*>(shared)).run();          \
  }
#define KERNELS(D, BLOCKS, BYTES)                              \
  KERNEL(bf16, __nv_bfloat16, __nv_bfloat16, D, BLOCKS, BYTES) \
  KERNEL(f16, __half, __half, D, BLOCKS, BYTES)
#define FP8_KERNELS(D, BLOCKS, BYTES)                          \
  KERNEL(bf16_fp8, __nv_bfloat16, Fp8, D, BLOCKS, BYTES)       \
  KERNEL(f16_fp8, __half, Fp8, D, BLOCKS, BYTES)
#define MERGE(DTYPE, TYPE)                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads)                              \
      attend_merge_##DTYPE(const __grid_constant__ AttendParams params) {             \
    merge_splits<TYPE>(params);                                                       \
  }

KERNELS(64, 2, 47344)
KERNELS(80, 2, 57648)
KERNELS(96, 2, 67952)
KERNELS(128, 2, 88560)
KERNELS(256, 1, 170992)
FP8_KERNELS(64, 2, 45296)
FP8_KERNELS(80, 2, 55600)
FP8_KERNELS(96, 2, 65904)
FP8_KERNELS(128, 2, 86512)
FP8_KERNELS(256, 1, 168944)
MERGE(bf16, __nv_bfloat16)
MERGE(f16, __half)
