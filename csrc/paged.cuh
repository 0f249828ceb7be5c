// Where a KV head's tokens lie, and which of them a row sees.
#pragma once

#include "api.h"

// What one KV head reads.
struct Reach {
  int table;    // which entry table of a request
  int rank;     // its page in a block
  int window;   // keys up to this far back are seen; 0: all
  int sink;     // so are keys at positions below this
};

__device__ __forceinline__ Reach reach_of(const PagedKv& kv, int kv_head) {
  if (kv.heads == nullptr) {
    return {0, static_cast<int>(kv.first_rank) + kv_head, static_cast<int>(kv.window), 0};
  }
  const int32_t* row = kv.heads + 4 * kv_head;
  return {row[0], row[1], row[2], row[3]};
}

// The largest rank of the heads that read a table.
__device__ __forceinline__ int last_rank_of(const PagedKv& kv, int table) {
  if (kv.heads == nullptr) return static_cast<int>(kv.first_rank + kv.kv_heads) - 1;
  int rank = 0;
  for (uint32_t head = 0; head < kv.kv_heads; ++head) {
    if (kv.heads[4 * head] == table) rank = max(rank, kv.heads[4 * head + 1]);
  }
  return rank;
}

// Slots [begin, end) of a block hold the keys of positions position, position + 1, …
struct Entry {
  int block;
  int64_t offset;  // element of the block's slot 0, rank 0
  int begin;
  int end;  // equal to begin when the row points outside the cache
  int position;
  int delta;
};

// Row `index` of the entry table, for pages up to `rank`. A table made on the device cannot be
// checked on the host without waiting for it, so what points outside the cache is read as an entry
// without tokens.
__device__ __forceinline__ Entry read_entry(const PagedKv& kv, int index, int rank) {
  const int32_t* row = kv.entries + int64_t{5} * index;
  const int block = row[0];
  Entry entry;
  entry.begin = row[1];
  entry.end = row[2];
  entry.position = row[3];
  entry.delta = row[4];
  const int64_t page = block * kv.block_stride + rank * kv.head_stride;
  const bool inside = block >= 0 && page <= kv.last_page && entry.begin >= 0 &&
                      entry.begin <= entry.end && entry.end <= static_cast<int>(kv.page_tokens);
  entry.block = inside ? block : 0;
  entry.offset = entry.block * kv.block_stride;
  if (!inside) entry.end = entry.begin = 0;
  return entry;
}

// Whether a row at `position` sees a key at `key`.
__device__ __forceinline__ bool sees(const Reach& reach, int position, int key) {
  return key <= position &&
         (reach.window == 0 || key > position - reach.window || key < reach.sink);
}

__device__ __forceinline__ int position_of(const PagedKv& kv, int entry) {
  return __ldg(kv.entries + int64_t{5} * entry + 3);
}

// The first of entries [low, high) whose position is above `position`. Pages are mostly full, so it
// is looked for where it would then be, counted from either end, before it is searched.
__device__ __forceinline__ int entries_up_to(const PagedKv& kv, int low, int high, int position) {
  if (low == high) return low;
  const int last = position_of(kv, high - 1);
  if (last <= position) return high;
  const int page = static_cast<int>(kv.page_tokens);
  const int guesses[2] = {low + position / page + 1, high - (last - position + page - 1) / page};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int guess = guesses[i];
    if (guess > low && guess < high && position_of(kv, guess) > position &&
        position_of(kv, guess - 1) <= position) {
      return guess;
    }
  }
  while (low < high) {
    const int middle = (low + high) / 2;
    if (position_of(kv, middle) > position) high = middle; else low = middle + 1;
  }
  return low;
}

// The entries that hold any key which some row between two positions sees.
struct EntryRange {
  int count;
  int base;   // the first `sinks` of them are taken from here on
  int sinks;
  int start;  // the others from here on

  __device__ __forceinline__ int operator[](int i) const {
    return i < sinks ? base + i : start + i - sinks;
  }
};

// Whether a table holds little more than a window's keys. Then it is taken whole: keys that a row
// does not see are masked anyhow, and looking for the ends costs reads that wait for each other.
__device__ __forceinline__ bool is_taken_whole(const PagedKv& kv, const Reach& reach,
                                               int entries) {
  return reach.window > 0 &&
         (entries - 4) * static_cast<int>(kv.page_tokens) <= reach.window + reach.sink;
}

// Of a request's newest row. Its table is surely not much longer than what it sees, so its end is
// not looked for.
__device__ __forceinline__ EntryRange entries_seen(const PagedKv& kv, const Reach& reach,
                                                   int request, int position) {
  const int32_t* offsets = kv.entry_offsets + request * static_cast<int>(kv.tables) + reach.table;
  const int base = offsets[0], end = offsets[1];
  if (reach.window == 0 || position < reach.window || is_taken_whole(kv, reach, end - base)) {
    return {end - base, base, 0, base};
  }
  // The entry before may reach past the oldest key.
  const int oldest = position - reach.window + 1;
  const int start = max(base, entries_up_to(kv, base, end, oldest) - 1);
  const int sinks =
      reach.sink > 0 ? entries_up_to(kv, base, start, reach.sink - 1) - base : 0;
  return {sinks + end - start, base, sinks, start};
}
