// A decode step's attention, apart from how pages come into shared memory: see attend_decode.cu.
#pragma once

#include <cmath>

#include "api.h"
#include "decode_merge.cuh"
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
  static constexpr int kWords = D / 4;  // of four floats, in a row of results
  // Floats of a row of partial results: of different banks where there is room.
  static constexpr int kOutPitch = kQueries * (D + 4) * 4 <= kStage ? D + 4 : D;
  static_assert(kQueries * kOutPitch * 4 <= kStage, "partial results fit a stage");
  static constexpr int kRuns = kUnit / Stages::kRun;  // of a unit
  static constexpr int kKnown = 32 / kRuns;           // units that a warp knows of at once
  using Place = typename Stages::Place;

  // Threads that add up blocks' parts, of whose sums those of four elements fit a stage.
  static constexpr int kHeld = kThreads < kStage / 16 ? kThreads : kStage / 16;
  // Blocks' parts that a thread reads together, not one after the other: as registers allow.
  static constexpr int kBatch = kThreads > 256 ? 4 : 10;

  struct Shared {
    typename Stages::Memory stages;
    alignas(16) State states[kWarps][kQueries];
    union {
      struct alignas(16) {
        float weights[kQueries][kWarps];
        int places[kWarps];  // bytes
        State sums[kQueries];
      } of_warps;
      State sums_of_teams[kHeld];
    };
    int slots[kWarps];
    Item items[kMaxItems];
    uint2 runs[kWarps][kStages][kRuns];  // mask, delta
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
    group = quotient(p.query_heads, p.head_factor);
    chunks = (group + kQueries - 1) / kQueries;
    items = p.requests * p.kv.kv_heads * chunks;
    runs_per_entry = p.kv.page_tokens / Stages::kRun;
  }

  __device__ void run() {
    lay_out();
    if (items == 0) return;
    const int total = sh.items[items - 1].end;
    share = quotient(total + gridDim.x - 1, p.block_factor);
    first = blockIdx.x * share;
    stop = min(first + share, total);
    if (first >= stop) return;

    int item = with_units(item_of(first));
    if (item == items) return;
    open(item);
#pragma unroll 1
    for (int s = 0; s < kStages; ++s) {
      fetch(s);
      // Before the other copies, which all that is asked for after them waits for.
      if (s == 0) queries.load(query_of(heads_of(item)));
    }
    while (item < items) item = piece(item);
    stages.finish();
  }

 private:
  const AttendParams& p;
  Shared& sh;
  const int warp, lane;
  Stages stages;
  int group, chunks, items, runs_per_entry;
  int share, first, stop;  // units of this thread block, of all items together

  // What this warp fetches next.
  struct Cursor {
    int item, unit, end;  // units count from the item's first
    int known;            // which unit of those that are known
  } next;
  Run<Place> known;  // of unit lane / kRuns, run lane % kRuns

  TurnedQueries<T, Operand, D> queries;

  __device__ int begin_of(int item) const { return item == 0 ? 0 : sh.items[item - 1].end; }

  __device__ int units_of(int item) const {
    return (sh.items[item].entries.count * runs_per_entry + kRuns - 1) / kRuns;
  }

  // The item that a unit is of.
  __device__ int item_of(int unit) const {
    static_assert(kMaxItems <= 32 * 32, "two steps");
    int before = 0;
#pragma unroll
    for (int apart = 32; apart > 0; apart /= 32) {
      const int i = before + (lane + 1) * apart - 1;
      before += apart * __popc(__ballot_sync(~0u, i < items && sh.items[i].end <= unit));
    }
    return before;
  }

  // This block's units of an item, counted from its first: empty past its last.
  struct Span {
    int from, to;
  };
  __device__ Span span_of(int item) const {
    const int begin = begin_of(item);
    return {max(first - begin, 0), min(stop - begin, units_of(item))};
  }

  // The first item from `item` on that this block has units of; `items` when there is none.
  __device__ int with_units(int item) const {
#pragma unroll 1
    for (; item < items && begin_of(item) < stop; ++item) {
      const Span span = span_of(item);
      if (span.from < span.to) return item;
    }
    return items;
  }

  // Finds what each item reads, and lays the items' units end to end.
  __device__ void lay_out() {
#pragma unroll 1
    for (int i = threadIdx.x; i < items; i += kThreads) {
      const Heads of = heads_of(i);
      const Reach reach = reach_of(p.kv, of.kv_head);
      const int position = p.positions[of.request];
      const EntryRange range = entries_seen(p.kv, reach, of.request, position);
      sh.items[i] = {(range.count * runs_per_entry + kRuns - 1) / kRuns + kItemCost, range};
      if (range.count == 0 && i % gridDim.x == blockIdx.x) write_nothing(of);
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

  __device__ Heads heads_of(int item) const {
    const int pair = quotient(item, p.chunk_factor), chunk = item - pair * chunks;
    const int request = quotient(pair, p.head_factor);
    const int kv_head = pair - request * static_cast<int>(p.kv.kv_heads);
    return {request, kv_head, kv_head * group + chunk * kQueries,
            min(kQueries, group - chunk * kQueries)};
  }

  __device__ void write_nothing(const Heads& of) const {
#pragma unroll 1
    for (int i = 0; i < of.count * D; i += 4) {
      finish<T, D>(p, of, i / D, i % D, {0, 0, 0, 0}, {-INFINITY, 0});
    }
  }

  // ---- fetching -----------------------------------------------------------------------------

  // Points the cursor at this warp's first unit of an item.
  __device__ void open(int item) {
    const Span span = span_of(item);
    next = {item, span.from + warp, span.to, kKnown};
  }

  // Where run `index` of an item's keys is, and what says which of them are seen.
  struct Found {
    Entry entry;
    Reach reach;
    int position, slot;

    __device__ uint32_t mask() const { return mask_of(entry, reach, position, slot, Stages::kRun); }
  };
  __device__ Found find(int i, int index) const {
    const Item& item = sh.items[i];
    const int which = quotient(index, p.run_factor);
    Found found = {};
    if (which < item.entries.count) {
      const Heads of = heads_of(i);
      found.reach = reach_of(p.kv, of.kv_head);
      found.position = p.positions[of.request];
      found.entry = read_entry(p.kv, item.entries[which], found.reach.rank);
      found.slot = (index - which * runs_per_entry) * Stages::kRun;
    }
    return found;
  }

  // Starts the copies of this warp's next unit into a stage, if there is one.
  __device__ void fetch(int stage) {
    while (next.unit >= next.end && next.item < items) {
      const int item = with_units(next.item + 1);
      if (item < items) open(item); else next.item = items;
    }
    if (next.unit < next.end) {
      // Copies that do not ask for it need not wait for the mask.
      const bool known_before = next.known < kKnown;
      Found found;
      if (!known_before) {
        found = find(next.item, kRuns * (next.unit + lane / kRuns * kWarps) + lane % kRuns);
        known.place = stages.place_of(found.entry, found.reach.rank, found.slot);
        known.delta = found.entry.delta;
        if (Stages::kMasksCopies) known.mask = found.mask();
        next.known = 0;
      }
      stages.copy(stage, known, next.known * kRuns);
      if (!known_before && !Stages::kMasksCopies) known.mask = found.mask();
      if (lane / kRuns == next.known) {
        sh.runs[warp][stage][lane % kRuns] = {known.mask, static_cast<uint32_t>(known.delta)};
      }
      ++next.known;
      next.unit += kWarps;
    }
    stages.commit();
  }

  // ---- attending ----------------------------------------------------------------------------

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
        const uint32_t (&of)[2] = queries.fragments[k + i];
        multiply_add<T>((k + i) % 2 ? odd : even, a[i], of[0], of[1]);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] = even[e] + odd[e];
  }

  // This block's share of an item: every warp over its units, then all put together. Returns the
  // next item.
  __device__ int piece(int item) {
    const Span span = span_of(item);
    const Heads of = heads_of(item);
    float out[kSteps][4] = {};
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};

#pragma unroll 1
    for (int unit = span.from + warp; unit < span.to; unit += kWarps) {
      if (freed >= 0) {
        __syncwarp();
        fetch(freed);
      }
      freed = stage;
      stage = stage + 1 == kStages ? 0 : stage + 1;
      stages.wait(freed);
      __syncwarp();
      attend(freed, of, out, m, l);
    }
    const int following = with_units(item + 1);
    if (following < items) queries.load(query_of(heads_of(following)));
    put_together(item, of, span, out, m, l);
    return following;
  }

  int stage = 0;   // the one that is filled first
  int freed = -1;  // the one that was read last, to be filled again

  __device__ void attend(int at, const Heads& of, float (&out)[kSteps][4], float (&m)[2],
                         float (&l)[2]) {
    // Pages of 8 tokens may have another delta than the next ones.
    uint32_t mask = 0;
    int deltas[kRuns];
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const uint2 run = sh.runs[warp][at][i];
      mask |= run.x << i * Stages::kRun;
      deltas[i] = static_cast<int>(run.y);
    }
    // A run of which no key is seen needs no turn.
    if (kRuns == 2 && mask % 256 == 0) deltas[0] = deltas[kRuns - 1];
    if (kRuns == 2 && mask < 256) deltas[kRuns - 1] = deltas[0];
    stages.clear(at, mask);

    float s[4];
    queries.turn(query_of(of), deltas[0], p.kv);
    score(s, at);
    if (kRuns == 2 && deltas[kRuns - 1] != deltas[0]) {
      float upper[4];
      queries.turn(query_of(of), deltas[kRuns - 1], p.kv);
      score(upper, at);
      s[2] = upper[2];
      s[3] = upper[3];
    }

    const float factor = p.softcap > 0 ? kLog2e : p.scale * kLog2e;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (p.softcap > 0) s[e] = capped(s[e] * p.scale, p.softcap);
      const bool seen = (mask >> (lane / 4 + e / 2 * 8) & 1) != 0;
      s[e] = seen ? s[e] * factor : -INFINITY;
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

  // Adds up the warps' parts of a piece, each in the stage that its warp read last, which nothing
  // is fetched into meanwhile. A piece that is all of its item is the result; others go to the
  // workspace, and the last block to leave one there adds them up.
  __device__ void put_together(int item, const Heads& of, const Span& span,
                               const float (&out)[kSteps][4], float (&m)[2], float (&l)[2]) {
    const int done = span.to - span.from;
    const int parts = min(done, kWarps);  // warps that had a unit
    leave_part(of, warp < parts, out, m, l);
    __syncthreads();

    static_assert(kQueries * kWarps <= kThreads, "one each");
    if (threadIdx.x < kQueries * kWarps) {
      const int w = threadIdx.x % kWarps, q = threadIdx.x / kWarps;
      const State mine = w < parts ? sh.states[w][q] : State{-INFINITY, 0};
      float largest = mine.m;
#pragma unroll
      for (int step = 1; step < kWarps; step *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      }
      const float weight = weight_of(mine, largest);
      float sum = weight * mine.l;
#pragma unroll
      for (int step = 1; step < kWarps; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      sh.of_warps.weights[q][w] = weight;
      if (q == 0) {
        // Those without a part have no weight, so anyone's does.
        const int from = w < parts ? w : 0;
        sh.of_warps.places[w] =
            static_cast<int>(sh.stages.at(from, sh.slots[from]) -
                             reinterpret_cast<unsigned char*>(&sh.stages));
      }
      if (w == 0) sh.of_warps.sums[q] = {largest, sum};
    }
    __syncthreads();

    const int begin = begin_of(item), units = units_of(item);
    const bool whole = done == units;
    float* partial = part_at<D>(p, Shares{share, 0}.place_of(blockIdx.x, begin));
#pragma unroll 1
    for (int i = threadIdx.x; i < of.count * kWords; i += kThreads) {
      const int q = i / kWords, word = i % kWords;
      float4 value = {0, 0, 0, 0};
      const State state = sh.of_warps.sums[q];
      float weights[kWarps];
      int places[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; w += 4) {
        *reinterpret_cast<float4*>(weights + w) =
            reinterpret_cast<const float4&>(sh.of_warps.weights[q][w]);
        *reinterpret_cast<int4*>(places + w) =
            reinterpret_cast<const int4&>(sh.of_warps.places[w]);
      }
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const auto* part = reinterpret_cast<const float4*>(
            reinterpret_cast<const unsigned char*>(&sh.stages) + places[w]);
        const float4 x = part[q * (kOutPitch / 4) + word];
        value.x += weights[w] * x.x;
        value.y += weights[w] * x.y;
        value.z += weights[w] * x.z;
        value.w += weights[w] * x.w;
      }
      if (whole) {
        finish<T, D>(p, of, q, 4 * word, value, state);
      } else {
        reinterpret_cast<float4*>(partial)[i] = value;
        if (word == 0) reinterpret_cast<State*>(partial + kQueries * D)[q] = state;
      }
    }
    if (!whole) {
      float4* values = reinterpret_cast<float4*>(sh.stages.at(0, sh.slots[0]));
      pass_on<T, D, kThreads, kHeld, kBatch>(p, of, {item, begin, units, done}, share, values,
                                             sh.sums_of_teams, sh.last);
    }
    stages.reuse();
    __syncthreads();
  }

  // Leaves a warp's part for all to read.
  __device__ void leave_part(const Heads& of, bool any, const float (&out)[kSteps][4],
                             float (&m)[2], float (&l)[2]) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) l[q] += __shfl_xor_sync(~0u, l[q], step);
      if (lane < 4) sh.states[warp][2 * lane + q] = {m[q], l[q]};
    }
    if (lane == 0) sh.slots[warp] = freed;
    __syncwarp();
    if (any && lane % 4 * 2 < of.count) {
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
  }
};
