// move_pages: whole pages between slots on the device and where all pages lie, pinned host memory.
// Hopper has move_pages_sm90.cu.
//
// The simple version:
//   for each of the first `count` moves (row, page, slot): find both pages, copy one to the other
//
// What makes it as fast as the copy engine at pages of a few KiB, on a small part of the device:
// 1. what a bus carries is the bytes in flight over the time of a round trip, some 100 KB for PCIe
//    5. A warp asks for 4 KiB before it stores any, 16 bytes a lane and eight times: so 16 thread
//    blocks have 256 KiB in flight, and no shared memory, which attention beside them wants. They
//    are small, so that each finds registers on a processor that runs a block of attention;
// 2. a warp looks up where its next piece lies while this one is on its way;
// 3. pieces go round all warps, so that neighbours of a page are on their way together.
//
// Moves are not checked on the host: one that points outside a table or an arena is skipped, and a
// count beyond the moves is all of them.

#include "api.h"
#include "move_route.cuh"

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kOwn = 8;  // loads of a lane that are under way together
constexpr uint32_t kPiece = kOwn * 32 * sizeof(uint4);

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 8)
    move_pages(const __grid_constant__ MovePagesParams p) {
  const uint32_t warp = threadIdx.x / 32 * gridDim.x + blockIdx.x, warps = kWarps * gridDim.x;
  const uint32_t lane = threadIdx.x % 32;
  const uint64_t pieces = pieces_of(p);
  Route route = route_of<kPiece>(p, warp, pieces);
  for (uint64_t piece = warp; piece < pieces; piece += warps) {
    uint4 words[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t at = (i * 32 + lane) * sizeof(uint4);
      if (at < route.bytes) words[i] = __ldcs(reinterpret_cast<const uint4*>(route.from + at));
    }
    const Route next = route_of<kPiece>(p, piece + warps, pieces);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t at = (i * 32 + lane) * sizeof(uint4);
      if (at < route.bytes) __stcs(reinterpret_cast<uint4*>(route.to + at), words[i]);
    }
    route = next;
  }
}
