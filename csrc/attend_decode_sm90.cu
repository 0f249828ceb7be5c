// targets: sm_90a
// attend_decode for Hopper: attend_decode.cu with bulk copies. One lane starts the copies of a
// unit, 16 tokens with all columns at once, so that a warp is not kept from the units that have
// come by asking for the ones that shall.
//
// Needs pages of whole units (16 tokens) and D 64 or 128; rust/cuda/src/attend_plan.rs asks for
// attend_decode.cu otherwise.

#include "api.h"
#include "decode.cuh"
#include "hopper.cuh"

namespace {

template <typename T, int D, int kStages>
class BulkStages {
 public:
  static constexpr int kCount = kStages;
  static constexpr int kGroupBytes = 8 * D * 2;  // of 8 tokens
  static constexpr int kTile = 2 * kGroupBytes;
  static constexpr int kStage = 2 * kTile;  // K, then V
  using Source = TiledAttendParams;
  struct Memory {
    alignas(1024) unsigned char tiles[kStages][kStage];
    uint64_t full[kStages];  // barriers: copied
    __device__ unsigned char* at(int stage) { return tiles[stage]; }
  };

  __device__ BulkStages(const TiledAttendParams& params, Memory& memory)
      : params(params),
        full(memory.full),
        base(shared_address(&memory)),
        lane(threadIdx.x % 32),
        values_further(static_cast<int>(params.attend.kv.value_offset / params.page_unit)) {
    if (lane == 0) {
      for (uint64_t& barrier : memory.full) barrier_init(barrier, 1);
      barrier_init_done();
    }
    __syncwarp();
  }

  // The page in units of the map's last axis, and above it the slot.
  __device__ int64_t place_of(int64_t page, int slot) const {
    return int64_t{slot} << 32 | static_cast<uint32_t>(page / params.page_unit);
  }

  // Starts the copies of a unit, which lies in one page.
  __device__ void copy(int stage, const int64_t (&places)[2], const uint32_t (&)[2]) {
    if (lane == 0) {
      const int page = static_cast<int>(places[0]), group = static_cast<int>(places[0] >> 32) / 8;
      const uint32_t to = base + stage * kStage;
      barrier_arrive_expecting(full[stage], kStage);
      copy_box(to, &params.pages, group, page, full[stage]);
      copy_box(to + kTile, &params.pages, group, page + values_further, full[stage]);
    }
  }

  __device__ void commit() {}
  __device__ void wait(int stage) {
    barrier_wait(full[stage], phases >> stage & 1);
    phases ^= 1u << stage;
  }

  // Values that are not seen may be anything, and nothing times infinity is not nothing.
  __device__ void clear(int stage, uint32_t low, uint32_t high) {
    if ((low & high) == 0xFF) return;
    for (int i = lane; i < kUnit * (D / 8); i += 32) {
      const int row = i / (D / 8), chunk = i % (D / 8);
      if (((row < kHalf ? low : high) >> (row % kHalf) & 1) == 0) {
        const uint32_t to = values(stage, row, chunk % 2, chunk / 2);
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
      }
    }
    show_to_async_units();
    __syncwarp();
  }

  // After ordinary stores into a stage, before copies into it.
  __device__ void reuse() { show_to_async_units(); }
  __device__ void finish() {}

  // Address of 16 bytes of a key or value: block 2 k + half of 8 columns.
  __device__ uint32_t keys(int stage, int row, int half, int k) const {
    const int word = (2 * (k % 4) + half) ^ (row % 8);
    return base + stage * kStage + row / 8 * kGroupBytes + k / 4 * 1024 + row % 8 * 128 + word * 16;
  }
  __device__ uint32_t values(int stage, int row, int half, int k) const {
    return keys(stage, row, half, k) + kTile;
  }

 private:
  const TiledAttendParams& params;
  uint64_t* const full;
  const uint32_t base;
  const int lane;
  const int values_further;
  uint32_t phases = 0;  // bit s: parity of stage s's phase
};

}  // namespace

// Names and bytes of shared memory as rust/cuda/src/attend_plan.rs has them.
#define KERNEL(DTYPE, TYPE, D, STAGES, BYTES)                                                  \
  extern "C" __global__ void __launch_bounds__(256, 1)                                         \
      attend_decode_sm90_##DTYPE##_##D(const __grid_constant__ TiledAttendParams params) {     \
    using Kernel = Decode<TYPE, D, 8, BulkStages<TYPE, D, STAGES>>;                            \
    static_assert(sizeof(typename Kernel::Shared) == BYTES, "as attend_plan.rs");              \
    extern __shared__ __align__(1024) unsigned char shared[];                                  \
    Kernel(params.attend, params, *reinterpret_cast<typename Kernel::Shared*>(shared)).run();  \
  }
#define KERNELS(D, STAGES, BYTES)               \
  KERNEL(bf16, __nv_bfloat16, D, STAGES, BYTES) \
  KERNEL(f16, __half, D, STAGES, BYTES)

KERNELS(64, 5, 196608)
KERNELS(128, 3, 228352)
