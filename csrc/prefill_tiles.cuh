// How prefill attention is cut: tiles of (query token, query head) pairs that share a KV head, and
// tiles of keys that share one rotation.
#pragma once

#include <climits>

#include "paged.cuh"

constexpr int kNoKey = INT_MAX;  // position of a key that is not there: after every row

// Pairs [begin, end) of one KV head of one request. Pair i is row first_row + i / group, query head
// i % group of the KV head's: so a tile's pairs read nearly the same keys however the rows lie.
struct RowTile {
  int request;
  int first_row;
  int begin;
  int end;
};

__device__ __forceinline__ int first_row_of(const AttendParams& p, int request) {
  if (p.row_offsets != nullptr) return p.row_offsets[request];
  return p.requests == 1 ? request * static_cast<int>(p.rows) : request;
}

// The tile at `index`, counted from the last one: within a request the last rows see most keys, and
// the longest work should begin first. Empty (begin = end) past the first tile. One warp, whole.
__device__ __forceinline__ RowTile row_tile(const AttendParams& p, int pairs, int index) {
  const int group = static_cast<int>(p.query_heads / p.kv.kv_heads);
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int done = 0; done < static_cast<int>(p.requests); done += 32) {
    const int request = static_cast<int>(p.requests) - 1 - done - lane;
    const int first = request >= 0 ? first_row_of(p, request) : 0;
    const int count = request >= 0 ? (first_row_of(p, request + 1) - first) * group : 0;
    const int tiles = (count + pairs - 1) / pairs;
    int sum = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int lower = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += lower;
    }
    const bool mine = index >= before + sum - tiles && index < before + sum;
    const unsigned found = __ballot_sync(~0u, mine);
    if (found != 0) {
      const int tile = before + sum - 1 - index;
      const RowTile it = {request, first, tile * pairs, min((tile + 1) * pairs, count)};
      const int from = __ffs(found) - 1;
      return {__shfl_sync(~0u, it.request, from), __shfl_sync(~0u, it.first_row, from),
              __shfl_sync(~0u, it.begin, from), __shfl_sync(~0u, it.end, from)};
    }
    before += __shfl_sync(~0u, sum, 31);
  }
  return {0, 0, 0, 0};
}

// A tile of keys, in shared memory: whole pages, one after the other.
template <int kKeys>
struct KeyTile {
  int64_t places[kKeys / 8];  // of each page, where this KV head's keys begin
  int positions[kKeys];
  int pages;    // 0: there is no tile
  int delta;    // the same for all of its keys
  bool gaps;    // some slots hold no key of the request
  bool masked;  // some row does not see some key
};

// Where a whole warp looks for the first of a table's entries whose position is above `position`:
// around where it would be if the table began at position 0 and pages were full.
class EntrySearch {
 public:
  __device__ EntrySearch(const PagedKv& kv, int base, int end, int position)
      : kv(kv), base(base), end(end), position(position) {
    const int guess = base + max(position, 0) / static_cast<int>(kv.page_tokens);
    from = max(min(guess - 15, end - 32), base);
    const int mine = from + threadIdx.x % 32;
    found = mine < end ? position_of(kv, mine) : INT_MAX;
  }

  __device__ int result() const {
    const unsigned above = __ballot_sync(~0u, found > position);
    const bool inside = above != 0 && (above % 2 == 0 || from == base);
    return inside ? from + __ffs(above) - 1 : entries_up_to(kv, base, end, position);
  }

 private:
  const PagedKv& kv;
  const int base, end, position;
  int from, found;
};

// The entries that rows at positions from `lowest` to `highest` see keys of; by a whole warp, whose
// searches wait for memory together.
__device__ __forceinline__ EntryRange entries_between(const PagedKv& kv, const Reach& reach,
                                                      int request, int lowest, int highest) {
  const int32_t* offsets = kv.entry_offsets + request * static_cast<int>(kv.tables) + reach.table;
  const int base = offsets[0], end = offsets[1];
  if (is_taken_whole(kv, reach, end - base)) return {end - base, base, 0, base};
  const EntrySearch newest(kv, base, end, highest);
  if (reach.window == 0 || lowest < reach.window) return {newest.result() - base, base, 0, base};
  const EntrySearch oldest(kv, base, end, lowest - reach.window + 1);
  const EntrySearch sink(kv, base, end, reach.sink - 1);
  const int last = newest.result();
  // The entry before may reach past the oldest key.
  const int start = max(base, min(oldest.result(), last) - 1);
  const int sinks = reach.sink > 0 ? min(sink.result(), start) - base : 0;
  return {sinks + last - start, base, sinks, start};
}

// One warp's walk over the pages that a tile of rows reads. Each lane holds one of the next
// entries, and a tile takes those of one rotation, not just the first ones: where computed rows lie
// between the tokens of a shared segment, entries of two rotations take turns, and tiles would be
// of one entry each. Keys may come in any order, since each has its position beside it.
template <int kKeys>
class KeyWalk {
 public:
  // For rows at positions from `lowest` to `highest`; share `split` of `splits` of the pages.
  __device__ KeyWalk(const PagedKv& kv, const Reach& reach, int request, int lowest, int highest,
                     int split, int splits)
      : kv(kv), reach(reach), lowest(lowest), highest(highest), lane(threadIdx.x % 32) {
    page = static_cast<int>(kv.page_tokens);
    pages_a_tile = kKeys / page;
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) {
      which_page[i] = (i * 32 + lane) / page;
      slot_of[i] = (i * 32 + lane) % page;
    }
    range = entries_between(kv, reach, request, lowest, highest);
    const int tiles = (range.count + pages_a_tile - 1) / pages_a_tile;
    const int share = (tiles + splits - 1) / splits * pages_a_tile;
    at = min(split * share, range.count);
    end = min(at + share, range.count);
    entry = {0, 0, 0, 0, 0, 0};
    hold_more();
  }

  // Describes the next tile and tells its pages. `place_of` says of an entry where its keys begin,
  // in whatever unit the reader of the tile counts.
  template <typename Place>
  __device__ int write(KeyTile<kKeys>& tile, const Place& place_of) {
    const int pages = take_one_rotation();
    if (lane < pages) tile.places[lane] = place_of(entry);
    int first = INT_MAX, last = -1;
    bool gaps = pages * page < kKeys;
#pragma unroll
    for (int i = 0; i < kKeys / 32; ++i) {
      const int key = i * 32 + lane;
      const int which = min(which_page[i], 31), slot = slot_of[i];
      const int begin = __shfl_sync(~0u, entry.begin, which);
      const int stop = __shfl_sync(~0u, entry.end, which);
      const int position = __shfl_sync(~0u, entry.position, which) + slot - begin;
      const bool there = which < pages && slot >= begin && slot < stop;
      gaps = gaps || !there;
      first = min(first, there ? position : INT_MAX);
      last = max(last, there ? position : -1);
      tile.positions[key] = there ? position : kNoKey;
    }
    gaps = __any_sync(~0u, gaps);
    const bool unseen = last > lowest || (reach.window > 0 && first <= highest - reach.window);
    const bool masked = __any_sync(~0u, unseen) || gaps;
    if (lane == 0) {
      tile.pages = pages;
      tile.delta = delta;
      tile.gaps = gaps;
      tile.masked = masked;
    }
    held -= pages;
    move_entries(lane + pages);
    hold_more();
    return pages;
  }

 private:
  const PagedKv& kv;
  const Reach reach;
  const int lowest, highest, lane;
  int page, pages_a_tile, at, end;
  int which_page[kKeys / 32], slot_of[kKeys / 32];  // of keys lane, lane + 32, …
  EntryRange range;
  int held = 0;   // the first lanes, that many, hold an entry each, read before it is needed
  int delta = 0;  // of the last tile
  Entry entry;

  __device__ void hold_more() {
    const int count = min(32 - held, end - at);
    if (lane >= held && lane < held + count) {
      entry = read_entry(kv, range[at + lane - held], reach.rank);
    }
    at += count;
    held += count;
  }

  // Each lane gets the entry of lane `from` of the warp.
  __device__ void move_entries(int from) {
    entry.block = __shfl_sync(~0u, entry.block, from);
    entry.offset = __shfl_sync(~0u, entry.offset, from);
    entry.begin = __shfl_sync(~0u, entry.begin, from);
    entry.end = __shfl_sync(~0u, entry.end, from);
    entry.position = __shfl_sync(~0u, entry.position, from);
    entry.delta = __shfl_sync(~0u, entry.delta, from);
  }

  // Moves entries for a tile to the first lanes and tells how many they are. Queries are turned for
  // each new rotation, so that of the last tile goes on while it fills one; else that of the oldest
  // entry is next, so that no entry waits for longer than the others held take.
  __device__ int take_one_rotation() {
    const bool here = lane < held;
    unsigned same = __ballot_sync(~0u, here && entry.delta == delta);
    if (__popc(same) < pages_a_tile) {
      delta = __shfl_sync(~0u, entry.delta, 0);
      same = __ballot_sync(~0u, here && entry.delta == delta);
    }
    const int pages = min(__popc(same), pages_a_tile);
    const int in_order = same == ~0u ? 32 : __ffs(~same) - 1;
    if (in_order < pages) {
      unsigned taken = 0;
      int from = lane;
      for (int i = 0; i < pages; ++i) {
        const int next = __ffs(same) - 1;
        if (lane == i) from = next;
        taken |= 1u << next;
        same &= same - 1;
      }
      unsigned rest = ~taken;
      for (int i = pages; rest != 0; ++i) {
        if (lane == i) from = __ffs(rest) - 1;
        rest &= rest - 1;
      }
      move_entries(from);
    }
    return pages;
  }
};

// Where a pair's result goes: row · H + query head, or -1 for none.
__device__ __forceinline__ int64_t result_row(const AttendParams& p, const RowTile& rows,
                                              int kv_head, int pair) {
  if (pair >= rows.end) return -1;
  const int group = static_cast<int>(p.query_heads / p.kv.kv_heads);
  return int64_t{rows.first_row + pair / group} * p.query_heads + kv_head * group + pair % group;
}

// With split keys each split leaves floats in the workspace.

__device__ __forceinline__ float* partial_out(const AttendParams& p, int split, int head_dim) {
  return p.partial + int64_t{split} * p.rows * p.query_heads * head_dim;
}

__device__ __forceinline__ float* partial_lse(const AttendParams& p, int split, int head_dim) {
  return partial_out(p, static_cast<int>(p.splits), head_dim) +
         int64_t{split} * p.rows * p.query_heads;
}
