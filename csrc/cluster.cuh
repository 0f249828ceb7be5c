// Pieces of sm_90a kernels whose thread blocks stand in clusters: blocks that run at the same time,
// and read each other's shared memory.
#pragma once

#include <cstdint>

// The number of this block in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Counts in at the cluster's barrier without waiting there. Each thread of all blocks arrives and
// then waits, in turns.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

// The same, and what this thread wrote is not promised to be seen.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

// Waits until all threads of the cluster have arrived. What they wrote before is seen then,
// if they promised that.
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Where in block `rank` lies what this block has at an address of shared memory.
__device__ __forceinline__ uint32_t address_in(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// Two neighbouring numbers of shared memory of any block, at a multiple of 8 bytes. Nobody may
// write to them between two barriers of the cluster, and the block may not have ended.
__device__ __forceinline__ uint2 load_pair(uint32_t address) {
  uint2 pair;
  asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
               : "=r"(pair.x), "=r"(pair.y)
               : "r"(address)
               : "memory");
  return pair;
}

// One number, likewise.
__device__ __forceinline__ uint32_t load_number(uint32_t address) {
  uint32_t number;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(number) : "r"(address) : "memory");
  return number;
}
