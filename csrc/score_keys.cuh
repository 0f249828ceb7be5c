// Second pass of score_tokens on tensor cores: the mass of each key.
#pragma once

#include <climits>
#include <cmath>

#include "score_tiles.cuh"

// The mass of keys, summed over the query vectors of a KV head.
template <typename T, int D>
class ScoreKeys : ScoreTiles<T, D> {
  using Base = ScoreTiles<T, D>;
  using Base::p, Base::sh, Base::warp, Base::lane, Base::kv_head, Base::reach, Base::held_part;
  using Base::tile_part, Base::warps_along, Base::factor;
  using Base::kTile, Base::kStages, Base::kChunk, Base::kHeld, Base::kWarps;

  int vectors, from;  // this warp holds the keys at positions from `from` on
  uint32_t keys;      // bit i: there is an i-th
  float mass[4];      // of this thread's keys: m · 16 + half · 8 + lane / 4

 public:
  using typename Base::Shared;
  static constexpr int kThreads = Base::kThreads;

  __device__ ScoreKeys(const ScoreParams& params, Shared& shared)
      : Base(params, shared, params.keys_held) {}

  __device__ void run() {
    vectors = vectors_of(p);
    from = blockIdx.x * p.keys_held + held_part * kHeld;
#pragma unroll
    for (int r = 0; r < 4; ++r) mass[r] = 0.0f;
    open();
    const int tiles = (vectors + kTile - 1) / kTile;
    for (int i = 0; i < kStages - 1; ++i) {
      fetch(i);
      commit_copies();
    }
    for (int i = 0; i < tiles; ++i) {
      wait_for_copies<kStages - 2>();
      __syncthreads();
      fetch(i + kStages - 1);
      commit_copies();
      take(i % kStages);
    }
    wait_for_copies<0>();
    write();
  }

 private:
  // Brings the block's keys to their positions and into registers.
  __device__ void open() {
    const int64_t row = int64_t{reach.table} * p.padded_keys;
    const int begin = blockIdx.x * p.keys_held, held = p.keys_held;
    for (int i = 0; i * kTile < held; ++i) {
      const int64_t* key_at = p.key_at + row + begin + i * kTile;
      this->copy_tile(i, [&](int key) {
        return key_at[key] < 0 ? static_cast<const T*>(nullptr) : this->key_address(key_at[key]);
      });
    }
    commit_copies();
    int delta = 0;
    if (static_cast<int>(threadIdx.x) < held) delta = p.delta_at[row + begin + threadIdx.x];
    sh.delta_at[threadIdx.x / kTile][threadIdx.x % kTile] = delta;
    keys = __ballot_sync(~0u, p.key_at[row + from + lane] >= 0);
    wait_for_copies<0>();
    if (__syncthreads_or(delta != 0)) {
      for (int i = 0; i * kTile < held; ++i) this->turn_keys(i, sh.delta_at[i]);
    }
    this->hold();
    __syncthreads();
  }

  // Starts the copies of the i-th tile of query vectors.
  __device__ void fetch(int i) {
    if (i * kTile >= vectors) return;
    this->copy_tile(i % kStages, [&](int row) {
      const int v = i * kTile + row;
      return v < vectors ? this->query_at(v) : static_cast<const T*>(nullptr);
    });
    if (threadIdx.x < kTile) {
      const int at = i % kStages * kTile + threadIdx.x, v = i * kTile + threadIdx.x;
      if (v < vectors) {
        const int row = query_vector(p, kv_head, v).row;
        copy_async_bytes<4>(shared_address(&sh.position[at]), p.positions + row);
        copy_async_bytes<4>(shared_address(&sh.lse[at]),
                            p.lse + int64_t{kv_head} * vectors + v);
      } else {
        sh.position[at] = -1;
        sh.lse[at] = INFINITY;
      }
    }
  }

  __device__ void take(int stage) {
    const int* positions = sh.position + stage * kTile;
    const int one = positions[lane], two = positions[lane + 32];
    const int highest = __reduce_max_sync(~0u, max(one, two));
    const int lowest = __reduce_min_sync(
        ~0u, min(one < 0 ? INT_MAX : one, two < 0 ? INT_MAX : two));
    const int to = from + kHeld - 1, window = reach.window;
    if (keys == 0 || highest < from) return;
    if (window > 0 && from >= reach.sink && to <= lowest - window) return;
    const bool all_seen = to <= lowest &&
                          (window == 0 || from > highest - window || to < reach.sink);
#pragma unroll 1
    for (int chunk = tile_part; chunk < kTile / kChunk; chunk += kWarps / warps_along) {
      float scores[2][kChunk / 8][4];
      this->multiply(scores, stage, chunk);
      const int column = stage * kTile + chunk * kChunk + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kChunk / 8; ++n) {
        const float2 lse = *reinterpret_cast<const float2*>(sh.lse + column + 8 * n);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          float* score = scores[r / 2][n] + r % 2 * 2;
          score[0] = exp2_fast(score[0] * factor - lse.x);
          score[1] = exp2_fast(score[1] * factor - lse.y);
        }
      }
      if (!all_seen) hide(scores, column);
#pragma unroll
      for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          mass[r] += scores[r / 2][n][r % 2 * 2] + scores[r / 2][n][r % 2 * 2 + 1];
        }
      }
    }
  }

  // Takes away the weights of keys that a row does not see; `column` is the thread's first row.
  __device__ void hide(float (&weights)[2][kChunk / 8][4], int column) const {
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
      const int2 position = *reinterpret_cast<const int2*>(sh.position + column + 8 * n);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int key = from + r * 8 + lane / 4;
        float* weight = weights[r / 2][n] + r % 2 * 2;
        if (!sees(reach, position.x, key)) weight[0] = 0.0f;
        if (!sees(reach, position.y, key)) weight[1] = 0.0f;
      }
    }
  }

  __device__ void write() {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      mass[r] += __shfl_xor_sync(~0u, mass[r], 1);
      mass[r] += __shfl_xor_sync(~0u, mass[r], 2);
    }
    __syncthreads();
    auto* parts = reinterpret_cast<float(*)[kHeld]>(sh.tiles[0]);
    if (lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 4; ++r) parts[warp][r * 8 + lane / 4] = mass[r];
    }
    __syncthreads();
    if (tile_part != 0) return;
    float total = parts[warp][lane];
    for (int other = warp + warps_along; other < kWarps; other += warps_along) {
      total += parts[other][lane];
    }
    const bool held_key = (keys >> lane & 1) != 0;
    p.head_mass[int64_t{kv_head} * p.padded_keys + from + lane] = held_key ? total : 0.0f;
  }
};
