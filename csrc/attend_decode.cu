// attend_decode: one row per request over its paged keys, many keys per KV head shared by a group
// of query heads.
//
// The simple version:
//   for each request, query head: out = Σ softmax(scale · qᵀ R(delta) k) v over the keys it sees
//
// What makes it run at the speed of memory:
// 1. The keys of all (request, KV head) pairs are laid end to end as units of 16 and cut into
//    equal shares, one a thread block, so that ragged heads and requests balance. The cut is
//    made on the device from the tables: no plan, no wait. Within a share the warps take turns.
// 2. Each warp keeps several units in flight by asynchronous copies and never waits for another
//    warp, except where a KV head's keys end.
// 3. Tensor cores do the products with keys as rows and up to 8 query heads as columns, so no
//    multiplication is spent on padding a group of 8: S = K qᵀ, and out = Vᵀ P.
// 4. A pair whose keys lie in several shares is put together by the block that ends last.

#include "decode.cuh"

namespace {

// Stages that a warp fills by asynchronous copies of 16 bytes: for any strides, and pages of any
// whole number of 8 tokens.
template <typename C, int D, int kWarps, int kStages>
class CopiedStages {
 public:
  static constexpr int kCount = kStages;
  static constexpr int kWords = D * sizeof(C) / 16;  // of 16 bytes, in a row
  static constexpr int kPitch = 16 * kWords + 16;    // bytes of a row: rows 8 apart share no bank
  static constexpr int kTile = kUnit * kPitch;
  static constexpr int kStage = 2 * kTile;  // K, then V
  static constexpr int kRun = 8;  // keys of a run
  static constexpr bool kMasksCopies = true;  // keys that are not seen are not copied
  using Source = PagedKv;
  struct Memory {
    alignas(16) unsigned char tiles[kWarps][kStages][kStage];
    __device__ unsigned char* at(int warp, int stage) { return tiles[warp][stage]; }
  };

  __device__ CopiedStages(const PagedKv& kv, Memory& memory)
      : kv(kv), base(shared_address(memory.at(threadIdx.x / 32, 0))), lane(threadIdx.x % 32) {}

  using Place = int64_t;  // element of the cache
  __device__ Place place_of(const Entry& entry, int rank, int slot) const {
    return entry.offset + rank * kv.head_stride + slot * kv.token_stride;
  }

  // Starts the copies of a unit whose runs lanes `from` and `from` + 1 know. Keys that are not
  // seen become zeros.
  __device__ void copy(int stage, const Run<Place>& run, int from) {
    const C* cache = static_cast<const C*>(kv.cache);
    int64_t places[2];
    uint32_t masks[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      places[i] = __shfl_sync(~0u, run.place, from + i);
      masks[i] = __shfl_sync(~0u, run.mask, from + i);
    }
#pragma unroll
    for (int i = 0; i < kUnit * kWords / 32; ++i) {
      const int at = i * 32 + lane;
      const int row = at / kWords, word = at % kWords;
      const bool high = row >= kRun;
      const C* key = cache + (high ? places[1] : places[0]) + row % kRun * kv.token_stride +
                     word * static_cast<int>(16 / sizeof(C));
      const bool seen = ((high ? masks[1] : masks[0]) >> (row % kRun)) & 1;
      const uint32_t to = keys(stage, row, word);
      copy_async(to, key, seen);
      copy_async(to + kTile, key + kv.value_offset, seen);
    }
  }

  // Ends what `wait` counts as one stage, also when nothing was copied.
  __device__ void commit() { commit_copies(); }
  __device__ void wait(int) { wait_for_copies<kStages - 1>(); }
  __device__ void clear(int, uint32_t) {}
  __device__ void reuse() {}
  __device__ void finish() { wait_for_copies<0>(); }

  // Address of 16 bytes of a key or value.
  __device__ uint32_t keys(int stage, int row, int word) const {
    return base + stage * kStage + row * kPitch + word * 16;
  }
  __device__ uint32_t values(int stage, int row, int word) const {
    return keys(stage, row, word) + kTile;
  }

 private:
  const PagedKv& kv;
  const uint32_t base;
  const int lane;
};

template <size_t kElementBytes, int D>
struct Shape;

}  // namespace

// Names and bytes of shared memory as rust/cuda/src/attend_plan.rs has them. What fits a block of
// Hopper would not fit older devices, which also have less memory speed to keep up with.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define SIZES(ELEMENT, D, WARPS, STAGES, BYTES, OTHER_WARPS, OTHER_STAGES, OTHER_BYTES)      \
  template <>                                                                                \
  struct Shape<ELEMENT, D> {                                                                 \
    static constexpr int kWarps = WARPS, kStages = STAGES, kBytes = BYTES;                   \
  };
#else
#define SIZES(ELEMENT, D, WARPS, STAGES, BYTES, OTHER_WARPS, OTHER_STAGES, OTHER_BYTES)      \
  template <>                                                                                \
  struct Shape<ELEMENT, D> {                                                                 \
    static constexpr int kWarps = OTHER_WARPS, kStages = OTHER_STAGES, kBytes = OTHER_BYTES; \
  };
#endif
#define SHAPE(...) SIZES(2, __VA_ARGS__)
#define FP8_SHAPE(...) SIZES(1, __VA_ARGS__)
SHAPE(64, 8, 4, 171056, 4, 4, 95776)
SHAPE(80, 8, 4, 203824, 4, 2, 66976)
SHAPE(96, 8, 3, 183216, 4, 2, 75168)
SHAPE(128, 8, 3, 232368, 4, 2, 91552)
SHAPE(256, 4, 3, 224736, 4, 2, 157088)
FP8_SHAPE(64, 16, 4, 187728, 8, 3, 84144)
FP8_SHAPE(96, 16, 3, 196176, 8, 2, 80432)
FP8_SHAPE(128, 16, 2, 171856, 8, 2, 97072)
FP8_SHAPE(256, 8, 2, 162608, 4, 2, 91552)

#define KERNEL(NAME, T, C, D)                                                              \
  extern "C" __global__ void __launch_bounds__(32 * Shape<sizeof(C), D>::kWarps, 1)        \
      attend_decode_##NAME##_##D(const __grid_constant__ AttendParams params) {            \
    using Shape = Shape<sizeof(C), D>;                                                     \
    using Stages = CopiedStages<C, D, Shape::kWarps, Shape::kStages>;                      \
    using Kernel = Decode<T, C, D, Shape::kWarps, Stages>;                                 \
    static_assert(sizeof(typename Kernel::Shared) == Shape::kBytes, "as attend_plan.rs");  \
    extern __shared__ __align__(16) unsigned char shared[];                                \
    Kernel(params, params.kv, *reinterpret_cast<typename Kernel::Shared*>(shared)).run();  \
  }
#define KERNELS(D)                              \
  KERNEL(bf16, __nv_bfloat16, __nv_bfloat16, D) \
  KERNEL(f16, __half, __half, D)
#define FP8_KERNELS(D)                          \
  KERNEL(bf16_fp8, __nv_bfloat16, Fp8, D)       \
  KERNEL(f16_fp8, __half, Fp8, D)

KERNELS(64)
KERNELS(80)
KERNELS(96)
KERNELS(128)
KERNELS(256)
FP8_KERNELS(64)
FP8_KERNELS(96)
FP8_KERNELS(128)
FP8_KERNELS(256)
