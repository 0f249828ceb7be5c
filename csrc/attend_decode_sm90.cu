// targets: sm_90a
// attend_decode for Hopper: attend_decode.cu with bulk copies. One lane starts the copies of a
// unit, 16 tokens with all columns at once, so that a warp is not kept from the units that have
// come by asking for the ones that shall.
//
// Needs pages of whole units (16 tokens) and rows of whole 128 bytes: D 64 or 128, over fp8 128;
// rust/cuda/src/attend_plan.rs asks for
// attend_decode.cu otherwise.

#include "api.h"
#include "decode.cuh"
#include "hopper.cuh"

namespace {

template <typename C, int D, int kWarps, int kStages>
class BulkStages {
 public:
  static constexpr int kCount = kStages;
  static constexpr int kWords = D * sizeof(C) / 16;  // of 16 bytes, in a row
  static constexpr int kGroupBytes = 8 * 16 * kWords;  // of 8 tokens
  static_assert(kWords % 8 == 0, "blocks of 128 bytes");
  static constexpr int kTile = 2 * kGroupBytes;
  static constexpr int kStage = 2 * kTile;  // K, then V
  static constexpr int kRun = 16;  // keys of a run
  static constexpr bool kMasksCopies = false;
  using Source = TiledAttendParams;
  struct Memory {
    alignas(1024) unsigned char tiles[kWarps][kStages][kStage];
    uint64_t full[kWarps][kStages];  // barriers: copied
    __device__ unsigned char* at(int warp, int stage) { return tiles[warp][stage]; }
  };

  __device__ BulkStages(const TiledAttendParams& params, Memory& memory)
      : params(params),
        full(memory.full[threadIdx.x / 32]),
        base(shared_address(memory.at(threadIdx.x / 32, 0))),
        lane(threadIdx.x % 32) {
    if (lane == 0) {
      fetch_map(&params.pages);
      for (int stage = 0; stage < kStages; ++stage) barrier_init(full[stage], 1);
      barrier_init_done();
    }
    __syncwarp();
  }

  struct Place {
    int page;   // place of its keys on the map's last axis
    int group;  // of 8 slots
  };
  __device__ Place place_of(const Entry& entry, int rank, int slot) const {
    return {static_cast<int>(entry.block * params.block_units + rank * params.head_units),
            slot / 8};
  }

  // Starts the copies of a unit that lane `from` knows.
  __device__ void copy(int stage, const Run<Place>& run, int from) {
    if (lane == from) {
      const int page = run.place.page, group = run.place.group;
      const uint32_t to = base + stage * kStage;
      barrier_arrive_expecting(full[stage], kStage);
      copy_box(to, &params.pages, group, page, full[stage]);
      copy_box(to + kTile, &params.pages, group, page + static_cast<int>(params.value_units),
               full[stage]);
    }
  }

  __device__ void commit() {}
  __device__ void wait(int stage) {
    barrier_wait(full[stage], phases >> stage & 1);
    phases ^= 1u << stage;
  }

  // Values that are not seen may be anything, and nothing times infinity is not nothing.
  __device__ void clear(int stage, uint32_t mask) {
    if (mask == 0xFFFF) return;
    for (int i = lane; i < kUnit * kWords; i += 32) {
      const int row = i / kWords;
      if ((mask >> row & 1) == 0) {
        const uint32_t to = values(stage, row, i % kWords);
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
      }
    }
    show_to_async_units();
    __syncwarp();
  }

  // After ordinary stores into a stage, before copies into it.
  __device__ void reuse() { show_to_async_units(); }
  __device__ void finish() {}

  // Address of 16 bytes of a key or value.
  __device__ uint32_t keys(int stage, int row, int word) const {
    return base + stage * kStage + row / 8 * kGroupBytes + word / 8 * 1024 + row % 8 * 128 +
           (word % 8 ^ row % 8) * 16;
  }
  __device__ uint32_t values(int stage, int row, int word) const {
    return keys(stage, row, word) + kTile;
  }

 private:
  const TiledAttendParams& params;
  uint64_t* const full;
  const uint32_t base;
  const int lane;
  uint32_t phases = 0;  // bit s: parity of stage s's phase
};

}  // namespace

// Names and bytes of shared memory as rust/cuda/src/attend_plan.rs has them.
#define KERNEL(NAME, T, C, D, WARPS, STAGES, BYTES)                                            \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)                                  \
      attend_decode_sm90_##NAME##_##D(const __grid_constant__ TiledAttendParams params) {      \
    using Kernel = Decode<T, C, D, WARPS, BulkStages<C, D, WARPS, STAGES>>;                    \
    static_assert(sizeof(typename Kernel::Shared) == BYTES, "as attend_plan.rs");              \
    extern __shared__ __align__(1024) unsigned char shared[];                                  \
    Kernel(params.attend, params, *reinterpret_cast<typename Kernel::Shared*>(shared)).run();  \
  }
#define KERNELS(D, WARPS, STAGES, BYTES)                              \
  KERNEL(bf16, __nv_bfloat16, __nv_bfloat16, D, WARPS, STAGES, BYTES) \
  KERNEL(f16, __half, __half, D, WARPS, STAGES, BYTES)
#define FP8_KERNELS(D, WARPS, STAGES, BYTES)                          \
  KERNEL(bf16_fp8, __nv_bfloat16, Fp8, D, WARPS, STAGES, BYTES)       \
  KERNEL(f16_fp8, __half, Fp8, D, WARPS, STAGES, BYTES)

KERNELS(64, 8, 5, 188416)
KERNELS(128, 8, 3, 221184)
FP8_KERNELS(128, 16, 2, 156672)
