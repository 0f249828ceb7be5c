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
// Launch: ceil(rows · H / 4) blocks of 128 threads. `splits`, `partial` and `counters` are not used.
// Keys that a row does not see are never read.

#include "api.h"
#include "plain_row.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kKeys = 4;  // keys that a lane reads before it uses the first

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

template <typename T>
class AttendRow {
 public:
  // `query` and `turned` are this warp's, [head_dim] each.
  __device__ AttendRow(const AttendParams& params, const Row& row, float* query, float* turned)
      : p_(params), row_(row), query_(query), turned_(turned),
        lanes_(share_lanes(params.kv.head_dim)), aligned_(is_aligned<T>(params.kv)) {}

  __device__ void run() {
    const T* q = static_cast<const T*>(p_.q) + row_.row * p_.q_row_stride +
                 row_.head * p_.q_head_stride;
    for (int i = threadIdx.x % 32; i < static_cast<int>(p_.kv.head_dim); i += 32) {
      query_[i] = static_cast<float>(q[i]);
    }
    __syncwarp();
    turn(0);

    const Reach reach = reach_of(p_.kv, row_.kv_head);
    const int64_t end = int64_t{row_.position} + 1;
    const int64_t oldest = reach.window == 0 ? 0 : max(end - reach.window, int64_t{0});
    const int64_t sink = min(int64_t{reach.sink}, min(oldest, end));
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      walk_keys(p_.kv, row_.begin, row_.end, part == 0 ? 0 : oldest, part == 0 ? sink : end,
                [&](const Entry& entry, int first, int last) {
                  attend(reach, entry, first, last);
                });
    }

    for (int step = lanes_.width; step < 32; step *= 2) merge(step);
    write(row_.row * int64_t{p_.query_heads} + row_.head);
  }

 private:
  const AttendParams& p_;
  const Row& row_;
  float* query_;
  float* turned_;
  const Lanes lanes_;
  const bool aligned_;

  float q_[kSlice];  // turned back by delta_
  int delta_;
  float largest_ = -INFINITY;  // score in powers of two
  float sum_ = 0.0f;           // of 2^(score − largest)
  float out_[kSlice] = {};     // the same, each times its value

  // Scores of keys stored `delta` positions off need q turned back by as much.
  __device__ void turn(int delta) {
    __syncwarp();
    rotate_vector<true>(p_.kv, delta, query_, turned_);
    delta_ = delta;
#pragma unroll
    for (int e = 0; e < kSlice; ++e) {
      q_[e] = lanes_.holds ? turned_[lanes_.slice * kSlice + e] : 0.0f;
    }
  }

  // Takes in slots [first, last) of an entry, all of which the row sees.
  __device__ void attend(const Reach& reach, const Entry& entry, int first, int last) {
    if (entry.delta != delta_) turn(entry.delta);
    const T* keys = static_cast<const T*>(p_.kv.cache) + entry.offset +
                    reach.rank * p_.kv.head_stride + lanes_.slice * kSlice;
    for (int from = first; from < last; from += kKeys * lanes_.vectors) {
      Pack<T, kSlice> key[kKeys], value[kKeys];
      bool seen[kKeys];
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const int slot = from + i * lanes_.vectors + lanes_.vector;
        seen[i] = slot < last;
        if (seen[i] && lanes_.holds) {
          key[i] = load_slice(keys + slot * p_.kv.token_stride, aligned_);
          value[i] = load_slice(keys + slot * p_.kv.token_stride + p_.kv.value_offset, aligned_);
        } else {
          key[i] = value[i] = {};
        }
      }
      float scores[kKeys];
      float largest = largest_;
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        float dot = 0.0f;
#pragma unroll
        for (int e = 0; e < kSlice; ++e) dot += q_[e] * static_cast<float>(key[i].at[e]);
        const float score = score_of(sum_of_vector(lanes_, dot), p_.scale, p_.softcap);
        scores[i] = seen[i] ? score : -INFINITY;
        largest = fmaxf(largest, scores[i]);
      }
      rescale(largest);
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        const float weight = weight_of(scores[i], largest);
        sum_ += weight;
#pragma unroll
        for (int e = 0; e < kSlice; ++e) {
          out_[e] += weight * static_cast<float>(value[i].at[e]);
        }
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
    if (lanes_.vector != 0) return;
    // No key seen, or none with a weight: NaN is neither.
    const bool nothing = sum_ == 0.0f;
    if (lanes_.slice == 0) p_.lse[state] = nothing ? -INFINITY : kLn2 * (largest_ + log2f(sum_));
    if (!lanes_.holds) return;
    T* out = static_cast<T*>(p_.out) + state * p_.kv.head_dim + lanes_.slice * kSlice;
#pragma unroll
    for (int e = 0; e < kSlice; ++e) {
      out[e] = static_cast<T>(nothing ? 0.0f : out_[e] / sum_);
    }
  }
};

template <typename T>
__device__ __forceinline__ void attend_plain(const AttendParams& p) {
  __shared__ float queries[kWarps][2][kMaxHeadDim];
  const int warp = threadIdx.x / 32;
  const int64_t item = int64_t{blockIdx.x} * kWarps + warp;
  if (item >= int64_t{p.rows} * p.query_heads) return;
  const Row row = find_row(p, item);
  AttendRow<T>(p, row, queries[warp][0], queries[warp][1]).run();
}

}  // namespace

#define KERNEL(DTYPE, TYPE)                                          \
  extern "C" __global__ void __launch_bounds__(32 * kWarps, 4)       \
      attend_plain_##DTYPE(const __grid_constant__ AttendParams p) { \
    attend_plain<TYPE>(p);                                           \
  }

KERNEL(f32, float)
KERNEL(bf16, __nv_bfloat16)
KERNEL(f16, __half)
