// step_tables: an engine's description of a batch as positions, slots and entries.
//
// The simple version:
//   for each request, table: append an entry for each page that its rows see; note the end
//   for each row: position = its distance from the request's end; slot = where the engine put it
//
// What makes it one launch:
// 1. how many entries a table has is arithmetic on a length and a number of rows. So every thread
//    block counts those of the requests before its own itself, and no block waits for another;
// 2. a request's entries and rows are dealt to as many blocks as fill the device: one request of
//    100 000 tokens is not the work of one block.
//
// What the engine says is not checked on the host: it lies here. Page numbers outside `places` are
// nowhere, rows outside the batch are left out, and numbers that 31 bits do not hold become −1 or
// stay at the last one, as rust/reference has it.

#include "api.h"

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int64_t kMost = 0x7fffffff;

// Pages of a request that a table lists: the first `sinks`, and those from `lowest` on.
struct Listed {
  uint32_t sinks, lowest, count;
};

__device__ __forceinline__ int at_most_31_bits(int64_t number) {
  return static_cast<int>(min(max(number, int64_t{0}), kMost));
}

__device__ __forceinline__ Listed listed(const StepTablesParams& p, uint32_t request,
                                         const SpanParams& span) {
  const int length = max(p.lengths[request], 0);
  const uint32_t pages = (static_cast<uint32_t>(length) + p.page_tokens - 1) / p.page_tokens;
  const uint32_t held = min(pages, p.columns);
  uint32_t lowest = 0;
  if (span.window > 0) {
    const int64_t rows = int64_t{p.query_start[request + 1]} - p.query_start[request];
    const int first = at_most_31_bits(p.lengths[request] - rows);
    const uint32_t hidden = max(first - static_cast<int>(span.window - 1), 0);
    lowest = max(hidden / p.page_tokens, span.sinks);
  }
  const uint32_t seen = min(held, span.sinks) + (held > lowest ? held - lowest : 0);
  return {span.sinks, lowest, min(seen, span.columns)};
}

// The sum over all threads, in each of them.
__device__ __forceinline__ uint32_t sum_of_block(uint32_t part) {
  __shared__ uint32_t of_warp[kWarps];
  part = __reduce_add_sync(0xffffffffu, part);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = part;
  __syncthreads();
  uint32_t sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += of_warp[warp];
  return sum;
}

// The block of a page in a table: 0 where it is nowhere, −1 where there can be none.
__device__ __forceinline__ int block_of(const StepTablesParams& p, uint32_t table, int64_t page) {
  if (p.places != nullptr) {
    const bool known = page >= 0 && page < p.pages;
    return known ? max(p.places[int64_t{table} * p.pages + page], 0) : 0;
  }
  // A page that is too large for its block to be a number is none either.
  if (page < 0 || page > kMost) return -1;
  const int64_t block = page * p.block_pages;
  return block > kMost ? -1 : static_cast<int>(block);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    step_tables(const __grid_constant__ StepTablesParams params) {
  const StepTablesParams& p = params;
  const uint32_t request = blockIdx.x / p.chunks;
  const uint32_t first = blockIdx.x % p.chunks * kThreads + threadIdx.x;
  const uint32_t step = p.chunks * kThreads;

  uint32_t before = 0;
  for (uint32_t other = threadIdx.x; other < request; other += kThreads) {
    for (uint32_t table = 0; table < p.tables; ++table) {
      before += listed(p, other, p.spans[table]).count;
    }
  }
  before = sum_of_block(before);

  if (blockIdx.x == 0 && threadIdx.x == 0) p.offsets[0] = 0;
  const int64_t length = p.lengths[request];
  const int32_t* blocks = p.blocks + request * p.block_stride;
  for (uint32_t table = 0; table < p.tables; ++table) {
    const Listed own = listed(p, request, p.spans[table]);
    for (uint32_t i = first; i < own.count; i += step) {
      const uint32_t index = i < own.sinks ? i : own.lowest + (i - own.sinks);
      const int64_t position = int64_t{index} * p.page_tokens;
      int32_t* entry = p.entries + 5 * (int64_t{before} + i);
      entry[0] = block_of(p, table, blocks[index]);
      entry[1] = 0;
      entry[2] = static_cast<int>(min(length - position, int64_t{p.page_tokens}));
      entry[3] = static_cast<int>(position);
      entry[4] = 0;
    }
    before += own.count;
    if (first == 0) p.offsets[request * p.tables + table + 1] = before;
  }

  // Rows before the first request's or behind the last one's are theirs too.
  const bool last = request + 1 == p.requests;
  const int end_of_own = p.query_start[request + 1];
  const int begin = request == 0 ? 0 : max(p.query_start[request], 0);
  const uint32_t end = last ? p.rows : min(static_cast<uint32_t>(max(end_of_own, 0)), p.rows);
  for (uint64_t row = uint64_t{first} + begin; row < end; row += step) {
    p.positions[row] = at_most_31_bits(static_cast<int64_t>(row) + length - end_of_own);
    const int64_t place = p.slot_mapping[row];
    const int64_t page = place < 0 ? -1 : place / p.page_tokens;
    const int32_t slot = static_cast<int32_t>(place - page * p.page_tokens);
    for (uint32_t table = 0; table < p.tables; ++table) {
      const int block = place < 0 ? -1 : block_of(p, table, page);
      const bool nowhere = block < 0 || (block == 0 && p.places != nullptr);
      int32_t* at = p.slots + 2 * (int64_t{table} * p.rows + row);
      at[0] = nowhere ? -1 : block;
      at[1] = nowhere ? -1 : slot;
    }
  }
}
