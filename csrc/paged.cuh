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

// Slots [begin, end) of a block hold the keys of positions position, position + 1, …
struct Entry {
  int64_t offset;  // element of the block's slot 0, rank 0
  int begin;
  int end;  // equal to begin when the row points outside the cache
  int position;
  int delta;
};

// Row `index` of the entry table. A table made on the device cannot be checked on the host without
// waiting for it, so what points outside the cache is read as an entry without tokens.
__device__ __forceinline__ Entry read_entry(const PagedKv& kv, int index) {
  const int32_t* row = kv.entries + int64_t{5} * index;
  const int block = row[0];
  Entry entry;
  entry.begin = row[1];
  entry.end = row[2];
  entry.position = row[3];
  entry.delta = row[4];
  const bool inside = block >= 0 && block < kv.blocks && entry.begin >= 0 &&
                      entry.begin <= entry.end && entry.end <= static_cast<int>(kv.page_tokens);
  entry.offset = inside ? block * kv.block_stride : 0;
  if (!inside) entry.end = entry.begin = 0;
  return entry;
}

// Whether a row at `position` sees a key at `key`.
__device__ __forceinline__ bool sees(const Reach& reach, int position, int key) {
  return key <= position &&
         (reach.window == 0 || key > position - reach.window || key < reach.sink);
}
