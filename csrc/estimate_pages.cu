// estimate_pages: attention over some pages, and an estimate of the pages that it left out.
//
// The simple version:
//   for each request, query head: the softmax over what was attended to, as one term of logit lse
//     and value attended, and for each listed entry that was not read one term of logit
//     softcap(scale · q · mean key) + ln(tokens) and value mean value
//
// What makes it run at the speed of reading means:
// 1. a page's means are read once for all query heads that share a KV head, by 16-byte loads: some
//    lanes have a page, and what they add up stays in registers while pages pass by. Pages that
//    were read already are not loaded;
// 2. which ones these are is known before: a thread block has the positions of its entries in
//    shared memory, and looks each position that was read up there once;
// 3. a row's entries are cut into splits by their number alone, which several thread blocks take.
//    The last of them to end adds the splits up in their order, with what was attended to. So a
//    row's answer does not depend on who else is in the batch, and one launch is all there is.
//
// A query is turned back for entries whose keys were rotated elsewhere: a thread block does so for
// one distance after the other, and mostly there is one.
//
// Tables that were made on the device cannot be checked on the host without waiting for them: an
// entry whose page has no means, or that covers no token, has no term. Positions of a table rise.

#include <cmath>

#include "api.h"
#include "powers.cuh"
#include "turned_element.cuh"
#include "vector.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kQueries = 4;     // query heads of a thread block: QUERIES of the launch
constexpr uint32_t kSplits = 32;  // of a row at most, one a lane where they are added up: SPLITS
constexpr uint32_t kLeast = 128;  // entries of a split, where there is more than one
constexpr int kWindow = 512;    // entries that a thread block knows at a time
constexpr uint32_t kAll = ~0u;

// How means of T are read where a head dim is at most kDim: `kColumns` loads of a lane for a
// vector, each of `kWords` elements.
template <typename T, int kDim>
struct Layout {
  static constexpr int kWords = 16 / sizeof(T);
  static constexpr int kLanes = kDim > 128 ? 16 : 8;  // of a page
  static constexpr int kColumns = kDim / (kLanes * kWords);
  static constexpr int kOwn = kColumns * kWords;  // elements of a lane
  static constexpr int kStep = kThreads / kLanes;  // pages of a thread block at a time
};

template <int kDim>
struct alignas(16) Shared {
  float queries[kQueries][kDim];  // turned, 0 behind the head dim
  float values[kWarps][kQueries][kDim];
  float tops[kWarps][kQueries], sums[kWarps][kQueries];
  float weights[kSplits][kQueries], own_weight[kQueries], total[kQueries];
  int64_t pages[kWindow];  // row of the entry's means, −1 for none
  int positions[kWindow];
  int deltas[kWindow];
  float tokens[kWindow];  // the logarithm of their number, to base 2
  int next;               // the first entry that has not been met yet
  bool is_last;
};

// Begin and number of the entries of one table of a request.
struct Span {
  int64_t base;
  uint32_t count;
};

__device__ __forceinline__ Span span_of(const int32_t* offsets, const int32_t* heads,
                                        uint32_t tables, uint32_t request, uint32_t head) {
  const int32_t table = heads == nullptr ? 0 : heads[4 * head];
  const int32_t* ends = offsets + int64_t{request} * tables + table;
  return {ends[0], static_cast<uint32_t>(max(ends[1] - ends[0], 0))};
}

template <typename T, int kDim>
class Estimate {
  using L = Layout<T, kDim>;
  static constexpr int kPart = kQueries * (kDim + 2);  // floats of a split: values, tops, sums

  const EstimatePagesParams& p;
  Shared<kDim>& sh;
  const uint32_t head = blockIdx.x % p.kv_heads;
  const uint32_t chunk = blockIdx.x / p.kv_heads % p.chunks;
  const uint32_t own = blockIdx.x / p.kv_heads / p.chunks % p.blocks;  // of the row's blocks
  const uint32_t request = blockIdx.x / p.kv_heads / p.chunks / p.blocks;
  const uint32_t item = (request * p.kv_heads + head) * p.chunks + chunk;
  const uint32_t queries = min(p.group - chunk * kQueries, static_cast<uint32_t>(kQueries));
  const int64_t first = int64_t{request} * p.kv_heads * p.group + head * p.group +
                        chunk * kQueries;  // of these queries among all
  Span listed, read;
  int64_t rank;
  int delta = 0;
  bool is_turned = false;  // queries are in shared memory, by `delta`
  // Of this lane's elements, over the pages that it has met.
  float tops[kQueries], sums[kQueries], values[kQueries][L::kOwn];

 public:
  __device__ Estimate(const EstimatePagesParams& params, Shared<kDim>& shared)
      : p(params), sh(shared) {}

  __device__ void run() {
    listed = span_of(p.entry_offsets, p.heads, p.tables, request, head);
    const uint32_t splits = min((listed.count + kLeast - 1) / kLeast, kSplits);
    if (splits == 0 && own == 0) leave_as_it_is();
    if (own >= splits) return;
    read = span_of(p.read_offsets, p.read_heads, p.read_tables, request, head);
    rank = p.heads == nullptr ? p.first_rank + head : p.heads[4 * head + 1];
    for (uint32_t split = own; split < splits; split += p.blocks) {
      begin();
      const uint32_t from = bound(split, splits), to = bound(split + 1, splits);
      for (uint32_t at = from; at < to; at += kWindow) {
        const int count = static_cast<int>(min(to - at, static_cast<uint32_t>(kWindow)));
        learn(listed.base + at, count);
        meet(count);
      }
      put_down(split);
    }
    if (is_last(min(p.blocks, splits))) add_up(splits);
  }

 private:
  __device__ __forceinline__ uint32_t bound(uint32_t split, uint32_t splits) const {
    return static_cast<uint32_t>(uint64_t{listed.count} * split / splits);
  }

  __device__ __forceinline__ float* part_of(uint32_t split) const {
    return p.partial + (int64_t{item} * kSplits + split) * kPart;
  }

  __device__ void leave_as_it_is() const {
    const auto* from = static_cast<const T*>(p.attended) + first * p.head_dim;
    auto* to = static_cast<T*>(p.out) + first * p.head_dim;
    for (uint32_t i = threadIdx.x; i < queries * p.head_dim; i += kThreads) to[i] = from[i];
    if (threadIdx.x < queries) p.lse[first + threadIdx.x] = p.attended_lse[first + threadIdx.x];
  }

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      tops[i] = -INFINITY;
      sums[i] = 0.0f;
#pragma unroll
      for (int e = 0; e < L::kOwn; ++e) values[i][e] = 0.0f;
    }
  }

  // Brings entries from `base` on into shared memory; those that have been read have no page.
  __device__ __forceinline__ void learn(int64_t base, int count) {
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const int32_t* entry = p.entries + 5 * (base + i);
      const int64_t page = entry[0] + rank;
      const int tokens = entry[2] - entry[1];
      const bool is_there = entry[0] >= 0 && page < p.pages && tokens > 0;
      sh.pages[i] = is_there ? page : -1;
      sh.positions[i] = entry[3];
      sh.deltas[i] = entry[4];
      sh.tokens[i] = log2f(static_cast<float>(max(tokens, 1)));
    }
    __syncthreads();
    const int lowest = sh.positions[0], highest = sh.positions[count - 1];
    for (uint32_t i = threadIdx.x; i < read.count; i += kThreads) {
      const int position = __ldg(p.read + 5 * (read.base + i) + 3);
      if (position < lowest || position > highest) continue;
      int low = 0, high = count - 1;
      while (low < high) {
        const int middle = (low + high) / 2;
        if (sh.positions[middle] < position) low = middle + 1; else high = middle;
      }
      if (sh.positions[low] == position) sh.pages[low] = -1;
    }
    __syncthreads();
  }

  // Meets the entries in shared memory: those of one delta after the other, in the order of the
  // first of each.
  __device__ __forceinline__ void meet(int count) {
    for (int from = 0; from < count; from = sh.next) {
      const int wanted = sh.deltas[from];
      if (!is_turned || wanted != delta) turn(wanted);
      __syncthreads();
      if (threadIdx.x == 0) sh.next = count;
      __syncthreads();
      for (int entry = from + 1 + threadIdx.x; entry < count; entry += kThreads) {
        if (sh.deltas[entry] != delta && is_first(entry)) atomicMin(&sh.next, entry);
      }
      take(from, count);
      __syncthreads();
    }
  }

  // Whether no entry before has this one's delta.
  __device__ __forceinline__ bool is_first(int entry) const {
    for (int i = 0; i < entry; ++i) {
      if (sh.deltas[i] == sh.deltas[entry]) return false;
    }
    return true;
  }

  // Brings the queries as keys of an entry with this delta meet them.
  __device__ __forceinline__ void turn(int wanted) {
    const auto* q = static_cast<const T*>(p.q) + request * p.q_row_stride +
                    (int64_t{head} * p.group + chunk * kQueries) * p.q_head_stride;
    for (int i = threadIdx.x; i < kQueries * kDim; i += kThreads) {
      const int query = i / kDim, d = i % kDim;
      float element = 0.0f;
      if (query < queries && d < p.head_dim) {
        const T* vector = q + query * p.q_head_stride;
        element = wanted == 0 ? static_cast<float>(vector[d])
                              : turned(vector, d, wanted, p.inv_freq, static_cast<int>(p.pairs),
                                       p.interleaved != 0);
      }
      sh.queries[query][d] = element;
    }
    delta = wanted;
    is_turned = true;
  }

  // Takes in the entries from `from` on that have the queries' delta. A warp's lanes stay together.
  __device__ __forceinline__ void take(int from, int count) {
    const uint32_t lane = threadIdx.x % L::kLanes;
    for (int at = from; at < count; at += L::kStep) {
      const int entry = at + static_cast<int>(threadIdx.x / L::kLanes);
      const bool asked = entry < count && sh.deltas[entry] == delta;
      const int64_t page = asked ? sh.pages[entry] : -1;
      if (__all_sync(kAll, page < 0)) continue;
      Pack<T, L::kWords> key[L::kColumns], value[L::kColumns];
      fetch(key, 2 * page, lane);
      fetch(value, 2 * page + 1, lane);
      const float tokens = page >= 0 ? sh.tokens[entry] : 0.0f;
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
        if (i < queries) {
          const float dot = dot_of(sh.queries[i], key, lane);
          // Of a mean key that is not finite no dot product is.
          if (page >= 0 && isfinite(dot)) add(i, finished(dot) * kLog2e + tokens, value);
        }
      }
    }
  }

  // A lane's part of a vector of means; 0 where there is none.
  __device__ __forceinline__ void fetch(Pack<T, L::kWords> (&to)[L::kColumns], int64_t vector,
                                        uint32_t lane) const {
    const T* from = static_cast<const T*>(p.means) + vector * p.head_dim;
#pragma unroll
    for (int c = 0; c < L::kColumns; ++c) {
      const uint32_t d = (c * L::kLanes + lane) * L::kWords;
      uint4 words = {};
      if (vector >= 0 && d < p.head_dim) words = __ldg(reinterpret_cast<const uint4*>(from + d));
      reinterpret_cast<uint4&>(to[c]) = words;
    }
  }

  __device__ __forceinline__ float dot_of(const float* query,
                                          const Pack<T, L::kWords> (&key)[L::kColumns],
                                          uint32_t lane) const {
    float parts[4] = {};
#pragma unroll
    for (int c = 0; c < L::kColumns; ++c) {
      const float* own = query + (c * L::kLanes + lane) * L::kWords;
#pragma unroll
      for (int w = 0; w < L::kWords; w += 4) {
        const float4 q = *reinterpret_cast<const float4*>(own + w);
        parts[0] = fmaf(q.x, static_cast<float>(key[c].at[w]), parts[0]);
        parts[1] = fmaf(q.y, static_cast<float>(key[c].at[w + 1]), parts[1]);
        parts[2] = fmaf(q.z, static_cast<float>(key[c].at[w + 2]), parts[2]);
        parts[3] = fmaf(q.w, static_cast<float>(key[c].at[w + 3]), parts[3]);
      }
    }
    float sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
#pragma unroll
    for (int step = L::kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
    return sum;
  }

  __device__ __forceinline__ float finished(float dot) const {
    const float logit = dot * p.scale;
    return p.softcap > 0.0f ? p.softcap * tanhf(logit / p.softcap) : logit;
  }

  // A term of a query; its logit is to base 2.
  __device__ __forceinline__ void add(int i, float logit,
                                      const Pack<T, L::kWords> (&value)[L::kColumns]) {
    if (logit > tops[i]) {
      const float less = exp2f(tops[i] - logit);
      tops[i] = logit;
      sums[i] *= less;
#pragma unroll
      for (int e = 0; e < L::kOwn; ++e) values[i][e] *= less;
    }
    const float weight = exp2f(logit - tops[i]);
    sums[i] += weight;
#pragma unroll
    for (int e = 0; e < L::kOwn; ++e) {
      const float x = static_cast<float>(value[e / L::kWords].at[e % L::kWords]);
      values[i][e] = fmaf(weight, x, values[i][e]);
    }
  }

  // Leaves what the thread block has of a split in the workspace.
  __device__ __forceinline__ void put_down(uint32_t split) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      float top = tops[i];
#pragma unroll
      for (int step = L::kLanes; step < 32; step *= 2) {
        top = fmaxf(top, __shfl_xor_sync(kAll, top, step));
      }
      const float factor = weight_of(tops[i], top);
      const float sum = over_pages(sums[i] * factor);
#pragma unroll
      for (int e = 0; e < L::kOwn; ++e) {
        const float x = over_pages(values[i][e] * factor);
        const uint32_t column = e / L::kWords * L::kLanes + lane;
        if (lane < L::kLanes) sh.values[warp][i][column * L::kWords + e % L::kWords] = x;
      }
      if (lane == 0) {
        sh.tops[warp][i] = top;
        sh.sums[warp][i] = sum;
      }
    }
    __syncthreads();
    float* part = part_of(split);
    for (int at = threadIdx.x; at < kQueries * kDim; at += kThreads) {
      const int i = at / kDim;
      const float top = top_of_warps(i);
      float x = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        x = fmaf(weight_of(sh.tops[w][i], top), sh.values[w][i][at % kDim], x);
      }
      part[at] = x;
    }
    if (threadIdx.x < kQueries) {
      const int i = threadIdx.x;
      const float top = top_of_warps(i);
      float sum = 0.0f;
      for (int w = 0; w < kWarps; ++w) sum += weight_of(sh.tops[w][i], top) * sh.sums[w][i];
      part[kQueries * kDim + i] = top;
      part[kQueries * (kDim + 1) + i] = sum;
    }
  }

  __device__ __forceinline__ float top_of_warps(int i) const {
    float top = -INFINITY;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, sh.tops[w][i]);
    return top;
  }

  // The sum over the pages that a warp has at a time.
  __device__ __forceinline__ float over_pages(float x) const {
#pragma unroll
    for (int step = L::kLanes; step < 32; step *= 2) x += __shfl_xor_sync(kAll, x, step);
    return x;
  }

  // How much a sum counts beside one whose largest logit is `largest`; 0 for one without terms.
  __device__ __forceinline__ float weight_of(float top, float largest) const {
    return top == -INFINITY ? 0.0f : exp2f(top - largest);
  }

  // Whether this is the last of the row's thread blocks to come here.
  __device__ __forceinline__ bool is_last(uint32_t blocks) {
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      sh.is_last = atomicAdd(p.counters + item, 1u) + 1 == blocks;
      if (sh.is_last) p.counters[item] = 0;
      __threadfence();
    }
    __syncthreads();
    return sh.is_last;
  }

  // Adds up the splits, and what was attended to.
  __device__ void add_up(uint32_t splits) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < queries) {
      const float* part = part_of(lane) + kQueries * kDim + warp;
      const float top = lane < splits ? __ldcg(part) : -INFINITY;
      const float sum = lane < splits ? __ldcg(part + kQueries) : 0.0f;
      const float lse = p.attended_lse[first + warp], own_top = lse * kLog2e;
      float largest = fmaxf(top, own_top);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, step));
      }
      const float weight = weight_of(top, largest), own_weight = weight_of(own_top, largest);
      float estimated = weight * sum;
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        estimated += __shfl_xor_sync(kAll, estimated, step);
      }
      // Without a term all stays as it is.
      const bool any = __any_sync(kAll, top != -INFINITY);
      sh.weights[lane][warp] = weight;
      if (lane == 0) {
        const float total = own_weight + estimated;
        sh.own_weight[warp] = any ? own_weight : 1.0f;
        sh.total[warp] = any ? total : 1.0f;
        p.lse[first + warp] = any ? (largest + log2f(total)) * kLn2 : lse;
      }
    }
    __syncthreads();
    for (uint32_t at = threadIdx.x; at < queries * p.head_dim; at += kThreads) {
      const uint32_t i = at / p.head_dim, d = at % p.head_dim;
      float x = 0.0f;
      for (uint32_t split = 0; split < splits; ++split) {
        x = fmaf(sh.weights[split][i], __ldcg(part_of(split) + i * kDim + d), x);
      }
      const T attended = static_cast<const T*>(p.attended)[first * p.head_dim + at];
      const float weight = sh.own_weight[i];
      // Attention that saw no key counts for nothing, whatever it is.
      if (weight != 0.0f) x = fmaf(weight, static_cast<float>(attended), x);
      static_cast<T*>(p.out)[first * p.head_dim + at] = static_cast<T>(x / sh.total[i]);
    }
  }
};

template <typename T, int kDim>
__device__ __forceinline__ void estimate_pages(const EstimatePagesParams& params) {
  __shared__ Shared<kDim> shared;
  Estimate<T, kDim>(params, shared).run();
}

}  // namespace

// Names as rust/cuda/src/estimate_pages.rs builds them: dtype, and the largest head dim.
#define KERNEL(DTYPE, TYPE, DIM)                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                                    \
      estimate_pages_##DTYPE##_##DIM(const __grid_constant__ EstimatePagesParams params) {     \
    estimate_pages<TYPE, DIM>(params);                                                         \
  }
#define KERNELS(DTYPE, TYPE) \
  KERNEL(DTYPE, TYPE, 64)    \
  KERNEL(DTYPE, TYPE, 128)   \
  KERNEL(DTYPE, TYPE, 256)

KERNELS(f32, float)
KERNELS(bf16, __nv_bfloat16)
KERNELS(f16, __half)
