// First pass of score_tokens on tensor cores: what normalises each query vector's scores.
#pragma once

#include <climits>
#include <cmath>

#include "score_tiles.cuh"

// What a sum of powers of two refers to until it has a term: 2^(x + kNoReference) is 0 for no x
// above −∞ that matters, and −∞ itself does not turn into NaN.
constexpr float kNoReference = -1e30f;
// A reference is raised when a term exceeds it by a factor of 2^kSlack: seldom, and no overflow.
constexpr float kSlack = 8.0f;

// Log-sum-exp and edge sum of the query vectors of a KV head, over a part of the keys.
template <typename T, int D>
class ScoreRows : ScoreTiles<T, D> {
  using Base = ScoreTiles<T, D>;
  using Base::p, Base::sh, Base::warp, Base::lane, Base::kv_head, Base::reach, Base::held_part;
  using Base::tile_part, Base::warps_along, Base::factor;
  using Base::kTile, Base::kStages, Base::kSlots, Base::kChunk, Base::kHeld, Base::kWarps;

  // Tiles of keys that any row of the block sees: [0, heads) and those from `tails` on.
  int heads, tails, first, last;
  int lowest, highest;  // positions of this warp's rows
  bool any_row;
  float reference[4], sum[4], edge[4];  // of this thread's rows: m · 16 + half · 8 + lane / 4

 public:
  using typename Base::Shared;
  static constexpr int kThreads = Base::kThreads;

  __device__ ScoreRows(const ScoreParams& params, Shared& shared)
      : Base(params, shared, params.rows_held) {}

  __device__ void run() {
    open();
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      reference[r] = kNoReference;
      sum[r] = edge[r] = 0.0f;
    }
    for (int i = 0; i < 2 * (kStages - 1); ++i) learn(first + i);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    this->hold();
    __syncthreads();
    for (int i = 0; i < kStages - 1; ++i) {
      fetch(first + i);
      commit_copies();
    }
    for (int i = first; i < last; ++i) {
      wait_for_copies<kStages - 2>();
      __syncthreads();
      // Places of keys are fetched a round of stages before the keys themselves.
      fetch(i + kStages - 1);
      learn(i + 2 * (kStages - 1));
      commit_copies();
      take(i);
    }
    wait_for_copies<0>();
    write();
  }

 private:
  __device__ int tile_at(int i) const { return i < heads ? i : i - heads + tails; }

  // Starts the copies of the block's query vectors, and finds the keys they see.
  __device__ void open() {
    const int held = p.rows_held, begin = blockIdx.x * held, vectors = vectors_of(p);
    for (int i = 0; i * kTile < held; ++i) {
      this->copy_tile(i, [&](int row) {
        const int v = begin + i * kTile + row;
        return v < vectors ? this->query_at(v) : static_cast<const T*>(nullptr);
      });
    }
    int position = -1;
    const int v = begin + threadIdx.x;
    if (static_cast<int>(threadIdx.x) < held && v < vectors) {
      position = p.positions[query_vector(p, kv_head, v).row];
    }
    sh.position[threadIdx.x] = position;
    const int low = __reduce_min_sync(~0u, position < 0 ? INT_MAX : position);
    const int high = __reduce_max_sync(~0u, position);
    if (lane == 0) {
      sh.bounds[0][warp] = low;
      sh.bounds[1][warp] = high;
    }
    __syncthreads();
    lowest = sh.bounds[0][held_part];
    highest = sh.bounds[1][held_part];
    any_row = highest >= 0;
    int block_lowest = INT_MAX, block_highest = -1;
    for (int i = 0; i < kWarps; ++i) {
      block_lowest = min(block_lowest, sh.bounds[0][i]);
      block_highest = max(block_highest, sh.bounds[1][i]);
    }
    const int end = static_cast<int>(min(int64_t{block_highest} + 1, int64_t{p.keys}));
    const int tiles = (end + kTile - 1) / kTile;
    heads = 0;
    tails = 0;
    if (reach.window > 0 && block_lowest >= reach.window) {
      tails = min((block_lowest - reach.window + 1) / kTile, tiles);
      heads = min((min(reach.sink, end) + kTile - 1) / kTile, tails);
    }
    const int64_t count = heads + tiles - tails;
    first = static_cast<int>(count * blockIdx.z / p.splits);
    last = static_cast<int>(count * (blockIdx.z + 1) / p.splits);
  }

  // Starts the copies of where the keys of the i-th tile are.
  __device__ void learn(int i) {
    if (i >= last) return;
    const int slot = i % kSlots;
    const int64_t from = int64_t{reach.table} * p.padded_keys + int64_t{tile_at(i)} * kTile;
    const int key = threadIdx.x % kTile;
    if (threadIdx.x < kTile) {
      copy_async_bytes<8>(shared_address(&sh.key_at[slot][key]), p.key_at + from + key);
    } else if (threadIdx.x < 2 * kTile) {
      copy_async_bytes<4>(shared_address(&sh.delta_at[slot][key]), p.delta_at + from + key);
    }
  }

  __device__ void fetch(int i) {
    if (i >= last) return;
    const int64_t* key_at = sh.key_at[i % kSlots];
    this->copy_tile(i % kStages, [&](int row) {
      return key_at[row] < 0 ? static_cast<const T*>(nullptr) : this->key_address(key_at[row]);
    });
  }

  __device__ void take(int i) {
    const int slot = i % kSlots, stage = i % kStages;
    const uint32_t held_low = __ballot_sync(~0u, sh.key_at[slot][lane] >= 0);
    const uint32_t held_high = __ballot_sync(~0u, sh.key_at[slot][lane + 32] >= 0);
    const bool turns = (sh.delta_at[slot][lane] | sh.delta_at[slot][lane + 32]) != 0;
    if (__any_sync(~0u, turns)) this->turn_keys(stage, sh.delta_at[slot]);
    if (!any_row || (held_low | held_high) == 0) return;

    const int from = tile_at(i) * kTile, to = from + kTile - 1;
    const int window = reach.window;
    const bool all_seen = (held_low & held_high) == ~0u && to <= lowest &&
                          (window == 0 || from > highest - window || to < reach.sink);
    const int edge_window = p.edge_window, edge_sink = p.edge_sink;
    const bool all_edge = from >= edge_sink && to <= lowest - edge_window;
    const bool no_edge = p.edge == nullptr || to < edge_sink || from > highest - edge_window;
#pragma unroll 1
    for (int chunk = tile_part; chunk < kTile / kChunk; chunk += kWarps / warps_along) {
      float scores[2][kChunk / 8][4];
      this->multiply(scores, stage, chunk);
      if (all_seen && (all_edge || no_edge)) {
        add(scores, all_edge);
      } else {
        const uint32_t keys = chunk * kChunk < 32 ? held_low : held_high;
        add_some(scores, from + chunk * kChunk, keys >> (chunk * kChunk % 32));
      }
    }
  }

  // Raises the references that the largest scores exceed by too much.
  __device__ void refer(const float (&tops)[4]) {
    bool exceeded = false;
#pragma unroll
    for (int r = 0; r < 4; ++r) exceeded |= tops[r] - reference[r] > kSlack;
    if (!exceeded) return;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float top = fmaxf(tops[r], reference[r]);
      const float less = exp2_fast(reference[r] - top);
      sum[r] *= less;
      edge[r] *= less;
      reference[r] = top;
    }
  }

  __device__ void add(float (&scores)[2][kChunk / 8][4], bool all_edge) {
    float tops[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      tops[r] = -INFINITY;
#pragma unroll
      for (int e = 0; e < kChunk / 4; ++e) {
        tops[r] = fmaxf(tops[r], scores[r / 2][e / 2][r % 2 * 2 + e % 2]);
      }
      tops[r] *= factor;
    }
    refer(tops);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int e = 0; e < kChunk / 4; ++e) {
        float& score = scores[r / 2][e / 2][r % 2 * 2 + e % 2];
        score = exp2_fast(score * factor - reference[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float part = 0.0f;
#pragma unroll
      for (int e = 0; e < kChunk / 4; ++e) part += scores[r / 2][e / 2][r % 2 * 2 + e % 2];
      sum[r] += part;
      if (all_edge) edge[r] += part;
    }
  }

  // The same where rows differ in what they see: keys from `from` on, of which bit i of `keys` says
  // whether there is an i-th.
  __device__ void add_some(float (&scores)[2][kChunk / 8][4], int from, uint32_t keys) {
    const int edge_window = p.edge_window, edge_sink = p.edge_sink;
    float tops[4];
    int positions[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      positions[r] = sh.position[held_part * kHeld + r * 8 + lane / 4];
      tops[r] = -INFINITY;
#pragma unroll
      for (int e = 0; e < kChunk / 4; ++e) {
        const int place = e / 2 * 8 + lane % 4 * 2 + e % 2;
        float& score = scores[r / 2][e / 2][r % 2 * 2 + e % 2];
        const bool seen = (keys >> place & 1) != 0 && sees(reach, positions[r], from + place);
        score = seen ? score * factor : -INFINITY;
        tops[r] = fmaxf(tops[r], score);
      }
    }
    refer(tops);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int e = 0; e < kChunk / 4; ++e) {
        const int key = from + e / 2 * 8 + lane % 4 * 2 + e % 2;
        const float score = scores[r / 2][e / 2][r % 2 * 2 + e % 2];
        const float weight = exp2_fast(score - reference[r]);
        sum[r] += weight;
        if (key >= edge_sink && key <= positions[r] - edge_window) edge[r] += weight;
      }
    }
  }

  __device__ void merge(int r, float other, float other_sum, float other_edge) {
    const float top = fmaxf(reference[r], other);
    const float mine = exp2_fast(reference[r] - top), theirs = exp2_fast(other - top);
    reference[r] = top;
    sum[r] = sum[r] * mine + other_sum * theirs;
    edge[r] = edge[r] * mine + other_edge * theirs;
  }

  __device__ void write() {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        const float other = __shfl_xor_sync(~0u, reference[r], step);
        const float other_sum = __shfl_xor_sync(~0u, sum[r], step);
        const float other_edge = __shfl_xor_sync(~0u, edge[r], step);
        merge(r, other, other_sum, other_edge);
      }
    }
    __syncthreads();
    auto* parts = reinterpret_cast<float(*)[kHeld][3]>(sh.tiles[0]);
    if (lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float* part = parts[warp][r * 8 + lane / 4];
        part[0] = reference[r];
        part[1] = sum[r];
        part[2] = edge[r];
      }
    }
    __syncthreads();
    if (tile_part != 0 || lane % 4 != 0) return;
    const int vectors = vectors_of(p);
    const int64_t plane = int64_t{p.kv.kv_heads} * vectors;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      for (int other = warp + warps_along; other < kWarps; other += warps_along) {
        const float* part = parts[other][r * 8 + lane / 4];
        merge(r, part[0], part[1], part[2]);
      }
      const int v = blockIdx.x * p.rows_held + held_part * kHeld + r * 8 + lane / 4;
      if (v >= vectors) continue;
      float* to = p.partial + 3 * blockIdx.z * plane + int64_t{kv_head} * vectors + v;
      to[0] = reference[r];
      to[plane] = sum[r];
      to[2 * plane] = edge[r];
    }
  }
};
