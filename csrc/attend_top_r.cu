// attend_packed over top-r pages: the basis meets a query once and a result once, never a key or a
// value (MosaicKV, section 5.3).
//
// The simple version:
//   for each request, query head: out = Σ softmax(scale · qᵀ R(delta) k) v over the keys it sees,
//   where k and v are mean + Σ c · direction over the numbers c that are kept of them
//
// What makes it run at the speed of memory:
// 1. Work is cut, fetched and put together as in attend_packed.cu; a thread block goes through its
//    pages by runs of the same basis and delta, and rotates for a run.
// 2. Numbers are expanded to vectors with zeros in registers, as operands of tensor-core products,
//    once for all query heads of a KV head. Lanes of a vector know by counts of its bitmap where
//    their numbers begin; eight codes of four bits are put in place by two permutations of bytes.
// 3. Scales, one a vector, are multiplied into scores and weights. Codes of four bits meet queries
//    and weights of 16 bits in products of bytes (integer_part.cuh), other numbers those of their
//    own kind.

#include "api.h"
#include "basis_rows.cuh"
#include "float_part.cuh"
#include "integer_part.cuh"
#include "packed_pieces.cuh"
#include "top_r_codes.cuh"
#include "top_r_vectors.cuh"

// Names, and bytes of shared memory beside stages, as rust/cuda/src/attend_packed.rs has them: of
// codes with all columns of selectors.
#define KERNEL(NAME, D, WARPS, BYTES, ...)                                                      \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)                                   \
      attend_top_r_##NAME##_##D(const __grid_constant__ AttendPackedParams params) {            \
    using Kernel = AttendPacked<BasisRows<__VA_ARGS__>, WARPS>;                                 \
    static_assert((sizeof(typename Kernel::Shared) + 127) / 128 * 128 == BYTES, "as there");    \
    extern __shared__ __align__(128) unsigned char shared[];                                    \
    Kernel(params, shared).run();                                                               \
  }
// Of vectors in which each channel has a bit of its own; and of those whose channels have bits in
// groups, or are not all there.
#define KERNELS_OF(BITS, OF, NAME, T, D, WARPS, BYTES)                                          \
  KERNEL(BITS##_whole_##NAME, D, WARPS, BYTES, FloatPart<TopRVectors<T, D, OF, true>>)          \
  KERNEL(BITS##_groups_##NAME, D, WARPS, BYTES, FloatPart<TopRVectors<T, D, OF, false>>)
#define KERNELS(D, WARPS, BYTES)                                                                \
  KERNELS_OF(bf16, kBf16Numbers, bf16, __nv_bfloat16, D, WARPS, BYTES)                          \
  KERNELS_OF(fp8, kFp8Numbers, bf16, __nv_bfloat16, D, WARPS, BYTES)                            \
  KERNELS_OF(fp8, kFp8Numbers, f16, __half, D, WARPS, BYTES)

// The same of codes; for up to four query heads of a KV head, and for more of them.
#define CODE_KERNELS_OF(NAME, T, D, WARPS, BYTES)                                               \
  KERNEL(int4_whole_four_##NAME, D, WARPS, BYTES, IntegerPart<TopRCodes<T, D, true, 1>>)        \
  KERNEL(int4_whole_eight_##NAME, D, WARPS, BYTES,                                              \
         IntegerPart<TopRCodes<T, D, true, kMostTiles>>)                                        \
  KERNEL(int4_groups_four_##NAME, D, WARPS, BYTES, IntegerPart<TopRCodes<T, D, false, 1>>)      \
  KERNEL(int4_groups_eight_##NAME, D, WARPS, BYTES,                                             \
         IntegerPart<TopRCodes<T, D, false, kMostTiles>>)
#define CODE_KERNELS(D, WARPS, BYTES)                                                           \
  CODE_KERNELS_OF(bf16, __nv_bfloat16, D, WARPS, BYTES - kFewerSelectors)                       \
  CODE_KERNELS_OF(f16, __half, D, WARPS, BYTES - kFewerSelectors)

KERNELS(64, 16, 38656)
KERNELS(128, 12, 36864)
CODE_KERNELS(64, 16, 71424)
CODE_KERNELS(128, 12, 69504)
