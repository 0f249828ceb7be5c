// Pieces of sm_90a kernels: barriers in shared memory, bulk copies of tensor tiles, and products of
// whole warpgroups that run while their threads go on.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "tensor_core.cuh"

// ---- barriers -----------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint64_t& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals));
}

__device__ __forceinline__ void barrier_arrive(uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

// Arrives, and lets the phase last until `bytes` more have been copied.
__device__ __forceinline__ void barrier_arrive_expecting(uint64_t& barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(&barrier)),
               "r"(bytes)
               : "memory");
}

// Waits for the end of the phase of this parity.
__device__ __forceinline__ void barrier_wait(uint64_t& barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra end;\n"
      "bra again;\n"
      "end:\n"
      "}\n" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

// Of barriers in a ring, the one that turn `i` uses, and the parity of its phase.
template <int kBarriers>
struct Turn {
  uint32_t place, parity;
  __device__ __forceinline__ explicit Turn(uint32_t i)
      : place(i % kBarriers), parity(i / kBarriers % 2) {}
};

__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders this thread's ordinary stores to shared memory before what the copy engine and the tensor
// cores do after the next barrier.
__device__ __forceinline__ void show_to_async_units() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A barrier among `threads` of the block.
__device__ __forceinline__ void barrier_of_threads(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts in at such a barrier without waiting there.
__device__ __forceinline__ void barrier_pass(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- copies -------------------------------------------------------------------------------

// Brings the description of a tensor near, for copies to come.
__device__ __forceinline__ void fetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Starts the copy of a box of a tensor of five axes: from the given place on the last axes, and
// from the start of the others.
__device__ __forceinline__ void copy_box(uint32_t to, const void* map, int fourth, int fifth,
                                         uint64_t& barrier, int third = 0) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(0), "r"(third), "r"(fourth), "r"(fifth), "r"(shared_address(&barrier))
      : "memory");
}

// Starts the copy of so many bytes, a multiple of 16, between addresses on such boundaries.
__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, uint32_t bytes,
                                           uint64_t& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}

// ---- products -----------------------------------------------------------------------------

// Describes a tile in shared memory whose rows of 128 bytes are swizzled: `rows_apart` bytes
// between groups of 8 rows, `blocks_apart` between blocks of 64 columns where columns are what is
// spread.
__device__ __forceinline__ uint64_t tile_of(uint32_t address, uint32_t rows_apart,
                                            uint32_t blocks_apart) {
  const uint64_t swizzle_128 = 1;
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) |
         static_cast<uint64_t>(blocks_apart >> 4) << 16 |
         static_cast<uint64_t>(rows_apart >> 4) << 32 | swizzle_128 << 62;
}

// Tells the compiler that a tile is the same for all lanes. It then stands in uniform registers,
// where products take it from; else each product waits for its own to be brought there.
__device__ __forceinline__ uint64_t uniform(uint64_t tile) {
  return tile >> 32 << 32 | __shfl_sync(~0u, static_cast<uint32_t>(tile), 0);
}

// The tile of the same shape that begins so many bytes later.
__device__ __forceinline__ uint64_t further(uint64_t tile, int bytes) {
  return tile >> 32 << 32 | (static_cast<uint32_t>(tile) + (bytes >> 4));
}

__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of registers that a product is still working on.
template <int N>
__device__ __forceinline__ void hold(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// Keeps the wait that follows from being moved to where a sum of weights is not known yet: the
// assembler moves such waits up past arithmetic, but not past a branch. This one is never taken,
// since sums are 0 or more.
__device__ __forceinline__ void not_before(float sum) {
  if (sum < 0) asm volatile("nanosleep.u32 0;");
}

#define R8(x, i)                                                                          \
  "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), \
      "+f"(x[i + 6]), "+f"(x[i + 7])
#define R32(x, i) R8(x, i), R8(x, i + 8), R8(x, i + 16), R8(x, i + 24)
#define N32                                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "        \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define N64                                                                          \
  N32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
      "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// keys: c [64, 128] (+)= a [64, 16] b [128, 16]ᵀ, both in shared memory; c is set when `add` is 0.
// values: c [64, N] += a [64, 16] b [16, N], a in registers and b in shared memory.
#define PRODUCTS(TYPE, NAME)                                                                    \
  template <>                                                                                   \
  struct Products<TYPE> {                                                                       \
    static __device__ __forceinline__ void keys(float (&c)[64], uint64_t a, uint64_t b,         \
                                                int add) {                                      \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                 \
                   "wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " {" N64        \
                   "}, %64, %65, p, 1, 1, 0, 0;\n}\n"                                           \
                   : R32(c, 0), R32(c, 32)                                                      \
                   : "l"(a), "l"(b), "r"(add));                                                 \
    }                                                                                           \
    static __device__ __forceinline__ void values(float (&c)[64], const uint32_t (&a)[4],       \
                                                  uint64_t b) {                                 \
      asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " {" N64        \
                   "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"                                \
                   : R32(c, 0), R32(c, 32)                                                      \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                       \
    }                                                                                           \
    static __device__ __forceinline__ void values(float (&c)[32], const uint32_t (&a)[4],       \
                                                  uint64_t b) {                                 \
      asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" N32         \
                   "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"                                \
                   : R32(c, 0)                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                       \
    }                                                                                           \
  };

template <typename T>
struct Products;
PRODUCTS(__nv_bfloat16, "bf16")
PRODUCTS(__half, "f16")
#undef PRODUCTS
#undef R8
#undef R32
#undef N32
#undef N64
