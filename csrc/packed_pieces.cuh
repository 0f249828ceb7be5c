// How a thread block attends over packed pages: its share of the work, its pages on their way into
// shared memory, and the warps' parts put together. What a warp makes of a page is its own file.
#pragma once

#include <cmath>

#include "api.h"
#include "decode_merge.cuh"
#include "decode_units.cuh"
#include "hopper.cuh"
#include "packed_softmax.cuh"
#include "paged.cuh"
#include "tensor_core.cuh"

constexpr int kPackedItems = 512;  // of a launch; also in rust/cuda/src/attend_packed.rs

// `Rows` is what a warp makes of a page, and what all of a block's warps do before and after pages
// that have something in common: `PackedRows` says it.
template <typename Rows, int kWarps>
class AttendPacked {
 public:
  using T = typename Rows::Element;
  static constexpr int D = Rows::kDim;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = 2;
  static constexpr int kKnown = 32;      // pages that a warp knows of at once
  static constexpr int kWords = D / 4;   // of four floats, in a row of results
  static constexpr int kOutPitch = D + 4;
  static constexpr int kPart = kQueries * kOutPitch * 4;  // bytes of a warp's part
  static constexpr int kHeld = kThreads < kPart / 16 ? kThreads : kPart / 16 / kWords * kWords;
  static constexpr int kBatch = kThreads > 256 ? 4 : 10;

  struct Shared {
    uint64_t full[kWarps][kStages];  // barriers: copied
    alignas(16) State states[kWarps][kQueries];
    union {
      struct alignas(16) {
        float weights[kQueries][kWarps];
        State sums[kQueries];
      } of_warps;
      State sums_of_teams[kThreads];
    };
    PackedRun runs[kWarps][kStages];
    Item items[kPackedItems];
    int share, total;       // units of a thread block, and of all items together
    int last_read[kWarps];  // the stage that a warp left its part in; −1: it has none
    int spare;              // the stage of warp 0 that is free while parts are put together
    bool last;
    typename Rows::Shared of_rows;
  };

  __device__ AttendPacked(const AttendPackedParams& params, unsigned char* memory)
      : all(params),
        p(params.attend),
        sh(*reinterpret_cast<Shared*>(memory)),
        stages(memory + (sizeof(Shared) + 127) / 128 * 128),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        rows(params) {
    group = quotient(p.query_heads, p.head_factor);
    chunks = (group + kQueries - 1) / kQueries;
    items = p.requests * p.kv.kv_heads * chunks;
    workers = static_cast<int>(all.workers);
  }

  __device__ void run() {
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      for (int s = 0; s < kStages; ++s) barrier_init(sh.full[warp][s], 1);
      barrier_init_done();
    }
    __syncwarp();
#endif
    rows.prepare(sh.of_rows);
    lay_out();
    if (items == 0) return;
    share = sh.share;
    first = blockIdx.x * share;
    stop = min(first + share, sh.total);
    if (first >= stop) return;

    int item = with_units(item_of(first));
    if (item == items) return;
    open(item);
#pragma unroll 1
    for (int s = 0; s < kStages; ++s) fetch(s);
    while (item < items) item = piece(item);
#if __CUDA_ARCH__ < 900
    wait_for_copies<0>();
#endif
  }

 private:
  const AttendPackedParams& all;
  const AttendParams& p;
  Shared& sh;
  unsigned char* const stages;
  const int warp, lane;
  Rows rows;
  int group, chunks, items, workers;
  int share, first, stop;  // units of this thread block, of all items together

  // What this warp fetches next.
  struct Cursor {
    int item, unit, end;  // units count from the item's first
    int known;            // which of those that are known
    Reach reach;          // of the item
    int position;         // of its row
  } next;
  Entry known;  // of the page that is `lane` turns further on

  int stage = 0;        // the one that is filled first
  int freed = -1;       // the one that was read last, to be filled again
  uint32_t phases = 0;  // bit s: parity of stage s's phase

  // ---- sharing ------------------------------------------------------------------------------

  __device__ int begin_of(int item) const { return item == 0 ? 0 : sh.items[item - 1].end; }
  __device__ int units_of(int item) const { return sh.items[item].entries.count; }

  // The item that a unit is of.
  __device__ int item_of(int unit) const {
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

  // Finds what each item reads, and lays the items' units end to end: in equal shares, or, where
  // this takes no longer, so that no block has parts of two items.
  __device__ void lay_out() {
#pragma unroll 1
    for (int i = threadIdx.x; i < items; i += kThreads) {
      const Heads of = heads_of(i);
      const Reach reach = reach_of(p.kv, of.kv_head);
      const EntryRange range = entries_seen(p.kv, reach, of.request, p.positions[of.request]);
      sh.items[i] = {range.count + Rows::kItemCost, range};
      if (range.count == 0 && i % gridDim.x == blockIdx.x) {
#pragma unroll 1
        for (int d = 0; d < of.count * D; d += 4) {
          finish<T, D>(p, of, d / D, d % D, {0, 0, 0, 0}, {-INFINITY, 0});
        }
      }
    }
    __syncthreads();
    if (warp == 0) {
      int before = 0, most = 0;
#pragma unroll 1
      for (int i = 0; i < items; i += 32) {
        int sum = i + lane < items ? sh.items[i + lane].end : 0;
        most = max(most, __reduce_max_sync(~0u, sum));
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int lower = __shfl_up_sync(~0u, sum, step);
          if (lane >= step) sum += lower;
        }
        if (i + lane < items) sh.items[i + lane].end = before + sum;
        before += __shfl_sync(~0u, sum, 31);
      }
      share_out(before, most);
    }
    __syncthreads();
  }

  // By a warp: of so many units, of which the largest item has `most`.
  __device__ void share_out(int total, int most) {
    int each = quotient(total + gridDim.x - 1, p.block_factor);
    const int blocks = items > 0 ? static_cast<int>(gridDim.x) / items : 0;  // of an item
    if (blocks > 0) {
      const int whole = (most - Rows::kItemCost + blocks - 1) / blocks;
      if (whole > 0 && whole <= each) {
        each = whole;
        total = items * blocks * each;
#pragma unroll 1
        for (int i = lane; i < items; i += 32) sh.items[i].end = (i + 1) * blocks * each;
      }
    }
    if (lane == 0) sh.share = each, sh.total = total;
  }

  __device__ Heads heads_of(int item) const {
    const int pair = quotient(item, p.chunk_factor), chunk = item - pair * chunks;
    const int request = quotient(pair, p.head_factor);
    const int kv_head = pair - request * static_cast<int>(p.kv.kv_heads);
    return {request, kv_head, kv_head * group + chunk * kQueries,
            min(kQueries, group - chunk * kQueries)};
  }

  // ---- fetching -----------------------------------------------------------------------------

  __device__ unsigned char* stage_of(int of_warp, int s) const {
    return stages + (of_warp * kStages + s) * static_cast<int>(all.stage_bytes);
  }

  // Points the cursor at this warp's first unit of an item; warps beyond the workers have none.
  __device__ void open(int item) {
    const Span span = span_of(item);
    const Heads of = heads_of(item);
    next = {item, warp < workers ? span.from + warp : span.to, span.to, kKnown,
            reach_of(p.kv, of.kv_head), p.positions[of.request]};
  }

  // Starts the copy of this warp's next page into a stage, if there is one.
  __device__ void fetch(int s) {
    while (next.unit >= next.end && next.item < items) {
      const int item = with_units(next.item + 1);
      if (item < items) open(item); else next.item = items;
    }
    if (next.unit < next.end) {
      const int rank = next.reach.rank;
      if (next.known == kKnown) {
        const int unit = next.unit + lane * workers;
        known = {};
        if (unit < next.end) {
          known = rows.entry(sh.items[next.item].entries[unit], rank);
        }
        next.known = 0;
      }
      if (lane == next.known) sh.runs[warp][s] = {known, next.reach, next.position};
      const bool wanted = __shfl_sync(~0u, known.begin < known.end, next.known);
      const int64_t offset =
          __shfl_sync(~0u, known.offset + rank * p.kv.head_stride, next.known);
      copy(s, static_cast<const unsigned char*>(p.kv.cache) + offset, wanted);
      ++next.known;
      next.unit += workers;
    }
#if __CUDA_ARCH__ < 900
    commit_copies();
#endif
  }

  __device__ void copy(int s, const unsigned char* page, bool wanted) {
    const uint32_t to = shared_address(stage_of(warp, s));
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
      barrier_arrive_expecting(sh.full[warp][s], wanted ? all.page_bytes : 0);
      if (wanted) copy_bytes(to, page, all.page_bytes, sh.full[warp][s]);
    }
#else
    for (uint32_t at = 16 * lane; at < all.page_bytes; at += 512) {
      if (wanted) copy_async(to + at, page + at, true);
    }
#endif
  }

  __device__ void wait(int s) {
#if __CUDA_ARCH__ >= 900
    barrier_wait(sh.full[warp][s], phases >> s & 1);
    phases ^= 1u << s;
#else
    wait_for_copies<kStages - 1>();
#endif
    __syncwarp();
  }

  // This block's share of an item: every warp over its pages, then all put together; by runs of
  // pages that are alike. Returns the next item.
  __device__ int piece(int item) {
    const Span span = span_of(item);
    const Heads of = heads_of(item);
    const int rank = reach_of(p.kv, of.kv_head).rank;
    int unit = warp < workers ? span.from + warp : span.to;
#pragma unroll 1
    for (int from = span.from; from < span.to;) {
      const int to = rows.template alike<kThreads>(sh.of_rows, of, sh.items[item].entries, rank,
                                                   from, span.to);
      rows.begin(of, sh.of_rows);
      const bool any = unit < to;
#pragma unroll 1
      for (; unit < to; unit += workers) {
        if (freed >= 0) {
          __syncwarp();
          fetch(freed);
        }
        freed = stage;
        stage = stage + 1 == kStages ? 0 : stage + 1;
        wait(freed);
        rows.attend(of, sh.runs[warp][freed], stage_of(warp, freed));
      }
      add_up_warps(of, any);
      if constexpr (Rows::kTurned) {
        rows.template turn_back<kThreads>(sh.of_rows, of, sh.of_warps.sums, from == span.from,
                                          [&](auto take) { sum_parts(of, take); });
        if (to == span.to) {
          rows.result(of, [&](int i, const float4& value, const State& state) {
            put(item, of, span, i, value, state);
          });
        }
      } else {
        sum_parts(of, [&](int i, const float4& value) {
          put(item, of, span, i, value, sh.of_warps.sums[i / kWords]);
        });
      }
      if (to == span.to) pass(item, of, span);
#if __CUDA_ARCH__ >= 900
      show_to_async_units();
#endif
      __syncthreads();
      from = to;
    }
    return with_units(item + 1);
  }

  // ---- putting together ---------------------------------------------------------------------

  // Adds up the states of the warps' parts, each part in the stage that its warp read last, which
  // nothing is fetched into meanwhile.
  __device__ void add_up_warps(const Heads& of, bool any) {
    if (lane == 0) {
      sh.last_read[warp] = any ? freed : -1;
      // A piece's first page is the first warp's.
      if (warp == 0) sh.spare = freed;
    }
    auto* part = reinterpret_cast<float*>(stage_of(warp, max(freed, 0)));
    rows.leave(of, part, kOutPitch, sh.states[warp], any);
    __syncthreads();
    weigh_parts();
    __syncthreads();
  }

  // Calls take(i, value) with word i of the warps' parts together, by queries.
  template <typename Take>
  __device__ void sum_parts(const Heads& of, Take take) {
#pragma unroll 1
    for (int i = threadIdx.x; i < of.count * kWords; i += kThreads) {
      const int q = i / kWords, word = i % kWords;
      float4 value = {0, 0, 0, 0};
#pragma unroll 4
      for (int w = 0; w < workers; ++w) {
        const int read = sh.last_read[w];
        if (read < 0) continue;
        const auto* part = reinterpret_cast<const float4*>(stage_of(w, read));
        const float weight = sh.of_warps.weights[q][w];
        const float4 x = part[q * (kOutPitch / 4) + word];
        value.x += weight * x.x;
        value.y += weight * x.y;
        value.z += weight * x.z;
        value.w += weight * x.w;
      }
      take(i, value);
    }
  }

  __device__ float* partial_of(int item) const {
    return part_at<D>(p, Shares{share, 0}.place_of(blockIdx.x, begin_of(item)));
  }

  // Four numbers of a piece that is all of its item are a result; others go to the workspace.
  __device__ void put(int item, const Heads& of, const Span& span, int i, const float4& value,
                      const State& state) {
    const int q = i / kWords, word = i % kWords;
    if (span.to - span.from == units_of(item)) {
      finish<T, D>(p, of, q, 4 * word, value, state);
      return;
    }
    float* partial = partial_of(item);
    reinterpret_cast<float4*>(partial)[i] = value;
    if (word == 0) reinterpret_cast<State*>(partial + kQueries * D)[q] = state;
  }

  // The last block to leave a part of an item in the workspace adds them up.
  __device__ void pass(int item, const Heads& of, const Span& span) {
    const int done = span.to - span.from, units = units_of(item);
    if (done == units) return;
    float4* values = reinterpret_cast<float4*>(stage_of(0, sh.spare));
    pass_on<T, D, kThreads, kHeld, kBatch>(p, of, {item, begin_of(item), units, done}, share,
                                           values, sh.sums_of_teams, sh.last);
  }

  // How much each warp's part of a query counts: sixteen threads have a query, each of them a warp.
  __device__ void weigh_parts() {
    constexpr int kOf = 16;
    static_assert(kWarps <= kOf && kQueries * kOf <= kThreads, "threads of queries");
    if (threadIdx.x >= kQueries * kOf) return;
    const int q = threadIdx.x / kOf, w = threadIdx.x % kOf;
    const bool there = w < workers && sh.last_read[w] >= 0;
    const State own = there ? sh.states[w][q] : State{-INFINITY, 0};
    float largest = own.m;
#pragma unroll
    for (int step = 1; step < kOf; step *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    }
    const float weight = there ? weight_of(own, largest) : 0.0f;
    float sum = weight * own.l;
#pragma unroll
    for (int step = 1; step < kOf; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (w < kWarps) sh.of_warps.weights[q][w] = weight;
    if (w == 0) sh.of_warps.sums[q] = {largest, sum};
  }
};
