// targets: sm_90a
// attend_prefill for Hopper: the same result as attend_prefill.cu, by warpgroup products.
//
// A block has 128 (row, query head) pairs of one KV head, and three warpgroups: of the first, one
// warp finds out which pages come next, 128 keys at a time, and another fetches them by bulk
// copies; the two others have 64 pairs each. While the tensor cores multiply the values of one
// tile, the threads make weights of the next tile's scores (the order of FlashAttention-3), so
// both are busy.
//
// A copy should be large, or the copy engine falls behind. Of a page of 64 tokens or more it takes
// 64 columns, and those of all pages lie one after the other. Of a smaller page it takes 16 tokens
// with all columns, as groups of 8 tokens, each group's blocks of 64 columns side by side. Either
// way groups are evenly spaced however pages lie, and one product takes all 128 keys.
//
// Needs pages of 16, 32, 64 or 128 tokens, D 64 or 128, a positive scale and no soft cap;
// rust/cuda/src/attend.rs asks for attend_prefill.cu otherwise.

#include <cmath>
#include <cstddef>

#include "api.h"
#include "hopper.cuh"
#include "paged.cuh"
#include "powers.cuh"
#include "prefill_tiles.cuh"
#include "rotation.cuh"

namespace {

constexpr int kGroups = 2;  // warpgroups that multiply
constexpr int kThreads = 128 * (1 + kGroups), kPairs = 64 * kGroups;
constexpr int kKeys = 128;
constexpr int kChunk = 16;  // tokens copied at once
constexpr int kStages = 5;  // tiles of keys or of values
constexpr int kAhead = 4;   // tiles described before they are copied
constexpr int kTiles = 8;   // descriptions alive at once: those, and those of tiles in stages
constexpr int kFetchRegisters = 56, kMultiplyRegisters = 224;
constexpr int kBoth = 1, kFirstGroup = 2, kFirstTurn = 4;  // hardware barriers

// Where the tokens of a tile lie: `kTall` copies take a page's with 64 columns.
template <int D, bool kTall>
struct Layout {
  static constexpr int kGroupBytes = kTall ? 1024 : 8 * D * 2;  // from 8 tokens to the next
  static constexpr int kBlockBytes = kTall ? kKeys * 128 : 1024;  // from 64 columns to the next

  // Of the first byte of 8 tokens' 64 columns.
  static __device__ __forceinline__ int offset(int group, int block) {
    return group * kGroupBytes + block * kBlockBytes;
  }
};

template <typename T, int D>
struct Shared {
  static constexpr int kTileBytes = kKeys * D * 2;
  alignas(1024) unsigned char queries[kGroups][D / 64][64 * 128];
  alignas(1024) unsigned char stages[kStages][kTileBytes];
  KeyTile<kKeys> tiles[kTiles];
  float cosines[kGroups][D / 2], sines[kGroups][D / 2];
  uint64_t described[kTiles];  // by all lanes
  uint64_t taken[kAhead];      // the tile's keys are asked for, into a stage that was free
  uint64_t full[kStages];      // copied
  uint64_t empty[kStages];     // read by all warps
  int lowest, highest;
};

// Its bytes, without the padding after the last member.
template <typename T, int D>
__host__ __device__ constexpr int used() {
  using All = Shared<T, D>;
  return static_cast<int>(offsetof(All, highest) + sizeof(int));
}

// Keys and values take stages in the order in which they are multiplied, K0 K1 V0 K2 V1 K3 …
using StageTurn = Turn<kStages>;
__device__ __forceinline__ StageTurn turn_of_keys(uint32_t t) {
  return StageTurn(t == 0 ? 0 : 2 * t - 1);
}
__device__ __forceinline__ StageTurn turn_of_values(uint32_t t) {
  return StageTurn(2 * t + 2);
}

// When tile t's keys have a stage, the values that were in it before were of tile
// t − (kStages + 3) / 2, whose description nobody reads any more. Its place, or one that is free
// for longer, is that of tile t + kAhead.
static_assert(2 * (kTiles - kAhead) >= kStages + 3 && kStages % 2 == 1, "descriptions are read");

// The warp that describes tiles of keys, up to `kAhead` before they are copied.
template <typename T, int D>
__device__ __forceinline__ void describe(const TiledAttendParams& params, Shared<T, D>& sh,
                                         const RowTile& rows, const Reach& reach) {
  const AttendParams& p = params.attend;
  // In the map's units: elements, beyond 2^32 of them, would take divisions too long for copies.
  const auto place_of = [&](const Entry& entry) -> int64_t {
    return entry.block * params.block_units + reach.rank * params.head_units;
  };
  KeyWalk<kKeys> walk(p.kv, reach, rows.request, sh.lowest, sh.highest, blockIdx.z, p.splits);
  int pages = -1;
  for (uint32_t t = 0; pages != 0; ++t) {
    const Turn<kAhead> ahead(t);
    const Turn<kTiles> tile(t);
    if (t >= kAhead) barrier_wait(sh.taken[ahead.place], ahead.parity ^ 1);
    pages = walk.write(sh.tiles[tile.place], place_of);
    barrier_arrive(sh.described[tile.place]);
  }
}

// The warp that has them copied. It does not describe them too, since it should be there as soon as
// a stage is free again.
template <bool kTall, typename T, int D>
__device__ __forceinline__ void fetch(const TiledAttendParams& params, Shared<T, D>& sh) {
  const int lane = threadIdx.x % 32;
  const int page_tokens = static_cast<int>(params.attend.kv.page_tokens);
  const int boxes = kTall ? D / 64 : page_tokens / kChunk;  // of a page
  const int bytes = page_tokens * D * 2 / boxes;            // of a box
  const int group = kTall ? 0 : lane % boxes * (kChunk / 8);
  const int block = kTall ? lane % boxes : 0;
  const int to = Layout<D, kTall>::offset(lane / boxes * (page_tokens / 8) + group, block);
  const auto copy_tile = [&](const StageTurn& turn, int count, int page) {
    barrier_wait(sh.empty[turn.place], turn.parity ^ 1);
    if (lane == 0) barrier_arrive_expecting(sh.full[turn.place], count * bytes);
    __syncwarp();
    if (lane < count) {
      copy_box(shared_address(sh.stages[turn.place]) + to, &params.pages, group, page,
               sh.full[turn.place], block);
    }
  };
  int count = -1, page = 0;  // of the tile before: boxes, and this lane's page
  for (uint32_t t = 0; count != 0; ++t) {
    const Turn<kTiles> turn(t);
    barrier_wait(sh.described[turn.place], turn.parity);
    const KeyTile<kKeys>& tile = sh.tiles[turn.place];
    const int next_count = tile.pages * boxes;
    const int next_page = lane < next_count ? static_cast<int>(tile.places[lane / boxes]) : 0;
    copy_tile(turn_of_keys(t), next_count, next_page);
    if (lane == 0) barrier_arrive(sh.taken[t % kAhead]);
    if (t > 0) copy_tile(turn_of_values(t - 1), count, page + static_cast<int>(params.value_units));
    count = next_count;
    page = next_page;
  }
}

// Eight elements of a turned query, from column `from` on. Not inlined: it is rare, and its code
// should not crowd out the rest.
template <typename T>
__device__ __noinline__ uint4 turned_chunk(const T* query, int from, const float* cosines,
                                           const float* sines, int pairs, bool interleaved) {
  const auto angle_of = [&](int pair) { return float2{cosines[pair], sines[pair]}; };
  const auto two = [&](int d) {
    return pack<T>(turned_element(query, d, pairs, interleaved, angle_of),
                   turned_element(query, d + 1, pairs, interleaved, angle_of));
  };
  return {two(from), two(from + 2), two(from + 4), two(from + 6)};
}

// A warpgroup that multiplies.
template <typename T, int D, bool kTall>
class Multiply {
 public:
  __device__ __forceinline__ Multiply(const AttendParams& params, Shared<T, D>& shared,
                                      const RowTile& tile_rows, const Reach& tile_reach)
      : p(params),
        sh(shared),
        rows(tile_rows),
        reach(tile_reach),
        me(__shfl_sync(~0u, threadIdx.x / 128 - 1, 0)),
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
    uint32_t weights[kKeys / 16][4];
    load_queries(0);
    wait_for(turn_of_keys(0));
    if (sh.tiles[0].pages > 0) {
      turn_queries(sh.tiles[0]);
      products_begin();
      multiply_keys(s, 0);
      products_commit();
      products_wait<0>();
      hold(s);
      release(turn_of_keys(0));
      const Scaling first = raise(s, sh.tiles[0]);
      weigh(s, 0, first);
      weigh(s, 1, first);
      round(s, weights);
      if (me == 0) give_turn();
      uint32_t t = 0;
      while (true) {
        const KeyTile<kKeys>& tile = sh.tiles[(t + 1) % kTiles];
        wait_for(turn_of_keys(t + 1));
        if (tile.pages == 0) break;
        turn_queries(tile);
        clear_gaps(t);
        take_turn();
        hold(s);
        products_begin();
        multiply_keys(s, t + 1);
        products_commit();
        wait_for(turn_of_values(t));
        hold(out);
        products_begin();
        multiply_values(weights, t);
        products_commit();
        give_turn();
        products_wait<1>();
        hold(s);
        release(turn_of_keys(t + 1));
        const Scaling scaling = raise(s, tile);
        weigh(s, 0, scaling);
        // The values' products end about now: sooner the threads would wait for them, and later
        // their stage would stand idle.
        not_before(l[0]);
        products_wait<0>();
        hold(out);
        release(turn_of_values(t));
        weigh(s, 1, scaling);
#pragma unroll
        for (int i = 0; i < D / 2; ++i) out[i] *= scaling.shrink[i / 2 % 2];
        round(s, weights);
        ++t;
      }
      clear_gaps(t);
      wait_for(turn_of_values(t));
      hold(out);
      products_begin();
      multiply_values(weights, t);
      products_commit();
      products_wait<0>();
      hold(out);
    }
    write_results();
  }

 private:
  using Tile = Layout<D, kTall>;
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

  __device__ __forceinline__ void wait_for(const StageTurn& turn) {
    barrier_wait(sh.full[turn.place], turn.parity);
  }

  __device__ __forceinline__ void release(const StageTurn& turn) {
    if (lane == 0) barrier_arrive(sh.empty[turn.place]);
  }

  // The warpgroups order their products in turns, so that one makes weights while the other's
  // products run.
  __device__ __forceinline__ void take_turn() {
    barrier_of_threads(kFirstTurn + me, 128 * kGroups);
  }

  __device__ __forceinline__ void give_turn() {
    barrier_pass(kFirstTurn + 1 - me, 128 * kGroups);
  }

  __device__ __forceinline__ void sync_group() { barrier_of_threads(kFirstGroup + me, 128); }

  // This warpgroup's queries into shared memory, turned back by delta: from the ones in global
  // memory each time, so with one rounding.
  __device__ __forceinline__ void load_queries(int delta) {
    const int thread = threadIdx.x % 128;
    const int pairs = static_cast<int>(p.kv.pairs);
    if (delta != 0) {
      for (int i = thread; i < pairs; i += 128) {
        cos_sin(half_turns(-delta, p.kv.inv_freq[i]), sh.cosines[me][i], sh.sines[me][i]);
      }
      sync_group();
    }
#pragma unroll 4
    for (int i = thread; i < 64 * (D / 8); i += 128) {
      const int row = i / (D / 8), chunk = i % (D / 8);
      const int pair = rows.begin + 64 * me + row;
      uint4 packed = {0, 0, 0, 0};
      if (pair < rows.end) {
        const T* query = static_cast<const T*>(p.q) +
                         (rows.first_row + pair / group) * p.q_row_stride +
                         (blockIdx.x * group + pair % group) * p.q_head_stride;
        packed = delta == 0 ? *reinterpret_cast<const uint4*>(query + 8 * chunk)
                            : turned_chunk(query, 8 * chunk, sh.cosines[me], sh.sines[me], pairs,
                                           p.kv.interleaved != 0);
      }
      *reinterpret_cast<uint4*>(sh.queries[me][chunk / 8] + row * 128 +
                                (chunk % 8 ^ row % 8) * 16) = packed;
    }
    show_to_async_units();
    sync_group();
  }

  __device__ __forceinline__ void turn_queries(const KeyTile<kKeys>& tile) {
    if (tile.delta == turned_by) return;
    turned_by = tile.delta;
    load_queries(turned_by);
  }

  __device__ __forceinline__ void multiply_keys(float (&s)[64], uint32_t t) {
    const uint64_t queries = uniform(tile_of(shared_address(sh.queries[me]), 1024, 16));
    const uint32_t stage = shared_address(sh.stages[turn_of_keys(t).place]);
    const uint64_t keys = uniform(tile_of(stage, Tile::kGroupBytes, 16));
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      Products<T>::keys(s, further(queries, k / 4 * sizeof(sh.queries[0][0]) + k % 4 * 32),
                        further(keys, Tile::offset(0, k / 4) + k % 4 * 32), k > 0);
    }
  }

  __device__ __forceinline__ void multiply_values(const uint32_t (&weights)[kKeys / 16][4],
                                                  uint32_t t) {
    const uint32_t stage = shared_address(sh.stages[turn_of_values(t).place]);
    const uint64_t values = uniform(tile_of(stage, Tile::kGroupBytes, Tile::kBlockBytes));
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      Products<T>::values(out, weights[k], further(values, Tile::offset(2 * k, 0)));
    }
  }

  // Values of slots without a key may be anything, and nothing times infinity is not nothing.
  // Both warpgroups do this together, so neither may have the other's turn meanwhile.
  __device__ __forceinline__ void clear_gaps(uint32_t t) {
    const KeyTile<kKeys>& tile = sh.tiles[t % kTiles];
    if (!tile.gaps) return;
    wait_for(turn_of_values(t));
    unsigned char* values = sh.stages[turn_of_values(t).place];
#pragma unroll 1
    for (int i = threadIdx.x - 128; i < kKeys * (D / 8); i += 128 * kGroups) {
      const int key = i / (D / 8), column = i % (D / 8);
      if (tile.positions[key] == kNoKey) {
        unsigned char* row = values + Tile::offset(key / 8, column / 8) + key % 8 * 128;
        reinterpret_cast<uint4*>(row)[column % 8] = {0, 0, 0, 0};
      }
    }
    show_to_async_units();
    barrier_of_threads(kBoth, 128 * kGroups);
  }

  // Scores become weights 2^(score − m) in two steps, `raise` and, for each row, `weigh`.
  // s[4 n + e] is of row e / 2 and key 8 n + lane % 4 · 2 + e % 2.

  // How scores are scaled down to weights, of a thread's two rows.
  struct Scaling {
    float base[2];    // `m` in powers of two
    float shrink[2];  // by how much former weights become less
  };

  // Masks, and moves m.
  __device__ __forceinline__ Scaling raise(float (&s)[64], const KeyTile<kKeys>& tile) {
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
    Scaling scaling;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = m[i];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        largest = fmaxf(largest, fmaxf(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      scaling.base[i] = largest == -INFINITY ? 0.0f : largest * scale;
      scaling.shrink[i] = exp2_fast(m[i] * scale - scaling.base[i]);
      m[i] = largest;
    }
    return scaling;
  }

  // Row i's scores to weights; adds to l.
  __device__ __forceinline__ void weigh(float (&s)[64], int i, const Scaling& scaling) {
    const float scale = p.scale * kLog2e;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * n + 2 * i + e];
        x = exp2_fast(fmaf(x, scale, -scaling.base[i]));
        sum += x;
      }
    }
    l[i] = l[i] * scaling.shrink[i] + sum;
  }

  __device__ __forceinline__ void round(const float (&s)[64],
                                        uint32_t (&weights)[kKeys / 16][4]) const {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) weights[i / 4][i % 4] = pack<T>(s[2 * i], s[2 * i + 1]);
  }

  __device__ __forceinline__ void write_results() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      l[i] += __shfl_xor_sync(~0u, l[i], 1);
      l[i] += __shfl_xor_sync(~0u, l[i], 2);
      const int64_t at = result_row(p, rows, blockIdx.x, first_pair + 8 * i);
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

template <bool kTall, typename T, int D>
__device__ __forceinline__ void attend_prefill(const TiledAttendParams& params, Shared<T, D>& sh) {
  const AttendParams& p = params.attend;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const RowTile rows = row_tile(p, kPairs, blockIdx.y);
  if (rows.begin == rows.end) return;
  const Reach reach = reach_of(p.kv, blockIdx.x);
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
      for (uint64_t& described : sh.described) barrier_init(described, 32);
      for (uint64_t& taken : sh.taken) barrier_init(taken, 1);
      for (uint64_t& full : sh.full) barrier_init(full, 1);
      for (uint64_t& empty : sh.empty) barrier_init(empty, 4 * kGroups);
      barrier_init_done();
    }
  }
  __syncthreads();
  if (warp < 4) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kFetchRegisters));
    if (warp == 0) fetch<kTall>(params, sh);
    if (warp == 1) describe(params, sh, rows, reach);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplyRegisters));
    Multiply<T, D, kTall>(p, sh, rows, reach).run();
  }
}

}  // namespace

// Names and bytes of shared memory as rust/cuda/src/attend.rs has them. A kernel without variables
// of its own in shared memory gets it from a multiple of 1024 on, as the swizzle needs.
#define KERNEL(DTYPE, TYPE, D, BYTES, NAME, TALL)                                              \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)                                    \
      attend_prefill_sm90_##DTYPE##_##D##NAME(                                                  \
          const __grid_constant__ TiledAttendParams params) {                                  \
    static_assert(used<TYPE, D>() == BYTES, "as attend.rs has");                                \
    extern __shared__ __align__(1024) unsigned char shared[];                                  \
    attend_prefill<TALL>(params, *reinterpret_cast<Shared<TYPE, D>*>(shared));                 \
  }
#define KERNELS(D, BYTES)                            \
  KERNEL(bf16, __nv_bfloat16, D, BYTES, , false)     \
  KERNEL(bf16, __nv_bfloat16, D, BYTES, _tall, true) \
  KERNEL(f16, __half, D, BYTES, , false)             \
  KERNEL(f16, __half, D, BYTES, _tall, true)

KERNELS(64, 104248)
KERNELS(128, 203064)
