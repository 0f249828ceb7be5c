// A decode step's attention, apart from how pages come into shared memory: see attend_decode.cu.
#pragma once

#include <cmath>

#include "api.h"
#include "decode_units.cuh"
#include "operands.cuh"
#include "paged.cuh"
#include "tensor_core.cuh"
#include "turned_queries.cuh"

// Rows of T over a cache of C. `Stages` are the warps' places in shared memory for units:
// CopiedStages or BulkStages.
template <typename T, typename C, int D, int kWarps, typename Stages>
class Decode {
 public:
  static constexpr int kThreads = 32 * kWarps;
  using Operand = Operands<T, C>;
  using Value = typename Operand::Value;
  static constexpr int kSteps = D / 16;
  static constexpr int kAtOnce = Operand::kAtOnce;
  static_assert(kSteps % kAtOnce == 0, "whole loads");
  static constexpr int kStages = Stages::kCount;
  static constexpr int kStage = Stages::kStage;
  // Floats of a row of partial results: of different banks where there is room.
  static constexpr int kOutPitch = kQueries * (D + 4) * 4 <= kStage ? D + 4 : D;
  static_assert(kQueries * kOutPitch * 4 <= kStage, "partial results fit a stage");

  struct Shared {
    typename Stages::Memory stages;
    Item items[kMaxItems];
    uint2 halves[kWarps][kStages][2];  // mask, delta
    State states[kWarps][kQueries];
    int slots[kWarps];
    State sums[kThreads];
    bool last;
  };

  // `source` is what the stages need to copy from the cache.
  __device__ Decode(const AttendParams& params, const typename Stages::Source& source,
                    Shared& shared)
      : p(params),
        sh(shared),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        stages(source, shared.stages) {
    group = p.query_heads / p.kv.kv_heads;
    chunks = (group + kQueries - 1) / kQueries;
    items = p.requests * p.kv.kv_heads * chunks;
    halves_per_entry = p.kv.page_tokens / kHalf;
  }

  __device__ void run() {
    lay_out();
    if (items == 0) return;
    const int total = sh.items[items - 1].end;
    share = (total + gridDim.x - 1) / gridDim.x;
    first = blockIdx.x * share;
    stop = min(first + share, total);
    if (first >= stop) return;

    int item = item_of(first);
    next = {item, 0, 0};
    open(next);
#pragma unroll 1
    for (int s = 0; s < kStages; ++s) fetch(s);
    for (; item < items && begin_of(item) < stop; ++item) {
      piece(item);
    }
    stages.finish();
  }

 private:
  const AttendParams& p;
  Shared& sh;
  const int warp, lane;
  Stages stages;
  int group, chunks, items, halves_per_entry;
  int share, first, stop;  // units of this thread block, of all items together

  // What this warp fetches next.
  struct Cursor {
    int item, unit, end;  // units count from the item's first
  } next;
  int known_item = -1, known_from = 0;  // `known` is of units known_from, + kWarps, …, 16 of them
  Half known;                           // of unit lane / 2, half lane % 2

  uint32_t queries[kSteps][2];  // B fragments: rows are elements, columns query heads
  int turned_by;                // delta that `queries` are turned back by

  __device__ int begin_of(int item) const { return item == 0 ? 0 : sh.items[item - 1].end; }

  __device__ int units_of(int item) const {
    return (sh.items[item].entries.count * halves_per_entry + 1) / 2;
  }

  __device__ int item_of(int unit) const {
    int low = 0, high = items;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (sh.items[middle].end > unit) high = middle; else low = middle + 1;
    }
    return low;
  }

  // Finds what each item reads, and lays the items' units end to end.
  __device__ void lay_out() {
#pragma unroll 1
    for (int i = threadIdx.x; i < items; i += kThreads) {
      const int kv_head = i / chunks % p.kv.kv_heads;
      const int request = i / chunks / p.kv.kv_heads;
      const Reach reach = reach_of(p.kv, kv_head);
      const int position = p.positions[request];
      const EntryRange range = entries_seen(p.kv, reach, request, position, position, true);
      sh.items[i] = {(range.count * halves_per_entry + 1) / 2 + kItemCost, range};
      if (range.count == 0 && i % gridDim.x == blockIdx.x) write_nothing(i);
    }
    __syncthreads();
    if (warp == 0) {
      int before = 0;
#pragma unroll 1
      for (int i = 0; i < items; i += 32) {
        int sum = i + lane < items ? sh.items[i + lane].end : 0;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int lower = __shfl_up_sync(~0u, sum, step);
          if (lane >= step) sum += lower;
        }
        if (i + lane < items) sh.items[i + lane].end = before + sum;
        before += __shfl_sync(~0u, sum, 31);
      }
    }
    __syncthreads();
  }

  __device__ void write_nothing(int i) const {
    const Heads of = heads_of(i);
#pragma unroll 1
    for (int q = 0; q < of.count; ++q) {
      T* out = out_row(of, q);
#pragma unroll 1
      for (int d = 0; d < D; ++d) out[d] = T(0.0f);
      *lse_of(of, q) = -INFINITY;
    }
  }

  struct Heads {
    int request, first, count;
  };
  __device__ Heads heads_of(int item) const {
    const int chunk = item % chunks;
    const int kv_head = item / chunks % p.kv.kv_heads;
    return {static_cast<int>(item / chunks / p.kv.kv_heads), kv_head * group + chunk * kQueries,
            min(kQueries, group - chunk * kQueries)};
  }
  __device__ T* out_row(const Heads& of, int q) const {
    return static_cast<T*>(p.out) + (int64_t{of.request} * p.query_heads + of.first + q) * D;
  }
  __device__ float* lse_of(const Heads& of, int q) const {
    return p.lse + int64_t{of.request} * p.query_heads + of.first + q;
  }

  // ---- fetching -----------------------------------------------------------------------------

  // Points a cursor at this warp's first unit of its item, within this block's share.
  __device__ void open(Cursor& at) const {
    if (at.item >= items) return;
    const int begin = begin_of(at.item);
    at.unit = max(first - begin, 0) + warp;
    at.end = min(stop - begin, units_of(at.item));
  }

  // Half `index` of an item's keys.
  __device__ Half half_of(int i, int index) const {
    const Item& item = sh.items[i];
    const int kv_head = i / chunks % p.kv.kv_heads;
    const int request = i / chunks / p.kv.kv_heads;
    const int which = index / halves_per_entry;
    if (which >= item.entries.count) return {0, 0, 0};
    const Reach reach = reach_of(p.kv, kv_head);
    const Entry entry = read_entry(p.kv, item.entries[which], reach.rank);
    const int slot = index % halves_per_entry * kHalf;
    const int position = p.positions[request];
    Half half;
    half.place = stages.place_of(entry.offset + reach.rank * p.kv.head_stride, slot);
    half.delta = entry.delta;
    half.mask = 0;
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
      const bool held = slot + j >= entry.begin && slot + j < entry.end;
      const int key = entry.position + slot + j - entry.begin;
      if (held && sees(reach, position, key)) half.mask |= 1u << j;
    }
    return half;
  }

  // Starts the copies of this warp's next unit into a stage, if there is one.
  __device__ void fetch(int stage) {
    while (next.item < items && next.unit >= next.end && begin_of(next.item) < stop) {
      ++next.item;
      open(next);
    }
    if (next.item < items && begin_of(next.item) < stop && next.unit < next.end) {
      if (next.item != known_item || next.unit - known_from >= 16 * kWarps) {
        known_item = next.item;
        known_from = next.unit;
        known = half_of(next.item, 2 * (next.unit + lane / 2 * kWarps) + lane % 2);
      }
      const int from = (next.unit - known_from) / kWarps * 2;
      const int64_t places[2] = {__shfl_sync(~0u, known.place, from),
                                 __shfl_sync(~0u, known.place, from + 1)};
      const uint32_t masks[2] = {__shfl_sync(~0u, known.mask, from),
                                 __shfl_sync(~0u, known.mask, from + 1)};
      if (lane == from || lane == from + 1) {
        sh.halves[warp][stage][lane - from] = {known.mask, static_cast<uint32_t>(known.delta)};
      }
      stages.copy(stage, places, masks);
      next.unit += kWarps;
    }
    stages.commit();
  }

  // ---- attending ----------------------------------------------------------------------------

  __device__ void load_queries(const Heads& of) {
    turned_by = 0;
    const T* query = query_of(of);
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      const int column = 16 * (i / 2) + Operand::key_column(lane, i % 2);
      queries[i / 2][i % 2] =
          query == nullptr ? 0u : reinterpret_cast<const uint32_t*>(query)[column / 2];
    }
  }

  __device__ void turn_queries(const Heads& of, int delta) {
    turned_by = delta;
    uint32_t turned[2 * kSteps];
    turned_queries<T, Operand, D>(turned, query_of(of), delta, p.kv);
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) queries[i / 2][i % 2] = turned[i];
  }

  // Element 0 of the query of this lane's column, or null.
  __device__ const T* query_of(const Heads& of) const {
    const int q = lane / 4;
    return q < of.count ? static_cast<const T*>(p.q) + of.request * p.q_row_stride +
                              (of.first + q) * p.q_head_stride
                        : nullptr;
  }

  // Scores of 16 keys: lane has keys lane / 4 and + 8 of queries lane % 4 · 2 and + 1.
  __device__ void score(float (&s)[4], int at) const {
    float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < kSteps; k += kAtOnce) {
      uint32_t loaded[4], a[kAtOnce][4];
      load_matrices(loaded, stages.keys(at, lane % 16, 2 * (k / kAtOnce) + lane / 16));
      Operand::keys(a, loaded);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        multiply_add<T>((k + i) % 2 ? odd : even, a[i], queries[k + i][0], queries[k + i][1]);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] = even[e] + odd[e];
  }

  // This block's share of an item: every warp over its units, then all put together.
  __device__ void piece(int item) {
    const int begin = begin_of(item);
    const int units = units_of(item);
    const int from = max(first - begin, 0), to = min(stop - begin, units);
    if (from >= to) return;
    const Heads of = heads_of(item);
    float out[kSteps][4] = {};
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};
    load_queries(of);

    bool any = false;
#pragma unroll 1
    for (int unit = from + warp; unit < to; unit += kWarps) {
      if (freed >= 0) {
        __syncwarp();
        fetch(freed);
      }
      freed = stage;
      stage = stage + 1 == kStages ? 0 : stage + 1;
      stages.wait(freed);
      __syncwarp();
      attend(freed, of, out, m, l);
      any = true;
    }
    put_together(item, of, from == 0 && to == units, any ? freed : -1, out, m, l);
  }

  int stage = 0;   // the one that is filled first
  int freed = -1;  // the one that was read last, to be filled again

  __device__ void attend(int at, const Heads& of, float (&out)[kSteps][4], float (&m)[2],
                         float (&l)[2]) {
    const uint2 low = sh.halves[warp][at][0], high = sh.halves[warp][at][1];
    stages.clear(at, low.x, high.x);

    // A page of 8 tokens may have another delta than the next one.
    const int deltas[2] = {low.x ? static_cast<int>(low.y) : static_cast<int>(high.y),
                           high.x ? static_cast<int>(high.y) : static_cast<int>(low.y)};
    if (deltas[0] != turned_by) turn_queries(of, deltas[0]);
    float s[4];
    score(s, at);
    if (deltas[1] != deltas[0]) {
      float upper[4];
      turn_queries(of, deltas[1]);
      score(upper, at);
      s[2] = upper[2];
      s[3] = upper[3];
    }

    const bool seen[2] = {((low.x >> (lane / 4)) & 1) != 0, ((high.x >> (lane / 4)) & 1) != 0};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      s[e] = p.softcap > 0 ? capped(s[e] * p.scale, p.softcap) : s[e] * p.scale;
      s[e] = seen[e / 2] ? s[e] * kLog2e : -INFINITY;
    }
    float shrink[2];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      float largest = fmaxf(s[q], s[q + 2]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      }
      largest = fmaxf(largest, m[q]);
      const float base = largest == -INFINITY ? 0.0f : largest;
      shrink[q] = exp2_fast(m[q] - base);
      m[q] = largest;
      s[q] = exp2_fast(s[q] - base);
      s[q + 2] = exp2_fast(s[q + 2] - base);
      l[q] = l[q] * shrink[q] + s[q] + s[q + 2];
    }
    if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[k][e] *= shrink[e % 2];
      }
    }
    const uint32_t weights[2] = {transpose_matrix(pack<Value>(s[0], s[1])),
                                 transpose_matrix(pack<Value>(s[2], s[3]))};
#pragma unroll
    for (int k = 0; k < kSteps; k += kAtOnce) {
      uint32_t loaded[4], a[kAtOnce][4];
      load_matrices_transposed(loaded, stages.values(at, lane / 16 * 8 + lane % 8,
                                                     2 * (k / kAtOnce) + lane / 8 % 2));
      Operand::values(a, loaded);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        multiply_add<Value>(out[k + i], a[i], weights[0], weights[1]);
      }
    }
  }

  // ---- putting together ---------------------------------------------------------------------

  __device__ float* partial_of(int slot) const {
    return p.partial + int64_t{slot} * (kQueries * D + 2 * kQueries);
  }

  // Adds up the warps' parts of a piece. A piece that is all of its item is the result; others go
  // to the workspace, and the last block to leave one there adds them up. A warp's part lies in
  // the stage that it read last, which nothing is fetched into meanwhile.
  __device__ void put_together(int item, const Heads& of, bool whole, int freed,
                               const float (&out)[kSteps][4], float (&m)[2], float (&l)[2]) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) l[q] += __shfl_xor_sync(~0u, l[q], step);
      if (lane < 4) sh.states[warp][2 * lane + q] = {m[q], l[q]};
    }
    if (lane == 0) sh.slots[warp] = freed;
    __syncwarp();
    if (freed >= 0) {
      float* part = reinterpret_cast<float*>(sh.stages.at(warp, freed));
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int column = 16 * k + Operand::value_column(lane, e / 2);
          part[(lane % 4 * 2 + e % 2) * kOutPitch + column] = out[k][e];
        }
      }
    }
    __syncthreads();

    // A block has two places in the workspace: for the item that begins before its share and for
    // the one that goes on after it.
    const int slot = 2 * blockIdx.x + (begin_of(item) > first ? 1 : 0);
    float* partial = whole ? nullptr : partial_of(slot);
#pragma unroll 1
    for (int i = threadIdx.x; i < of.count * D; i += kThreads) {
      const int q = i / D, d = i % D;
      float largest = -INFINITY;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, sh.states[w][q].m);
      float value = 0, sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (sh.slots[w] < 0) continue;
        const float weight = weight_of(sh.states[w][q], largest);
        const float* part = reinterpret_cast<const float*>(sh.stages.at(w, sh.slots[w]));
        value += weight * part[q * kOutPitch + d];
        sum += weight * sh.states[w][q].l;
      }
      if (whole) {
        finish(of, q, d, value, sum, largest);
      } else {
        partial[i] = value;
        if (d == 0) reinterpret_cast<State*>(partial + kQueries * D)[q] = {largest, sum};
      }
    }
    if (!whole) {
      __syncthreads();
      const int begin = begin_of(item);
      const int first_block = begin / share;
      const int last_block = (begin + units_of(item) - 1) / share;
      if (threadIdx.x == 0) {
        __threadfence();
        const uint32_t before = atomicAdd(p.counters + item, 1u);
        sh.last = before == static_cast<uint32_t>(last_block - first_block);
        if (sh.last) p.counters[item] = 0;
        __threadfence();
      }
      __syncthreads();
      if (sh.last) {
        add_up(of, begin, first_block, last_block);
      }
    }
    stages.reuse();
    __syncthreads();
  }

  __device__ void finish(const Heads& of, int q, int d, float value, float sum,
                         float largest) const {
    const bool nothing = largest == -INFINITY && sum == 0;
    out_row(of, q)[d] = T(nothing ? 0.0f : value / sum * p.value_scale);
    if (d == 0) *lse_of(of, q) = nothing ? -INFINITY : (largest + log2f(sum)) * kLn2;
  }

  // Adds up the blocks' parts of an item. Groups of threads take turns at the parts, each thread
  // four elements.
  __device__ void add_up(const Heads& of, int begin, int first_block, int last_block) {
    const auto part_of = [&](int block) {
      return partial_of(2 * block + (begin > block * share ? 1 : 0));
    };
    const int parts = last_block - first_block + 1;
    const int columns = of.count * D / 4;
    const int teams = max(1, min(kThreads, kStage / 16) / columns);  // their values fit a stage
    const int team = threadIdx.x / columns;
    float4* values = reinterpret_cast<float4*>(sh.stages.at(0, sh.slots[0]));
    for (int column = teams > 1 ? threadIdx.x % columns : threadIdx.x; column < columns;
         column += teams > 1 ? columns : kThreads) {
      const int q = column * 4 / D;
      float4 value = {0, 0, 0, 0};
      State state = {-INFINITY, 0};
      if (team < teams) {
        for (int i = team; i < parts; i += kBatch * teams) {
          add_parts(value, state, min(kBatch, (parts - i + teams - 1) / teams), [&](int j) {
            const float* part = part_of(first_block + i + j * teams);
            const float2 of_q = __ldcg(reinterpret_cast<const float2*>(part + kQueries * D) + q);
            return Part{__ldcg(reinterpret_cast<const float4*>(part) + column), {of_q.x, of_q.y}};
          });
        }
      }
      if (teams > 1) {
        if (team < teams) {
          values[threadIdx.x] = value;
          sh.sums[threadIdx.x] = state;
        }
        __syncthreads();
        if (team != 0) break;
        for (int other = 1; other < teams; ++other) {
          add(value, state, values[other * columns + column], sh.sums[other * columns + column]);
        }
      }
      const int d = column * 4 % D;
      finish(of, q, d, value.x, state.l, state.m);
      finish(of, q, d + 1, value.y, state.l, state.m);
      finish(of, q, d + 2, value.z, state.l, state.m);
      finish(of, q, d + 3, value.w, state.l, state.m);
    }
  }
};
