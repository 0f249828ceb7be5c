// A warp's part of attention over pages in the basis of their text. The basis itself is
// turned_bases.cuh; what a warp adds up in it, float_part.cuh and integer_part.cuh.
#pragma once

#include "api.h"
#include "bases.cuh"
#include "decode_units.cuh"
#include "packed_softmax.cuh"
#include "paged.cuh"
#include "turned_bases.cuh"

// `Part` is what a warp adds up of pages of the same basis, and has as `vectors` what lies in them.
template <typename Part>
class BasisRows {
 public:
  using T = typename Part::Element;
  using Element = T;
  static constexpr int D = Part::kDim;
  static constexpr int kDim = D;
  static constexpr bool kTurned = true;
  static constexpr int kItemCost = 32;

  struct Shared {
    typename Part::Vectors::Shared vectors;
    TurnedBases<T, D> turned;
    int rank;  // of the pages that are alike
  };

  __device__ explicit BasisRows(const AttendPackedParams& params)
      : p(params.attend), bases(params.bases), part(params) {}

  __device__ void prepare(Shared& sh) { part.vectors.prepare(sh.vectors); }

  // An entry whose block has no basis is one without tokens.
  __device__ Entry entry(int index, int rank) const {
    Entry found = read_entry(p.kv, index, rank);
    if (found.begin < found.end && basis_number(bases, found.block, rank) < 0) {
      found.end = found.begin;
    }
    return found;
  }

  // Pages are alike that have the same basis and delta; rotates the item's queries into it.
  template <int kThreads>
  __device__ int alike(Shared& sh, const Heads& of, const EntryRange& entries, int rank, int from,
                       int to) {
    const auto key_of = [&](int unit) {
      const Entry at = entry(entries[unit], rank);
      return at.begin < at.end ? BasisKey{basis_number(bases, at.block, rank), at.delta}
                               : BasisKey{-1, 0};
    };
    const int end = sh.turned.template alike<kThreads>(from, to, key_of);
    part.vectors.enter(sh.vectors, sh.turned.key, rank);
    const Directions keys = part.vectors.directions(sh.turned.key, rank, kKeySide);
    const Directions values = part.vectors.directions(sh.turned.key, rank, kValueSide);
    sh.turned.template turn_in<kThreads>(p, of, keys, values);
    part.vectors.take_queries(sh.vectors, sh.turned);
    if (threadIdx.x == 0) sh.rank = rank;
    return end;
  }

  // Begins with the query heads of an item in the basis of its next pages.
  __device__ void begin(const Heads&, const Shared& sh) { part.begin(sh.turned); }

  // Takes in what the row sees of a page.
  __device__ void attend(const Heads&, const PackedRun& run, unsigned char* page) {
    if (run.entry.begin >= run.entry.end || !part.vectors.has_basis()) return;
    const int tokens = static_cast<int>(p.kv.page_tokens);
    const bool whole = is_seen_whole(run, tokens);
    part.vectors.open(page);
    constexpr int kAtOnce = 32 * Part::kMasks;
#pragma unroll 1
    for (int token = run.entry.begin / kAtOnce * kAtOnce; token < run.entry.end;
         token += kAtOnce) {
      uint32_t masks[Part::kMasks], any = 0;
#pragma unroll
      for (int i = 0; i < Part::kMasks; ++i) {
        const bool all = whole && (Part::kMasks == 1 || token + kAtOnce <= tokens);
        masks[i] = all ? ~0u : mask_32(run, token + 32 * i, tokens);
        any |= masks[i];
      }
      if (any != 0) part.attend(page, token, masks);
    }
  }

  // As PackedRows; rows are in the basis.
  __device__ void leave(const Heads& of, float* rows, int pitch, State* states, bool any) {
    part.leave(of, rows, pitch, states, any);
  }

  // Takes what `sum` adds up of the warps' parts back into channels, and adds it to what pages of
  // other bases left there.
  template <int kThreads, typename Sum>
  __device__ void turn_back(Shared& sh, const Heads& of, const State* states, bool first,
                            Sum sum) {
    sum([&](int i, const float4& value) { sh.turned.put(i, value); });
    const Directions values = part.vectors.directions(sh.turned.key, sh.rank, kValueSide);
    const float4 value = sh.turned.template turn_back<kThreads>(values, of, states);
    const int q = threadIdx.x / (D / 4);
    if (q >= of.count) return;
    if (first) {
      held = value;
      of_held = states[q];
    } else {
      add(held, of_held, value, states[q]);
    }
  }

  // Calls put(i, value, state) with this thread's word of the result.
  template <typename Put>
  __device__ void result(const Heads& of, Put put) {
    if (threadIdx.x < of.count * (D / 4)) put(threadIdx.x, held, of_held);
  }

 private:
  const AttendParams& p;
  const BasesParams& bases;
  Part part;
  // Of all threads of a block: a word of the result in channels, and its query's sums.
  float4 held;
  State of_held;
};
