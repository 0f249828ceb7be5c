// attend_packed over pages of planes: as attend_top_r.cu, in a basis whose directions have steps.
//
// The simple version:
//   for each request, query head: out = Σ softmax(scale · qᵀ R(delta) k) v over the keys it sees,
//   where k and v are mean + Σ (code − largest / 2) · step over the channels that have codes
//
// What makes it run at the speed of memory:
// 1. Work is cut, fetched, rotated and put together as in attend_top_r.cu. How many channels have
//    8, 4 and 2 bits is read where a run of pages of one basis begins.
// 2. Codes are operands of products as attend_packed.cu has them: of each plane a lane takes four
//    channels of a token with one load, in registers that know at compile time how many bits these
//    have.
// 3. There are no scales: steps are part of queries and of results. What codes are more than they
//    stand for is part of what all keys score, and half a step is added to a run's sums at its end.

#include "api.h"
#include "basis_rows.cuh"
#include "packed_pieces.cuh"
#include "plane_vectors.cuh"

// Names, and bytes of shared memory beside stages, as rust/cuda/src/attend_packed.rs has them.
#define KERNEL(NAME, T, D, WARPS, BYTES)                                                       \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)                                  \
      attend_planes_##NAME##_##D(const __grid_constant__ AttendPackedParams params) {          \
    using Kernel = AttendPacked<BasisRows<PlaneVectors<T, D>>, WARPS>;                         \
    static_assert((sizeof(typename Kernel::Shared) + 127) / 128 * 128 == BYTES, "as there");   \
    extern __shared__ __align__(128) unsigned char shared[];                                   \
    Kernel(params, shared).run();                                                              \
  }
#define KERNELS(D, WARPS, BYTES)               \
  KERNEL(bf16, __nv_bfloat16, D, WARPS, BYTES) \
  KERNEL(f16, __half, D, WARPS, BYTES)

KERNELS(64, 16, 38656)
KERNELS(128, 12, 36864)
