// targets: sm_90a
// move_pages for Hopper: move_pages.cu by bulk copies, through a ring in shared memory.
//
// What attention beside it loses is the reason: loads and stores of a warp that cross the bus stand
// in the queue of their processor, where those of attention wait behind them, and stores that the
// bus does not take yet hold up those of all processors. Bulk copies have a way of their own.
//
// 1. A thread block is one warp with four stages of 2 KiB, which find room on a processor beside a
//    block of attention. Three pieces are on their way to it while it passes one on. So it takes
//    as many blocks as have the bytes in flight that the bus wants, some 200 KB to fetch, and fewer
//    for stores, which are taken at once: move_pages.rs says how many.
// 2. Lanes look up where 32 pieces lie together, those of the next turn while these are carried;
//    the first lane starts and awaits all copies.
// 3. A stage is filled anew one piece after it was emptied, so that its last reader has ended.

#include "api.h"
#include "hopper.cuh"
#include "move_route.cuh"

namespace {

constexpr int kStages = 4;
constexpr uint32_t kPiece = 2048;
constexpr int kAhead = kStages - 1;  // pieces on their way to shared memory
constexpr int kLanes = 32;

struct Ring {
  alignas(128) unsigned char stages[kStages][kPiece];
  uint64_t full[kStages];  // barriers: copied
};

// What one lane knows, for all of them.
__device__ __forceinline__ Route known_to(const Route& route, int lane) {
  const auto from = reinterpret_cast<uint64_t>(route.from);
  const auto to = reinterpret_cast<uint64_t>(route.to);
  return {reinterpret_cast<const unsigned char*>(__shfl_sync(~0u, from, lane)),
          reinterpret_cast<unsigned char*>(__shfl_sync(~0u, to, lane)),
          __shfl_sync(~0u, route.bytes, lane)};
}

// Starts a copy out of shared memory, as a group of its own; of no bytes there is only the group.
__device__ __forceinline__ void pass_on(const Route& route, uint32_t from) {
  if (route.bytes > 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(route.to),
                 "r"(from), "r"(route.bytes)
                 : "memory");
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the last group have read what they copy.
__device__ __forceinline__ void wait_for_readers() {
  asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kLanes, 1)
    move_pages_sm90(const __grid_constant__ MovePagesParams p) {
  __shared__ Ring ring;
  const int lane = threadIdx.x;
  const uint64_t pieces = pieces_of(p);
  // Pieces go round all blocks, so that neighbours of a page are on their way together.
  const uint64_t own =
      pieces > blockIdx.x ? (pieces - blockIdx.x - 1) / gridDim.x + 1 : uint64_t{0};
  const auto look_up = [&](uint64_t i) {
    return route_of<kPiece>(p, i < own ? blockIdx.x + i * gridDim.x : pieces, pieces);
  };
  const auto fetch = [&](uint64_t i, const Route& route) {
    const int stage = i % kStages;
    if (lane != 0) return;
    barrier_arrive_expecting(ring.full[stage], route.bytes);
    if (route.bytes > 0) {
      copy_bytes(shared_address(ring.stages[stage]), route.from, route.bytes, ring.full[stage]);
    }
  };
  if (lane == 0) {
    for (int stage = 0; stage < kStages; ++stage) barrier_init(ring.full[stage], 1);
    barrier_init_done();
  }
  __syncwarp();
  Route routes = look_up(lane), next = look_up(kLanes + lane);
  for (int i = 0; i < kAhead && i < own; ++i) fetch(i, known_to(routes, i));
  for (uint64_t i = 0; i < own; ++i) {
    const int at = i % kLanes, stage = i % kStages, later = at + kAhead;
    const Route route = known_to(routes, at);
    const Route ahead = later < kLanes ? known_to(routes, later) : known_to(next, later - kLanes);
    if (lane == 0) {
      barrier_wait(ring.full[stage], i / kStages % 2);
      pass_on(route, shared_address(ring.stages[stage]));
    }
    if (i + kAhead < own) {
      if (lane == 0) wait_for_readers();
      fetch(i + kAhead, ahead);
    }
    if (at == kLanes - 1) {
      routes = next;
      next = look_up(i + 1 + kLanes + lane);
    }
  }
  // Shared memory is another block's once this one has ended.
  if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
