// recycle_pages: the pages that rows selected into the slots that they have on the device.
//
// The simple version:
//   for each row: pages that a slot holds stay there; each other one, in order, takes the first
//   slot that is not pinned and holds no selected page, and is a move (row, page, slot)
//
// Rows may be the heads of requests that have seats. What a row selected is then the first pages of
// its list that lie elsewhere, its slots are its seat's, moves say the seat, and entries of the
// request's name the slots.
//
// What makes it a few microseconds:
// 1. a row is a warp's, or a thread block's where it is long. Its selection is a bitmap of pages in
//    shared memory, so that a slot knows at once whether its page is selected, and by the bits
//    before it as which of them. A lane has four words of it at a time;
// 2. a warp has neighbouring numbers, so ballots tell the n-th missing page and the n-th slot that
//    is left: what is written is in order, and the same at every run;
// 3. all moves stand one behind the other though nobody waits for the host: a thread block says
//    how many it has, writes what does not depend on the others, and then adds up what those
//    before it said. All of them are there at once, so there is no second launch;
// 4. a row asks for its pages and its first slots together: neither waits for the other.
//
// What selections and slots say is not checked on the host. A row whose pages do not ascend or lie
// outside, that holds a page twice, or that has no room for what it selects, is left as it is.
//
// The states of thread blocks are 0 before and after: the last one that has read them clears them.

#include "api.h"

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kOwn = 4;    // numbers that a thread asks for at once
constexpr int kAhead = 2;  // how often it does so for slots, before any has come
constexpr uint32_t kAll = ~0u;
constexpr uint32_t kNone = 0xffff;
constexpr uint32_t kColumns = 5;  // of an entry
constexpr int32_t kNoPage = -1;

// Of what the warps before this one have, and of what all have.
struct Sums {
  uint32_t before, all;
};

struct Shared {
  uint32_t of_warp[kWarps];
  uint32_t of_team[kWarps];
  uint32_t is_last;
};

__device__ __forceinline__ Sums sums_of_warps(uint32_t of_own, int warp,
                                              uint32_t (&of_warp)[kWarps]) {
  // Nobody may still be reading what was there.
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warp[warp] = of_own;
  __syncthreads();
  Sums sums{0, 0};
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    sums.before += i < warp ? of_warp[i] : 0;
    sums.all += of_warp[i];
  }
  return sums;
}

// One row, of the threads of a team: a warp, or the thread block.
template <int kTeam>
class Row {
  const RecyclePagesParams& p;
  Shared& sh;
  uint32_t* wanted;   // bits of the pages that are selected
  uint32_t* held;     // and of those in slots
  uint16_t* before;   // selected pages before those of a word
  uint16_t* slot_of;  // of each selected page: its slot
  uint16_t* left;     // slots for what is missing
  uint16_t* lacking;  // and which of the selected pages that is
  const int32_t* pages;
  int32_t* slots;
  const uint8_t* pinned;
  const int32_t* blocks;  // what slots are called, of a row with a seat
  int32_t* entries;
  int32_t away;  // its pages below this are selected
  const int warp = threadIdx.x % kTeam / 32, lane = threadIdx.x % 32;
  const uint32_t rank = threadIdx.x % kTeam;
  uint32_t row, number, words, room, chosen, width;
  bool is_there, is_bad;
  int32_t own[kOwn];

  static constexpr uint32_t kTile = kTeam * kOwn;

  // Number i of a thread has this index; a warp's are neighbours.
  __device__ __forceinline__ uint32_t at(uint32_t tile, int i) const {
    return tile * kTile + (warp * kOwn + i) * 32 + lane;
  }

  static __device__ __forceinline__ uint32_t tiles(uint32_t count) {
    return (count + kTile - 1) / kTile;
  }

  __device__ __forceinline__ void fetch(int32_t (&to)[kOwn], const int32_t* from, uint32_t tile,
                                        uint32_t count) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t index = at(tile, i);
      to[i] = index < count ? from[index] : kNoPage;
    }
  }

  __device__ __forceinline__ void wait_for_team() const {
    if constexpr (kTeam == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  __device__ __forceinline__ Sums sums(uint32_t of_own) const {
    if constexpr (kTeam == 32) {
      return {0, of_own};
    } else {
      return sums_of_warps(of_own, warp, sh.of_warp);
    }
  }

  __device__ __forceinline__ bool any_of_team(bool one) const {
    if constexpr (kTeam == 32) {
      return __any_sync(kAll, one);
    } else {
      return __syncthreads_or(one);
    }
  }

 public:
  uint32_t missing = 0;

  __device__ Row(const RecyclePagesParams& params, Shared& shared, unsigned char* memory)
      : p(params), sh(shared) {
    const uint32_t team = threadIdx.x / kTeam;
    row = blockIdx.x * (kThreads / kTeam) + team;
    words = (p.limit + 127) / 128 * kOwn;
    room = min(p.most, p.width);
    wanted = reinterpret_cast<uint32_t*>(memory + team * p.team_bytes);
    held = wanted + words;
    before = reinterpret_cast<uint16_t*>(held + words);
    slot_of = before + words;
    left = slot_of + (p.most + 1) / 2 * 2;
    lacking = left + room;
    is_there = row < p.rows;
    is_bad = false;
    if (is_there && p.seats.of != nullptr) {
      sit_down();
    } else {
      take(row, row, row);
    }
  }

  // Finds what is missing, and whether the row is as it has to be.
  __device__ void compare() {
    int32_t of_slots[kAhead][kOwn];
    fetch(own, pages, 0, is_there ? p.most : 0);
#pragma unroll
    for (int tile = 0; tile < kAhead; ++tile) fetch(of_slots[tile], slots, tile, width);
    auto* bits = reinterpret_cast<uint4*>(wanted);
    for (uint32_t i = rank; i < words / 2; i += kTeam) bits[i] = uint4{};
    count_chosen();
    auto* pairs = reinterpret_cast<uint32_t*>(slot_of);
    for (uint32_t i = rank; i < (chosen + 1) / 2; i += kTeam) pairs[i] = kNone | kNone << 16;
    wait_for_team();
    mark_pages();
    wait_for_team();
    rank_words();
    wait_for_team();
    const Sums found = visit_slots(of_slots);
    missing = chosen - min(found.before, chosen);
    is_bad = any_of_team(is_bad || missing > found.all);
    if (is_bad) missing = 0;
  }

  // Writes where what is selected is, and which pages slots hold then.
  __device__ void write() {
    if (!is_there) return;
    const uint32_t sound = is_bad ? 0 : chosen;
    int32_t* places = p.places + int64_t{row} * p.most;
    uint32_t moved = 0;
    for (uint32_t tile = 0; tile < tiles(p.most); ++tile) {
      if (tile > 0 || tiles(chosen) > 1) fetch(own, pages, tile, chosen);
      uint32_t is_missing = 0, of_warp = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const uint32_t index = at(tile, i);
        const bool lacks = index < sound && slot_of[index] == kNone;
        is_missing |= static_cast<uint32_t>(lacks) << i;
        of_warp += __popc(__ballot_sync(kAll, lacks));
      }
      const Sums of_tile = sums(of_warp);
      uint32_t next = moved + of_tile.before;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const uint32_t index = at(tile, i);
        const bool lacks = is_missing >> i & 1;
        const uint32_t all_lacking = __ballot_sync(kAll, lacks);
        int32_t slot = index < sound ? slot_of[index] : -1;
        if (lacks) {
          const uint32_t place = next + __popc(all_lacking & ((1u << lane) - 1));
          slot = left[place];
          slots[slot] = own[i];
          lacking[place] = static_cast<uint16_t>(index);
        }
        if (index < p.most) places[index] = slot;
        if (slot >= 0 && blocks != nullptr) entries[kColumns * index] = blocks[slot];
        next += __popc(all_lacking);
      }
      moved += of_tile.all;
    }
    if (rank == 0) p.refused[row] = is_bad;
    wait_for_team();
  }

  // Writes the row's moves from `first` on, as words that lie side by side.
  __device__ void list(uint32_t first) const {
    int32_t* moves = p.moves + int64_t{first} * 3;
    for (uint32_t word = rank; word < 3 * missing; word += kTeam) {
      const uint32_t move = word / 3, column = word % 3;
      const int32_t page = pages[lacking[move]];
      const int32_t of_slot = column == 1 ? page : left[move];
      moves[word] = column == 0 ? static_cast<int32_t>(number) : of_slot;
    }
  }

 private:
  __device__ __forceinline__ void take(int64_t of_pages, int64_t of_slots, uint32_t called) {
    width = is_there ? p.width : 0;
    pages = p.pages + (is_there ? of_pages : 0) * p.most;
    const int64_t first = (is_there ? of_slots : 0) * p.width;
    slots = p.slots + first;
    pinned = p.pinned == nullptr ? nullptr : p.pinned + first;
    blocks = nullptr;
    number = called;
  }

  // A row with a seat; one that has none is left as it is.
  __device__ void sit_down() {
    const RecycleSeatsParams& s = p.seats;
    const uint32_t request = row / s.ranks, rank_of = row % s.ranks;
    const uint32_t seat = s.of[request], head = s.heads[rank_of];
    if (seat >= s.seats || head >= s.heads_of_pages) {
      take(0, 0, 0);
      width = 0;
      is_bad = true;
      return;
    }
    const uint32_t lists = s.by_seat ? seat : request;
    const int64_t of_slots = int64_t{seat} * s.ranks_of_seat + s.first + rank_of;
    take(int64_t{lists} * s.heads_of_pages + head, of_slots, seat * s.ranks + rank_of);
    blocks = s.blocks + int64_t{seat} * p.width;
    entries = s.entries + (int64_t{request} * s.heads_of_pages + head) * p.most * kColumns;
    away = s.away[seat];
  }

  // How many pages are selected, of which `own` are the first.
  __device__ __forceinline__ void count_chosen() {
    chosen = 0;
    if (p.seats.of == nullptr) {
      const int listed = is_there ? p.selected[row] : 0;
      is_bad = listed < 0 || static_cast<uint32_t>(listed) > p.most;
      chosen = is_bad ? 0 : listed;
      return;
    }
    // They ascend, so that those before `away` come first.
    for (uint32_t tile = 0; tile < tiles(p.most); ++tile) {
      if (tile > 0) fetch(own, pages, tile, is_there ? p.most : 0);
      uint32_t of_warp = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const bool is_away = own[i] >= 0 && blocks != nullptr && own[i] < away;
        of_warp += __popc(__ballot_sync(kAll, is_away));
      }
      chosen += sums(of_warp).all;
    }
    if (tiles(p.most) > 1) fetch(own, pages, 0, is_there ? p.most : 0);
  }

  __device__ __forceinline__ void mark_pages() {
    for (uint32_t tile = 0; tile < tiles(chosen); ++tile) {
      if (tile > 0) fetch(own, pages, tile, chosen);
      const uint32_t begin = at(tile, 0) - lane;
      const int32_t before_own = begin > 0 && begin < chosen ? pages[begin - 1] : kNoPage;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const uint32_t index = at(tile, i), page = own[i];
        int32_t last = __shfl_up_sync(kAll, own[i], 1);
        const int32_t across = i > 0 ? __shfl_sync(kAll, own[max(i, 1) - 1], 31) : before_own;
        last = lane == 0 ? across : last;
        const bool is_listed = index < chosen, is_sound = page < p.limit && own[i] > last;
        is_bad |= is_listed && !is_sound;
        if (is_listed && is_sound) atomicOr(&wanted[page / 32], 1u << page % 32);
      }
    }
  }

  __device__ __forceinline__ void rank_words() {
    uint32_t so_far = 0;
    for (uint32_t first = 0; first < words; first += kOwn * kTeam) {
      const uint32_t word = first + kOwn * rank;
      uint4 of_own{};
      if (word < words) of_own = *reinterpret_cast<const uint4*>(wanted + word);
      const uint32_t one = __popc(of_own.x), two = one + __popc(of_own.y);
      const uint32_t three = two + __popc(of_own.z), bits = three + __popc(of_own.w);
      uint32_t up_to = bits;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t other = __shfl_up_sync(kAll, up_to, step);
        if (lane >= step) up_to += other;
      }
      const Sums of_all = sums(__shfl_sync(kAll, up_to, 31));
      const uint32_t base = so_far + of_all.before + up_to - bits;
      if (word < words) {
        const uint2 ranks{base | (base + one) << 16, (base + two) | (base + three) << 16};
        *reinterpret_cast<uint2*>(before + word) = ranks;
      }
      so_far += of_all.all;
    }
  }

  // Notes the slots of pages that are selected, and the first slots that are left. Returns how many
  // there are of either.
  __device__ __forceinline__ Sums visit_slots(int32_t (&of_slots)[kAhead][kOwn]) {
    Sums found{0, 0};
#pragma unroll
    for (uint32_t tile = 0; tile < kAhead; ++tile) {
      if (tile < tiles(width)) visit(tile, of_slots[tile], found);
    }
    for (uint32_t tile = kAhead; tile < tiles(width); ++tile) {
      fetch(of_slots[0], slots, tile, width);
      visit(tile, of_slots[0], found);
    }
    wait_for_team();
    return found;
  }

  // The same of some slots.
  __device__ __forceinline__ void visit(uint32_t tile, const int32_t (&of_slots)[kOwn],
                                        Sums& found) {
    uint32_t going[kOwn], counts = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t slot = at(tile, i);
      going[i] = 0;
      // A warp beyond the slots has nothing to ask.
      if (slot - lane >= width) continue;
      const bool stays = holds_selected(of_slots[i], slot);
      const bool goes = slot < width && !stays && !is_pinned(slot);
      going[i] = __ballot_sync(kAll, goes);
      counts += __popc(__ballot_sync(kAll, stays)) << 16 | __popc(going[i]);
    }
    const Sums of_tile = sums(counts);
    uint32_t next = found.all + (of_tile.before & 0xffff);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t place = next + __popc(going[i] & ((1u << lane) - 1));
      const bool goes = going[i] >> lane & 1;
      if (goes && place < room) left[place] = static_cast<uint16_t>(at(tile, i));
      next += __popc(going[i]);
    }
    found.before += of_tile.all >> 16;
    found.all += of_tile.all & 0xffff;
  }

  __device__ __forceinline__ bool is_pinned(uint32_t slot) const {
    return pinned != nullptr && pinned[slot] != 0;
  }

  __device__ __forceinline__ bool holds_selected(int32_t page, uint32_t slot) {
    const uint32_t number = page;
    const bool is_known = number < p.limit;
    const uint32_t word = is_known ? number / 32 : 0, bit = is_known ? 1u << number % 32 : 0;
    const uint32_t bits = is_known ? wanted[word] : 0, earlier = is_known ? before[word] : 0;
    uint32_t others = 0;
    if (is_known) others = atomicOr(&held[word], bit);
    is_bad |= (page != kNoPage && !is_known) || (others & bit) != 0;
    const bool stays = (bits & bit) != 0;
    if (stays) slot_of[earlier + __popc(bits & (bit - 1))] = static_cast<uint16_t>(slot);
    return stays;
  }
};

// Adds up how many moves the thread blocks before this one have said that they have.
__device__ uint32_t moves_before(const RecyclePagesParams& p, Shared& sh) {
  const volatile uint32_t* states = p.states;
  uint32_t sum = 0;
  for (uint32_t i = threadIdx.x; i < blockIdx.x; i += kThreads) {
    uint32_t said;
    do {
      said = states[i];
    } while (said == 0);
    sum += said - 1;
  }
  sum = __reduce_add_sync(kAll, sum);
  return sums_of_warps(sum, threadIdx.x / 32, sh.of_warp).all;
}

template <int kTeam>
__device__ __forceinline__ void recycle(const RecyclePagesParams& p) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Shared sh;
  constexpr int kTeams = kThreads / kTeam;
  Row<kTeam> row(p, sh, memory);
  row.compare();
  if (threadIdx.x % kTeam == 0) sh.of_team[threadIdx.x / kTeam] = row.missing;
  __syncthreads();
  uint32_t own = 0, of_earlier = 0;
#pragma unroll
  for (int team = 0; team < kTeams; ++team) {
    of_earlier += team < threadIdx.x / kTeam ? sh.of_team[team] : 0;
    own += sh.of_team[team];
  }
  if (threadIdx.x == 0) *const_cast<volatile uint32_t*>(p.states + blockIdx.x) = own + 1;
  // While the others say theirs.
  row.write();
  const uint32_t first = moves_before(p, sh);
  const uint32_t last = gridDim.x - 1;
  if (threadIdx.x == 0) {
    if (blockIdx.x == last) *p.count = static_cast<int32_t>(first + own);
    __threadfence();
    sh.is_last = atomicAdd(&p.states[gridDim.x], 1u) == last;
  }
  row.list(first + of_earlier);
  __syncthreads();
  if (!sh.is_last) return;
  for (uint32_t i = threadIdx.x; i <= gridDim.x; i += kThreads) p.states[i] = 0;
}

}  // namespace

// Named for who has a row.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    recycle_pages_warp(const __grid_constant__ RecyclePagesParams params) {
  recycle<32>(params);
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    recycle_pages_block(const __grid_constant__ RecyclePagesParams params) {
  recycle<kThreads>(params);
}
