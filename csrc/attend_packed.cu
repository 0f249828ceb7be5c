// attend_packed: one row per request over packed pages, which are never unpacked to memory.
//
// The simple version:
//   for each request, query head: out = Σ softmax(scale · qᵀ R(delta) k) v over the keys it sees,
//   where k = zero_c + scale_c · code a channel of a page, and v = zero_t + scale_t · code a token
//
// What makes it run at the speed of memory:
// 1. Work is cut as in attend_decode.cu: all (request, KV head) pairs end to end, in equal shares a
//    thread block, here in units of a page, and the parts are put together as there. Where it takes
//    no longer, no thread block has parts of two of them.
// 2. A page is one run of bytes. On Hopper one bulk copy brings all of it, elsewhere asynchronous
//    copies of 16 bytes do; each warp has one page in hand and one on the way.
// 3. Codes are operands of tensor-core products as they lie: one load brings a lane 16 bytes of
//    them, and one mask and-or puts two of four bits into a register, as M + code with a power of
//    two M. Bytes are put there by a permutation, and M is subtracted at once.
// 4. Scales of keys are part of the query, once a page: Σ q (z + s·code) = q·z + Σ (q·s)·code. The
//    rest of it, with what M adds, are three more products a page.
// 5. Scales of values are part of the weights, a token at a time: Σ p (z + s·code) is
//    Σ (p·s)·code plus one number for all channels. What M adds is subtracted by a product too.
//    Both times codes count from their middle on, so that rounded factors meet small numbers.

#include "api.h"
#include "packed_pieces.cuh"
#include "packed_rows.cuh"

// Names, and bytes of shared memory beside stages, as rust/cuda/src/attend_packed.rs has them.
#define KERNEL(BITS, NAME, T, D, WARPS, BYTES)                                                 \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)                                  \
      attend_packed_int##BITS##_##NAME##_##D(                                                  \
          const __grid_constant__ AttendPackedParams params) {                                 \
    using Kernel = AttendPacked<PackedRows<T, D, BITS>, WARPS>;                                \
    static_assert((sizeof(typename Kernel::Shared) + 127) / 128 * 128 == BYTES, "as there");   \
    static_assert(kPackedItems <= kMaxItems, "counters of items");                             \
    extern __shared__ __align__(128) unsigned char shared[];                                   \
    Kernel(params, shared).run();                                                              \
  }
#define KERNELS(D, WARPS, BYTES)                  \
  KERNEL(4, bf16, __nv_bfloat16, D, WARPS, BYTES) \
  KERNEL(4, f16, __half, D, WARPS, BYTES)         \
  KERNEL(8, bf16, __nv_bfloat16, D, WARPS, BYTES) \
  KERNEL(8, f16, __half, D, WARPS, BYTES)

KERNELS(64, 16, 17536)
KERNELS(128, 12, 15744)
