// targets: sm_90a
// attend_prefill for Hopper: the same result as attend_prefill.cu, by warpgroup products.
//
// A block has 128 (row, query head) pairs of one KV head, and three warpgroups: one warp of the
// first fetches pages by bulk copies, 128 keys at a time; the two others have 64 pairs each.
// While the tensor cores multiply the values of one tile, the threads make weights of the next
// tile's scores (the order of FlashAttention-3), so both are busy.
//
// Needs pages of 8, 16, 32, 64 or 128 tokens whose tokens follow each other without gaps, D 64 or
// 128, and a positive scale; rust/cuda/src/attend.rs asks for attend_prefill.cu otherwise.

#include <cmath>

#include "api.h"
#include "hopper.cuh"
#include "paged.cuh"
#include "prefill_tiles.cuh"
#include "rotation.cuh"

namespace {

constexpr int kGroups = 2;  // warpgroups that multiply
constexpr int kThreads = 128 * (1 + kGroups);
constexpr int kPairs = 64 * kGroups;
constexpr int kKeys = 128;
constexpr int kStages = 2;
constexpr int kTiles = 4;  // descriptions alive at once: of the tiles in both stages, and one done
constexpr int kFetchRegisters = 40;
constexpr int kMultiplyRegisters = 232;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLog2e = 1.4426950408889634f;

template <typename T, int D>
struct Shared {
  static constexpr int kBlocks = D / 64;  // of 128 bytes, in a row
  alignas(1024) unsigned char queries[kGroups][kBlocks][64 * 128];
  alignas(1024) unsigned char keys[kStages][kBlocks][kKeys * 128];
  alignas(1024) unsigned char values[kStages][kBlocks][kKeys * 128];
  KeyTile<kKeys> tiles[kTiles];
  float cosines[kGroups][D / 2], sines[kGroups][D / 2];
  uint64_t keys_full[kStages], values_full[kStages];    // copied
  uint64_t keys_empty[kStages], values_empty[kStages];  // read by all warps
  int lowest, highest;
};

// The one warp that fetches.
template <typename T, int D>
__device__ __forceinline__ void fetch(const TiledAttendParams& params, Shared<T, D>& sh,
                                      const RowTile& rows, const Reach& reach) {
  const AttendParams& p = params.attend;
  const int lane = threadIdx.x % 32;
  constexpr int kBlocks = Shared<T, D>::kBlocks;
  const int page = static_cast<int>(p.kv.page_tokens);
  KeyWalk<kKeys> walk(p.kv, reach, rows.request, sh.lowest, sh.highest, blockIdx.z, p.splits);
  for (uint32_t t = 0;; ++t) {
    const uint32_t stage = t % kStages, parity = t / kStages % 2;
    barrier_wait(sh.keys_empty[stage], parity ^ 1);
    KeyTile<kKeys>& tile = sh.tiles[t % kTiles];
    walk.write(tile);
    __syncwarp();
    const uint32_t bytes = static_cast<uint32_t>(tile.pages * page * D * 2);
    if (lane == 0) barrier_arrive_expecting(sh.keys_full[stage], bytes);
    if (bytes == 0) return;
    __syncwarp();
    for (int i = lane; i < tile.pages * kBlocks; i += 32) {
      const int which = i / kBlocks, block = i % kBlocks;
      const int row = static_cast<int>(tile.offsets[which] / D);
      copy_box(shared_address(sh.keys[stage][block]) + which * page * 128, &params.pages,
               64 * block, row, sh.keys_full[stage]);
    }
    barrier_wait(sh.values_empty[stage], parity ^ 1);
    if (lane == 0) barrier_arrive_expecting(sh.values_full[stage], bytes);
    __syncwarp();
    for (int i = lane; i < tile.pages * kBlocks; i += 32) {
      const int which = i / kBlocks, block = i % kBlocks;
      const int row = static_cast<int>((tile.offsets[which] + p.kv.value_offset) / D);
      copy_box(shared_address(sh.values[stage][block]) + which * page * 128, &params.pages,
               64 * block, row, sh.values_full[stage]);
    }
  }
}

// A warpgroup that multiplies.
template <typename T, int D>
class Multiply {
 public:
  __device__ __forceinline__ Multiply(const AttendParams& params, Shared<T, D>& shared,
                                      const RowTile& tile_rows, const Reach& tile_reach)
      : p(params),
        sh(shared),
        rows(tile_rows),
        reach(tile_reach),
        me(threadIdx.x / 128 - 1),
        lane(threadIdx.x % 32) {
    group = static_cast<int>(p.query_heads / p.kv.kv_heads);
    first_pair = rows.begin + 64 * me + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pair = first_pair + 8 * i;
      positions[i] = pair < rows.end ? p.positions[rows.first_row + pair / group] : -1;
    }
  }

  __device__ __forceinline__ void run() {
    float s[64];
    uint32_t weights[32];
    load_queries(0);
    uint32_t t = 0;
    barrier_wait(sh.keys_full[0], 0);
    if (sh.tiles[0].pages > 0) {
      turn_queries(sh.tiles[0]);
      products_begin();
      multiply_keys(s, 0);
      products_commit();
      products_wait<0>();
      hold(s);
      release(sh.keys_empty[0]);
      float shrink[2];
      soften(s, sh.tiles[0], shrink);
      round(s, weights);
      while (true) {
        const uint32_t next = t + 1;
        const KeyTile<kKeys>& tile = sh.tiles[next % kTiles];
        barrier_wait(sh.keys_full[next % kStages], next / kStages % 2);
        if (tile.pages == 0) break;
        turn_queries(tile);
        hold(s);
        products_begin();
        multiply_keys(s, next % kStages);
        products_commit();
        wait_for_values(t);
        hold(out);
        products_begin();
        multiply_values(weights, t % kStages);
        products_commit();
        products_wait<1>();
        hold(s);
        release(sh.keys_empty[next % kStages]);
        soften(s, tile, shrink);
        products_wait<0>();
        hold(out);
        release(sh.values_empty[t % kStages]);
#pragma unroll
        for (int i = 0; i < D / 2; ++i) out[i] *= shrink[i / 2 % 2];
        round(s, weights);
        t = next;
      }
      wait_for_values(t);
      hold(out);
      products_begin();
      multiply_values(weights, t % kStages);
      products_commit();
      products_wait<0>();
      hold(out);
    }
    write_results();
  }

 private:
  const AttendParams& p;
  Shared<T, D>& sh;
  const RowTile& rows;
  const Reach reach;
  const int me, lane;
  int group, first_pair;
  int positions[2];  // of pairs first_pair and + 8
  int turned_by = 0;
  float out[D / 2] = {};
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};  // largest score, before `scale`

  __device__ __forceinline__ void release(uint64_t& barrier) {
    if (lane == 0) barrier_arrive(barrier);
  }

  __device__ __forceinline__ void sync_group() { barrier_of_threads(1 + me, 128); }

  // This warpgroup's queries, turned back by delta, into shared memory.
  __device__ __forceinline__ void load_queries(int delta) {
    const int thread = threadIdx.x % 128;
    const int pairs = static_cast<int>(p.kv.pairs);
    const bool interleaved = p.kv.interleaved != 0;
    if (delta != 0) {
      for (int i = thread; i < pairs; i += 128) {
        cos_sin(half_turns(-delta, p.kv.inv_freq[i]), sh.cosines[me][i], sh.sines[me][i]);
      }
      sync_group();
    }
    for (int i = thread; i < 64 * (D / 8); i += 128) {
      const int row = i / (D / 8), chunk = i % (D / 8);
      const int pair = rows.begin + 64 * me + row;
      uint4 packed = {0, 0, 0, 0};
      if (pair < rows.end) {
        const T* query = static_cast<const T*>(p.q) +
                         (rows.first_row + pair / group) * p.q_row_stride +
                         (blockIdx.y * group + pair % group) * p.q_head_stride;
        packed = *reinterpret_cast<const uint4*>(query + 8 * chunk);
        if (delta != 0) packed = turned(query, packed, 8 * chunk, pairs, interleaved);
      }
      *reinterpret_cast<uint4*>(sh.queries[me][chunk / 8] + row * 128 +
                                (chunk % 8 ^ row % 8) * 16) = packed;
    }
    show_to_async_units();
    sync_group();
  }

  __device__ __noinline__ uint4 turned(const T* query, uint4 raw, int from, int pairs,
                                       bool interleaved) const {
    float x[8];
    const T* mine = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int d = from + e;
      x[e] = static_cast<float>(mine[e]);
      if (d >= 2 * pairs) continue;
      const int which = interleaved ? d / 2 : d % pairs;
      const bool is_first = interleaved ? d % 2 == 0 : d < pairs;
      const int other = interleaved ? d ^ 1 : (is_first ? d + pairs : d - pairs);
      const float rest = static_cast<float>(query[other]);
      x[e] = x[e] * sh.cosines[me][which] + (is_first ? -rest : rest) * sh.sines[me][which];
    }
    return {pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7])};
  }

  __device__ __forceinline__ void turn_queries(const KeyTile<kKeys>& tile) {
    if (tile.delta == turned_by) return;
    turned_by = tile.delta;
    load_queries(tile.delta);
  }

  __device__ __forceinline__ void multiply_keys(float (&s)[64], uint32_t stage) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      const uint32_t a = shared_address(sh.queries[me][k / 4]) + k % 4 * 32;
      const uint32_t b = shared_address(sh.keys[stage][k / 4]) + k % 4 * 32;
      Products<T>::keys(s, tile_of(a, 1024, 16), tile_of(b, 1024, 16), k > 0);
    }
  }

  __device__ __forceinline__ void multiply_values(const uint32_t (&weights)[32], uint32_t stage) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const uint32_t b = shared_address(sh.values[stage][0]) + k * 16 * 128;
      Products<T>::values(out, weights + 4 * k, tile_of(b, 1024, kKeys * 128));
    }
  }

  // Values of slots without a key may be anything, and nothing times infinity is not nothing.
  __device__ __forceinline__ void wait_for_values(uint32_t t) {
    const uint32_t stage = t % kStages;
    barrier_wait(sh.values_full[stage], t / kStages % 2);
    if (!sh.tiles[t % kTiles].gaps) return;
    constexpr int kBlocks = Shared<T, D>::kBlocks;
    const int thread = threadIdx.x - 128;
    for (int i = thread; i < kKeys * kBlocks * 8; i += 128 * kGroups) {
      const int row = i / 8 % kKeys, block = i / (8 * kKeys), chunk = i % 8;
      if (sh.tiles[t % kTiles].positions[row] == kNoKey) {
        *reinterpret_cast<uint4*>(sh.values[stage][block] + row * 128 + chunk * 16) = {0, 0, 0, 0};
      }
    }
    show_to_async_units();
    barrier_of_threads(1 + kGroups, 128 * kGroups);
  }

  // Scores to weights 2^(score − m): masks, moves m, adds to l, tells by how much `out` shrinks.
  __device__ __forceinline__ void soften(float (&s)[64], const KeyTile<kKeys>& tile,
                                         float (&shrink)[2]) {
    if (p.softcap > 0) {
      const float to = p.scale / p.softcap, from = p.softcap / p.scale;
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] = tanhf(s[i] * to) * from;
    }
    if (tile.masked) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const int2 keys = *reinterpret_cast<const int2*>(tile.positions + 8 * n + lane % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!sees(reach, positions[e / 2], e % 2 ? keys.y : keys.x)) s[4 * n + e] = -INFINITY;
        }
      }
    }
    const float scale = p.scale * kLog2e;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = m[i];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        largest = fmaxf(largest, fmaxf(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const float base = largest == -INFINITY ? 0.0f : largest * scale;
      shrink[i] = exp2_fast(m[i] * scale - base);
      m[i] = largest;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * n + 2 * i + e];
          x = exp2_fast(fmaf(x, scale, -base));
          sum += x;
        }
      }
      l[i] = l[i] * shrink[i] + sum;
    }
  }

  __device__ __forceinline__ void round(const float (&s)[64], uint32_t (&weights)[32]) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) weights[i] = pack<T>(s[2 * i], s[2 * i + 1]);
  }

  __device__ __forceinline__ void write_results() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      l[i] += __shfl_xor_sync(~0u, l[i], 1);
      l[i] += __shfl_xor_sync(~0u, l[i], 2);
      const int64_t at = result_row(p, rows, blockIdx.y, first_pair + 8 * i).index;
      if (at < 0) continue;
      const bool nothing = m[i] == -INFINITY && l[i] == 0;
      const float factor = nothing ? 0.0f : 1.0f / l[i];
      if (lane % 4 == 0) {
        (p.splits > 1 ? partial_lse(p, blockIdx.z, D) : p.lse)[at] =
            nothing ? -INFINITY : m[i] * p.scale + log2f(l[i]) * kLn2;
      }
      const int column = lane % 4 * 2;
      if (p.splits > 1) {
        float* to = partial_out(p, blockIdx.z, D) + at * D + column;
#pragma unroll
        for (int d = 0; d < D / 8; ++d) {
          *reinterpret_cast<float2*>(to + 8 * d) = {out[4 * d + 2 * i] * factor,
                                                    out[4 * d + 2 * i + 1] * factor};
        }
      } else {
        T* to = static_cast<T*>(p.out) + at * D + column;
#pragma unroll
        for (int d = 0; d < D / 8; ++d) {
          *reinterpret_cast<uint32_t*>(to + 8 * d) =
              pack<T>(out[4 * d + 2 * i] * factor, out[4 * d + 2 * i + 1] * factor);
        }
      }
    }
  }
};

template <typename T, int D>
__device__ __forceinline__ void attend_prefill(const TiledAttendParams& params, Shared<T, D>& sh) {
  const AttendParams& p = params.attend;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const RowTile rows = row_tile(p, kPairs, blockIdx.x);
  if (rows.begin == rows.end) return;
  const Reach reach = reach_of(p.kv, blockIdx.y);
  if (warp == 0) {
    const int group = static_cast<int>(p.query_heads / p.kv.kv_heads);
    int lowest = INT_MAX, highest = -1;
    for (int pair = rows.begin + lane; pair < rows.end; pair += 32) {
      const int position = p.positions[rows.first_row + pair / group];
      lowest = min(lowest, position);
      highest = max(highest, position);
    }
    sh.lowest = __reduce_min_sync(~0u, lowest);
    sh.highest = __reduce_max_sync(~0u, highest);
    if (lane == 0) {
      for (int i = 0; i < kStages; ++i) {
        barrier_init(sh.keys_full[i], 1);
        barrier_init(sh.values_full[i], 1);
        barrier_init(sh.keys_empty[i], 4 * kGroups);
        barrier_init(sh.values_empty[i], 4 * kGroups);
      }
      barrier_init_done();
    }
  }
  __syncthreads();
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kFetchRegisters));
    if (warp == 0) fetch(params, sh, rows, reach);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplyRegisters));
    Multiply<T, D>(p, sh, rows, reach).run();
  }
}

}  // namespace

// Names and bytes of shared memory as rust/cuda/src/attend.rs has them; the bytes count what it
// takes to begin at a multiple of 1024.
#define KERNEL(DTYPE, TYPE, D, BYTES)                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)                                    \
      attend_prefill_sm90_##DTYPE##_##D(const __grid_constant__ TiledAttendParams params) {    \
    static_assert(sizeof(Shared<TYPE, D>) + 1024 == BYTES, "as attend.rs has");                \
    extern __shared__ unsigned char shared[];                                                  \
    const uint32_t up = -shared_address(shared) & 1023;                                        \
    attend_prefill(params, *reinterpret_cast<Shared<TYPE, D>*>(shared + up));                  \
  }
#define KERNELS(D, BYTES)               \
  KERNEL(bf16, __nv_bfloat16, D, BYTES) \
  KERNEL(f16, __half, D, BYTES)

KERNELS(64, 87040)
KERNELS(128, 168960)
