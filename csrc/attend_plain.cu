// attend_plain: paged attention of rows at any position, for every head dim, page size and dtype.
//
// The simple version:
//   for each row, query head: out = Σ softmax(scale · qᵀ R(delta) k) v over the keys the row sees
//
// This is the simple version, one warp a row and query head, for what the tensor-core kernels do
// not take. What it does for speed:
// 1. a lane holds 8 elements of a vector, so that short vectors leave no lane idle, and four keys
//    and values a lane are in flight;
// 2. the lanes of different keys keep sums of their own, which meet only at the end;
// 3. warps of one KV head stand next to each other, so that its keys come from the first cache;
// 4. entries before the window are skipped by binary search.
//
// Launch: ceil(rows · H / 4) blocks of 128 threads. Keys that a row does not see are never read;
// `splits`, `partial` and `counters` are not used.

#include "api.h"
#include "plain_row.cuh"

namespace {

constexpr int kWarps = 4;

struct Row {
  int row, head, kv_head;
  int begin, end;  // its entries
  int position;    // −1 for a row of no request, which sees nothing
};

// Items of a KV head follow each other, and of those the query heads of a row.
__device__ Row find_row(const AttendParams& p, int64_t item) {
  const int group = p.query_heads / p.kv.kv_heads;
  const int64_t items = int64_t{p.rows} * group;  // of one KV head
  const int kv_head = static_cast<int>(item / items);
  const int place = static_cast<int>(item % items);
  Row row = {place / group, kv_head * group + place % group, kv_head, 0, 0, -1};
  int request = row.row;
  if (p.row_offsets != nullptr) {
    int low = 0, high = p.requests;  // the last request that starts at or before the row
    while (high - low > 1) {
      const int middle = low + (high - low) / 2;
      if (p.row_offsets[middle] <= row.row) low = middle; else high = middle;
    }
    const bool inside = p.requests > 0 && row.row >= p.row_offsets[low] &&
                        row.row < p.row_offsets[low + 1];
    request = inside ? low : p.requests;
  }
  if (request < static_cast<int>(p.requests)) {
    const Reach reach = reach_of(p.kv, kv_head);
    const int64_t table = int64_t{request} * p.kv.tables + reach.table;
    row.begin = p.kv.entry_offsets[table];
    row.end = p.kv.entry_offsets[table + 1];
    row.position = p.positions[row.row];
  }
  return row;
}

template <typename T, typename C>
class AttendRow {
 public:
  // `query` and `turned` are this warp's, [head_dim] each.
  __device__ AttendRow(const AttendParams& params, const Row& row, float* query, float* turned)
      : p_(params), row_(row), query_(params.kv, params.scale, params.softcap, query, turned) {}

  __device__ void run() {
    query_.load(static_cast<const T*>(p_.q) + row_.row * p_.q_row_stride +
                row_.head * p_.q_head_stride);
    const Reach reach = reach_of(p_.kv, row_.kv_head);
    const KeySpan span = span_of(reach, row_.position);
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      walk_keys(p_.kv, row_.begin, row_.end, reach.rank, part == 0 ? 0 : span.oldest,
                part == 0 ? span.sink : span.end, [&](const Entry& entry, int first, int last) {
                  attend(query_.keys_of(entry, reach.rank), first, last);
                });
    }
    for (int step = query_.lanes.width; step < 32; step *= 2) merge(step);
    write(row_.row * int64_t{p_.query_heads} + row_.head);
  }

 private:
  static constexpr int kKeys = PlainQuery<T, C>::kKeys;
  const AttendParams& p_;
  const Row& row_;
  PlainQuery<T, C> query_;
  float largest_ = -INFINITY;  // score in powers of two
  float sum_ = 0.0f;           // of 2^(score − largest)
  float out_[kSlice] = {};     // the same, each times its value

  // Takes in slots [first, last) of an entry, all of which the row sees.
  __device__ void attend(const C* keys, int first, int last) {
    const Lanes& lanes = query_.lanes;
    const C* values = keys + p_.kv.value_offset;
    for (int from = first; from < last; from += kKeys * lanes.vectors) {
      Pack<C, kSlice> value[kKeys];
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const int slot = from + i * lanes.vectors + lanes.vector;
        value[i] = {};
        if (slot < last && lanes.holds) {
          value[i] = load_slice(values + slot * p_.kv.token_stride, query_.aligned);
        }
      }
      float scores[kKeys];
      query_.score(keys, from, last, scores);
      float largest = largest_;
#pragma unroll
      for (int i = 0; i < kKeys; ++i) largest = fmaxf(largest, scores[i]);
      rescale(largest);
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const float weight = weight_of(scores[i], largest);
        sum_ += weight;
        float wide[kSlice];
        widen(value[i], wide);
#pragma unroll
        for (int e = 0; e < kSlice; ++e) out_[e] += weight * wide[e];
      }
    }
  }

  __device__ void rescale(float largest) {
    const float factor = weight_of(largest_, largest);
    sum_ *= factor;
#pragma unroll
    for (int e = 0; e < kSlice; ++e) out_[e] *= factor;
    largest_ = largest;
  }

  // Adds the keys of the lanes `step` away, which hold the same elements.
  __device__ void merge(int step) {
    const float largest = fmaxf(largest_, __shfl_xor_sync(~0u, largest_, step));
    rescale(largest);
    sum_ += __shfl_xor_sync(~0u, sum_, step);
#pragma unroll
    for (int e = 0; e < kSlice; ++e) out_[e] += __shfl_xor_sync(~0u, out_[e], step);
  }

  __device__ void write(int64_t state) {
    const Lanes& lanes = query_.lanes;
    if (lanes.vector != 0) return;
    // No key seen, or none with a weight: NaN is neither.
    const bool nothing = sum_ == 0.0f;
    if (lanes.slice == 0) p_.lse[state] = nothing ? -INFINITY : kLn2 * (largest_ + log2f(sum_));
    if (!lanes.holds) return;
    T* out = static_cast<T*>(p_.out) + state * p_.kv.head_dim + lanes.slice * kSlice;
#pragma unroll
    for (int e = 0; e < kSlice; ++e) {
      out[e] = static_cast<T>(nothing ? 0.0f : out_[e] / sum_ * p_.value_scale);
    }
  }
};

template <typename T, typename C>
__device__ __forceinline__ void attend_plain(const AttendParams& p) {
  __shared__ float queries[kWarps][2][kMaxHeadDim];
  const int warp = threadIdx.x / 32;
  const int64_t item = int64_t{blockIdx.x} * kWarps + warp;
  if (item >= int64_t{p.rows} * p.query_heads) return;
  const Row row = find_row(p, item);
  AttendRow<T, C>(p, row, queries[warp][0], queries[warp][1]).run();
}

}  // namespace

// Names as rust/cuda/src/attend_plan.rs builds them: dtype of rows, and of the cache where it is
// another.
#define KERNEL(NAME, T, C)                                          \
  extern "C" __global__ void __launch_bounds__(32 * kWarps, 4)      \
      attend_plain_##NAME(const __grid_constant__ AttendParams p) { \
    attend_plain<T, C>(p);                                          \
  }

KERNEL(f32, float, float)
KERNEL(bf16, __nv_bfloat16, __nv_bfloat16)
KERNEL(f16, __half, __half)
KERNEL(f32_fp8, float, Fp8)
KERNEL(bf16_fp8, __nv_bfloat16, Fp8)
KERNEL(f16_fp8, __half, Fp8)
