// gather_entries: the pages that requests selected for each head, as entry tables of their own.
//
// The simple version:
//   for each request, head, i: gathered[row, i] = table of the head [pages[row, i]], for the first
//     `selected`; no entry behind them; and where each row begins and ends
//
// What is kept of a request is what it selected last. One that goes on with that has nothing
// selected anew; any other leaves there what it has.
//
// A row is a thread block's. Its threads write words that lie side by side; entries that were
// selected in ascending order are read nearly so.
//
// What pages and selected say is not checked on the host where they lie here: an index outside the
// table is no entry, and a count outside the row is the nearest one within.

#include "api.h"

namespace {

constexpr int kThreads = 128;
constexpr uint32_t kColumns = 5;
constexpr uint32_t kNobody = ~0u;

// A word of an entry outside any cache, which covers no token.
__device__ __forceinline__ int32_t no_entry(uint32_t column) {
  return column == 0 ? -1 : (column == 3 ? 0x7fffffff : 0);
}

// How many pages a list has, −1 standing behind them.
__device__ __forceinline__ int64_t listed_of(const int32_t* pages, uint32_t most) {
  int64_t count = 0;
  for (uint32_t begin = 0; begin < most; begin += kThreads) {
    const uint32_t i = begin + threadIdx.x;
    count += __syncthreads_count(i < most && pages[i] >= 0);
  }
  return count;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    gather_entries(const __grid_constant__ GatherEntriesParams p) {
  const uint32_t row = blockIdx.x, request = row / p.kv_heads, head = row % p.kv_heads;
  const int32_t table = p.heads == nullptr ? 0 : p.heads[4 * head];
  const int32_t* ends = p.entry_offsets + int64_t{request} * p.tables + table;
  const int64_t base = ends[0], listed = int64_t{ends[1]} - base;
  const int64_t most = p.most, begin = row * most;
  int64_t count = min(max(int64_t{p.selected[row]}, int64_t{0}), most);
  const int32_t* pages = p.pages + begin;
  const uint32_t keeper = p.kept == nullptr ? kNobody : p.kept_of[request];
  if (keeper < p.kept_rows) {
    int32_t* kept = p.kept + (int64_t{keeper} * p.kv_heads + head) * most;
    if (p.again[request] != 0) {
      pages = kept;
      count = listed_of(kept, p.most);
    } else {
      for (uint32_t i = threadIdx.x; i < p.most; i += kThreads) {
        kept[i] = i < count ? pages[i] : -1;
      }
    }
  }
  int32_t* gathered = p.gathered + kColumns * begin;
  for (uint32_t word = threadIdx.x; word < kColumns * p.most; word += kThreads) {
    const uint32_t i = word / kColumns, column = word % kColumns;
    const int64_t page = i < count ? pages[i] : -1;
    const bool known = page >= 0 && page < listed;
    gathered[word] = known ? p.entries[kColumns * (base + page) + column] : no_entry(column);
  }
  if (threadIdx.x != 0) return;
  p.offsets[2 * int64_t{row}] = static_cast<int32_t>(begin);
  p.offsets[2 * int64_t{row} + 1] = static_cast<int32_t>(begin + count);
  if (row + 1 == gridDim.x) p.offsets[2 * int64_t{row} + 2] = static_cast<int32_t>(begin + most);
}
