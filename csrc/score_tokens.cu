// score_tokens: attention mass of every key, summed over rows and query heads.
//
// The simple version:
//   for each row, query head: w = softmax(scale · qᵀ R(delta) k) over the keys the row sees
//   mass[p] = Σ_{rows, heads} w[p];  edge[row, head] = Σ w over keys outside sink and window
//
// What makes it fast, without ever storing the matrix of scores:
// 1. Two passes over the keys at the speed of the tensor cores: the first finds each (row, head)'s
//    log-sum-exp, the second computes the same scores again and sums exp(s − lse) by key.
// 2. All query heads of a KV head are rows of one matrix, so that a key is read once for all.
// 3. What a thread block holds stays in registers (score_tiles.cuh), what streams is in flight.
// 4. Few rows: the first pass is split over keys, and the warps of a block share its tiles out.
// 5. Keys stored for another position are rotated in shared memory, once a tile, with one
//    rounding: both passes see the same key.
//
// Kernels in order: find, rows, merge, keys, sum. Every number has one writer and a fixed order
// of addition, so that a call gives the same bits each time.

#include "api.h"
#include "plain_row.cuh"
#include "score_keys.cuh"
#include "score_rows.cuh"

namespace {

constexpr int kPlainWarps = 4;
constexpr int kPlainKeys = 4;  // keys that a warp has in registers

// Where the key at each position is. Looked up once, not by every thread block that reads it.
__device__ __forceinline__ void find(const ScoreParams& p) {
  const uint32_t position = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t table = blockIdx.y;
  if (position >= p.padded_keys) return;
  const int begin = p.kv.entry_offsets[table], end = p.kv.entry_offsets[table + 1];
  int64_t key_at = -1;
  int delta = 0;
  if (begin < end && position < p.keys) {
    const Entry entry = read_entry(p.kv, entry_at(p.kv, begin, end, static_cast<int>(position)),
                                   last_rank_of(p.kv, static_cast<int>(table)));
    const int64_t slot = entry.begin + (int64_t{position} - entry.position);
    if (slot >= entry.begin && slot < entry.end) {
      key_at = entry.offset + slot * p.kv.token_stride;
      delta = entry.delta;
    }
  }
  p.key_at[int64_t{table} * p.padded_keys + position] = key_at;
  p.delta_at[int64_t{table} * p.padded_keys + position] = delta;
}

// Puts the parts of the first pass together.
__device__ __forceinline__ void merge(const ScoreParams& p) {
  const int vectors = vectors_of(p);
  const int64_t states = int64_t{p.kv.kv_heads} * vectors;
  const int64_t state = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (state >= states) return;
  float top = kNoReference, sum = 0.0f, edge = 0.0f;
  for (uint32_t split = 0; split < p.splits; ++split) {
    top = fmaxf(top, p.partial[3 * split * states + state]);
  }
  for (uint32_t split = 0; split < p.splits; ++split) {
    const float* part = p.partial + 3 * split * states + state;
    const float weight = exp2f(part[0] - top);
    sum += weight * part[states];
    edge += weight * part[2 * states];
  }
  const bool nothing = sum == 0.0f;  // no key seen, or none with a weight: NaN is neither
  p.lse[state] = nothing ? INFINITY : top + log2f(sum);
  if (p.edge != nullptr) {
    const int kv_head = static_cast<int>(state / vectors);
    const QueryVector at = query_vector(p, kv_head, static_cast<int>(state % vectors));
    p.edge[int64_t{at.row} * p.query_heads + at.head] = nothing ? 0.0f : edge / sum;
  }
}

__device__ __forceinline__ void sum(const ScoreParams& p) {
  const uint32_t position = blockIdx.x * blockDim.x + threadIdx.x;
  if (position >= p.keys) return;
  float mass = 0.0f;
  for (uint32_t part = 0; part < p.mass_parts * p.kv.kv_heads; ++part) {
    mass += p.head_mass[int64_t{part} * p.padded_keys + position];
  }
  p.mass[position] = mass;
}

template <typename T, int D>
__device__ __forceinline__ void score_rows(const ScoreParams& p) {
  extern __shared__ __align__(16) unsigned char shared[];
  using Pass = ScoreRows<T, D>;
  Pass(p, *reinterpret_cast<typename Pass::Shared*>(shared)).run();
}

template <typename T, int D>
__device__ __forceinline__ void score_keys(const ScoreParams& p) {
  extern __shared__ __align__(16) unsigned char shared[];
  using Pass = ScoreKeys<T, D>;
  Pass(p, *reinterpret_cast<typename Pass::Shared*>(shared)).run();
}

// The first pass for what tensor cores do not take: a warp per query vector and part of the keys.
template <typename T, typename C>
__device__ __forceinline__ void score_rows_plain(const ScoreParams& p) {
  __shared__ float queries[kPlainWarps][2][kMaxHeadDim];
  const int warp = threadIdx.x / 32, kv_head = blockIdx.y, vectors = vectors_of(p);
  const int v = blockIdx.x * kPlainWarps + warp;
  if (v >= vectors) return;
  const QueryVector at = query_vector(p, kv_head, v);
  const Reach reach = reach_of(p.kv, kv_head);
  PlainQuery<T, C> query(p.kv, p.scale, p.softcap, queries[warp][0], queries[warp][1]);
  query.load(static_cast<const T*>(p.q) + at.row * p.q_row_stride + at.head * p.q_head_stride);

  const int position = p.positions[at.row];
  const int64_t split = blockIdx.z;
  const int64_t from = split * p.keys / p.splits, to = (split + 1) * p.keys / p.splits;
  const int64_t newest = int64_t{position} - p.edge_window;
  float top = kNoReference, sum = 0.0f, edge = 0.0f;
  const auto read = [&](const Entry& entry, int first, int last) {
    const C* keys = query.keys_of(entry, reach.rank);
    for (int slot = first; slot < last; slot += kPlainKeys * query.lanes.vectors) {
      float scores[kPlainKeys];
      query.score(keys, slot, last, scores);
      float highest = top;
#pragma unroll
      for (int i = 0; i < kPlainKeys; ++i) highest = fmaxf(highest, scores[i]);
      const float less = exp2f(top - highest);
      sum *= less;
      edge *= less;
      top = highest;
#pragma unroll
      for (int i = 0; i < kPlainKeys; ++i) {
        const float weight = exp2f(scores[i] - top);
        const int64_t key = int64_t{entry.position} + slot + i * query.lanes.vectors +
                            query.lanes.vector - entry.begin;
        sum += weight;
        if (key >= p.edge_sink && key <= newest) edge += weight;
      }
    }
  };
  const KeySpan span = span_of(reach, position);
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    const int32_t* ends = p.kv.entry_offsets + reach.table;
    walk_keys(p.kv, ends[0], ends[1], reach.rank,
              max(from, part == 0 ? 0 : span.oldest), min(to, part == 0 ? span.sink : span.end),
              read);
  }
  for (int step = query.lanes.width; step < 32; step *= 2) {
    const float highest = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    const float less = exp2f(top - highest);
    sum *= less;
    edge *= less;
    top = highest;
    sum += __shfl_xor_sync(~0u, sum, step);
    edge += __shfl_xor_sync(~0u, edge, step);
  }
  if (threadIdx.x % 32 != 0) return;
  const int64_t plane = int64_t{p.kv.kv_heads} * vectors;
  float* part = p.partial + 3 * split * plane + int64_t{kv_head} * vectors + v;
  part[0] = top;
  part[plane] = sum;
  part[2 * plane] = edge;
}

// The second: a warp per few keys, brought to their positions.
template <typename T, typename C>
__device__ __forceinline__ void score_keys_plain(const ScoreParams& p) {
  __shared__ float vectors_shared[kPlainWarps][2][kMaxHeadDim];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv_head = blockIdx.y;
  const int head_dim = static_cast<int>(p.kv.head_dim);
  const Reach reach = reach_of(p.kv, kv_head);
  const Lanes lanes = share_lanes(head_dim);
  float* stored = vectors_shared[warp][0];
  float* turned = vectors_shared[warp][1];

  const int from = (blockIdx.x * kPlainWarps + warp) * kPlainKeys;
  float key[kPlainKeys][kSlice], mass[kPlainKeys] = {};
  bool held[kPlainKeys];
#pragma unroll
  for (int i = 0; i < kPlainKeys; ++i) {
    const int64_t place = int64_t{reach.table} * p.padded_keys + from + i;
    const int64_t key_at = p.key_at[place];
    held[i] = key_at >= 0;
    const C* stored_key = static_cast<const C*>(p.kv.cache) + key_at +
                          reach.rank * p.kv.head_stride;
    for (int e = lane; e < head_dim; e += 32) {
      stored[e] = held[i] ? static_cast<float>(stored_key[e]) : 0.0f;
    }
    __syncwarp();
    rotate_vector<false>(p.kv, p.delta_at[place], stored, turned);
#pragma unroll
    for (int e = 0; e < kSlice; ++e) key[i][e] = lanes.holds ? turned[lanes.slice * kSlice + e] : 0;
    __syncwarp();
  }

  const int vectors = vectors_of(p);
  const T* queries = static_cast<const T*>(p.q) + lanes.slice * kSlice;
  const bool aligned = are_aligned<T>(p.q, p.q_row_stride | p.q_head_stride);
  for (int first = 0; first < vectors; first += lanes.vectors) {
    const int v = first + lanes.vector;
    const bool inside = v < vectors;
    const QueryVector at = query_vector(p, kv_head, inside ? v : 0);
    const int position = inside ? p.positions[at.row] : -1;
    const float lse = inside ? p.lse[int64_t{kv_head} * vectors + v] : INFINITY;
    Pack<T, kSlice> query = {};
    if (inside && lanes.holds) {
      query = load_slice(queries + at.row * p.q_row_stride + at.head * p.q_head_stride, aligned);
    }
#pragma unroll
    for (int i = 0; i < kPlainKeys; ++i) {
      float dot = 0.0f;
#pragma unroll
      for (int e = 0; e < kSlice; ++e) dot += key[i][e] * static_cast<float>(query.at[e]);
      const float score = score_of(sum_of_vector(lanes, dot), p.scale, p.softcap);
      if (held[i] && sees(reach, position, from + i)) mass[i] += exp2f(score - lse);
    }
  }
#pragma unroll
  for (int i = 0; i < kPlainKeys; ++i) {
    for (int step = lanes.width; step < 32; step *= 2) {
      mass[i] += __shfl_xor_sync(~0u, mass[i], step);
    }
    if (lane == 0) p.head_mass[int64_t{kv_head} * p.padded_keys + from + i] = mass[i];
  }
}

}  // namespace

#define KERNEL(NAME, THREADS, BLOCKS, BODY)                              \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)          \
      score_tokens_##NAME(const __grid_constant__ ScoreParams params) {  \
    BODY(params);                                                        \
  }
#define TILES(DTYPE, TYPE, D, BLOCKS)                                    \
  KERNEL(rows_##DTYPE##_##D, 256, BLOCKS, (score_rows<TYPE, D>))         \
  KERNEL(keys_##DTYPE##_##D, 256, BLOCKS, (score_keys<TYPE, D>))
#define ALL_TILES(DTYPE, TYPE)                                           \
  TILES(DTYPE, TYPE, 64, 2)                                              \
  TILES(DTYPE, TYPE, 80, 2)                                              \
  TILES(DTYPE, TYPE, 96, 2)                                              \
  TILES(DTYPE, TYPE, 128, 2)                                             \
  TILES(DTYPE, TYPE, 256, 1)
#define PLAIN(NAME, T, C)                                                \
  KERNEL(rows_plain_##NAME, 128, 4, (score_rows_plain<T, C>))            \
  KERNEL(keys_plain_##NAME, 128, 4, (score_keys_plain<T, C>))

KERNEL(find, 256, 1, find)
KERNEL(merge, 256, 1, merge)
KERNEL(sum, 256, 1, sum)
ALL_TILES(bf16, __nv_bfloat16)
ALL_TILES(f16, __half)
PLAIN(f32, float, float)
PLAIN(bf16, __nv_bfloat16, __nv_bfloat16)
PLAIN(f16, __half, __half)
PLAIN(f32_fp8, float, Fp8)
PLAIN(bf16_fp8, __nv_bfloat16, Fp8)
PLAIN(f16_fp8, __half, Fp8)
