// Where a piece of a page that is carried is read and written.
#pragma once

#include "api.h"
#include "row_pages.cuh"

namespace {

// Bytes are 0 for a piece that is skipped: its move points outside a table or an arena.
struct Route {
  const unsigned char* from;
  unsigned char* to;
  uint32_t bytes;
};

// The moves that are carried, of which a count beyond them is all of them.
__device__ __forceinline__ uint64_t pieces_of(const MovePagesParams& p) {
  const uint32_t count = min(static_cast<uint32_t>(max(*p.count, 0)), p.most);
  return uint64_t{count} * p.page_pieces;
}

// A page has pieces of kPiece bytes, the last of them what is left.
template <uint32_t kPiece>
__device__ __forceinline__ Route route_of(const MovePagesParams& p, uint64_t piece,
                                          uint64_t pieces) {
  if (piece >= pieces) return {nullptr, nullptr, 0};
  const uint64_t move = piece / p.page_pieces;
  const uint32_t offset = static_cast<uint32_t>(piece - move * p.page_pieces) * kPiece;
  const int32_t* numbers = p.moves + 3 * move;
  const int64_t page = page_of(p.home, numbers[0], numbers[1]);
  const int64_t slot = page_of(p.slots, numbers[0], numbers[2]);
  if (page < 0 || slot < 0) return {nullptr, nullptr, 0};
  auto* at_home = static_cast<unsigned char*>(p.home.data) + page * p.page_bytes + offset;
  auto* in_slot = static_cast<unsigned char*>(p.slots.data) + slot * p.page_bytes + offset;
  const uint32_t bytes = min(p.page_bytes - offset, kPiece);
  if (p.spills != 0) return {in_slot, at_home, bytes};
  return {at_home, in_slot, bytes};
}

}  // namespace
