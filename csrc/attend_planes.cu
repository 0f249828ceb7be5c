// attend_packed over pages of planes: as attend_top_r.cu, in a basis whose directions have steps.
//
// The simple version:
//   for each request, query head: out = Σ softmax(scale · qᵀ R(delta) k) v over the keys it sees,
//   where k and v are mean + Σ (code − largest / 2) · step over the channels that have codes
//
// What makes it run at the speed of memory:
// 1. Work is cut, fetched, rotated and put together as in attend_top_r.cu. How many channels have
//    8, 4 and 2 bits is read where a run of pages of one basis begins.
// 2. Codes are operands of products of bytes as attend_top_r.cu has them: with keys a lane takes
//    words of neighbouring channels, of values four channels of a token with one load.
// 3. There are no scales: steps are part of queries and of results. Of eight bits half a step is
//    part of what all keys score, and added to the sums of values at their end.

#include "api.h"
#include "basis_rows.cuh"
#include "integer_part.cuh"
#include "packed_pieces.cuh"
#include "plane_codes.cuh"

// Names, and bytes of shared memory beside stages, as rust/cuda/src/attend_packed.rs has them.
#define KERNEL(NAME, T, D, TILES, WARPS, BYTES)                                                 \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)                                   \
      attend_planes_##NAME##_##D(const __grid_constant__ AttendPackedParams params) {           \
    using Kernel = AttendPacked<BasisRows<IntegerPart<PlaneCodes<T, D, TILES>>>, WARPS>;        \
    static_assert((sizeof(typename Kernel::Shared) + 127) / 128 * 128 == BYTES, "as there");    \
    extern __shared__ __align__(128) unsigned char shared[];                                    \
    Kernel(params, shared).run();                                                               \
  }
// For up to four query heads of a KV head, and for more of them.
#define KERNELS(D, WARPS, BYTES)                                                                \
  KERNEL(four_bf16, __nv_bfloat16, D, 1, WARPS, BYTES)                                          \
  KERNEL(four_f16, __half, D, 1, WARPS, BYTES)                                                  \
  KERNEL(eight_bf16, __nv_bfloat16, D, kMostTiles, WARPS, BYTES)                                \
  KERNEL(eight_f16, __half, D, kMostTiles, WARPS, BYTES)

KERNELS(64, 16, 41472)
KERNELS(128, 12, 40704)
