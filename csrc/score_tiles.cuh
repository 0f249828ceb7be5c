// The two passes of score_tokens on tensor cores.
//
// Both multiply vectors that a thread block holds in registers by vectors that stream through
// shared memory in tiles of 64: first query vectors by keys, then keys by query vectors. Either way
// a thread's sums belong to what it holds, so that no lane asks another before the end.
#pragma once

#include "paged.cuh"
#include "powers.cuh"
#include "rotation.cuh"
#include "tensor_core.cuh"
#include "vector.cuh"

// Starts the copy of 4 or 8 bytes to shared memory.
template <int kBytes>
__device__ __forceinline__ void copy_async_bytes(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;\n" ::"r"(to), "l"(from), "n"(kBytes));
}

// Row and head of query vector `v` of a KV head.
struct QueryVector {
  int row, head;
};

__device__ __forceinline__ QueryVector query_vector(const ScoreParams& p, int kv_head, int v) {
  const int group = p.query_heads / p.kv.kv_heads;
  const int row = p.group_factor == 0 ? v : __umulhi(v, p.group_factor);
  return {row, kv_head * group + v - row * group};
}

__device__ __forceinline__ int vectors_of(const ScoreParams& p) {
  return p.rows * (p.query_heads / p.kv.kv_heads);
}

// What a dot product is multiplied by for a score in powers of two, after the cap if there is one.
__device__ __forceinline__ float factor_of(const ScoreParams& p) {
  return p.softcap == 0.0f ? kLog2e * p.scale : 1.0f;
}

// Turns dot products into log2(e) · cap · tanh(scale · dot / cap), by tanh x = 1 − 2 / (e^2x + 1).
template <int N>
__device__ __forceinline__ void cap_scores(const ScoreParams& p, float (&dots)[N]) {
  const float inside = 2 * kLog2e * p.scale / p.softcap, outside = kLog2e * p.softcap;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    dots[i] = outside * (1.0f - __fdividef(2.0f, exp2_fast(inside * dots[i]) + 1.0f));
  }
}

// Rotates keys in shared memory to their positions, by the threads of kWarps warps together.
template <typename T, int kWarps>
class KeyTurner {
 public:
  // `turns` is [pairs] of shared memory of these warps: cosine and sine.
  __device__ KeyTurner(const PagedKv& kv, float2* turns)
      : kv_(kv), turns_(turns), thread_(threadIdx.x % (32 * kWarps)) {}

  // kKeys keys, run by run of equal delta. `words(key, i)` is where elements 2i and 2i + 1 of a key
  // are. The warps have met since the keys came, and need to meet again afterwards.
  template <int kKeys, typename Words>
  __device__ void turn(const int* delta_at, Words words) {
    const int lane = threadIdx.x % 32;
    uint64_t starts = 1;  // bit i: a run starts at key i
    starts |= __ballot_sync(~0u, lane > 0 && delta_at[lane] != delta_at[max(lane - 1, 0)]);
    if (kKeys == 64) {
      starts |= uint64_t{__ballot_sync(~0u, delta_at[lane + 32] != delta_at[lane + 31])} << 32;
    }
    while (starts != 0) {
      const int first = __ffsll(starts) - 1;
      starts &= starts - 1;
      const int last = starts == 0 ? kKeys : __ffsll(starts) - 1;
      const int delta = delta_at[first];
      if (delta == 0) continue;
      if (delta != delta_) prepare(delta);
      for (int key = first + thread_ / 32; key < last; key += kWarps) turn_key(key, words);
    }
  }

 private:
  const PagedKv& kv_;
  float2* turns_;
  const int thread_;
  int delta_ = 0;  // what `turns` are for

  __device__ void meet() const {
    if (kWarps == 1) __syncwarp(); else __syncthreads();
  }

  __device__ void prepare(int delta) {
    meet();
    for (int i = thread_; i < static_cast<int>(kv_.pairs); i += 32 * kWarps) {
      cos_sin(half_turns(delta, kv_.inv_freq[i]), turns_[i].x, turns_[i].y);
    }
    delta_ = delta;
    meet();
  }

  // Two elements a lane; with half pairing, pairs come in twos.
  template <typename Words>
  __device__ void turn_key(int key, Words words) {
    using A = Arithmetic<T>;
    const int pairs = static_cast<int>(kv_.pairs);
    const auto load_two = [](const uint32_t* from) {
      return load<T, 2>(reinterpret_cast<const T*>(from));
    };
    if (kv_.interleaved) {
      for (int i = threadIdx.x % 32; i < pairs; i += 32) {
        uint32_t* at = words(key, i);
        const Pack<T, 2> pair = load_two(at);
        const float x = A::widen(pair.at[0]), y = A::widen(pair.at[1]);
        const float2 t = turns_[i];
        *at = pack<T>(x * t.x - y * t.y, x * t.y + y * t.x);
      }
    } else {
      for (int i = threadIdx.x % 32; i < pairs / 2; i += 32) {
        uint32_t* first_at = words(key, i);
        uint32_t* second_at = words(key, pairs / 2 + i);
        const Pack<T, 2> first = load_two(first_at), second = load_two(second_at);
        const float4 t = reinterpret_cast<const float4*>(turns_)[i];
        const float x0 = A::widen(first.at[0]), y0 = A::widen(second.at[0]);
        const float x1 = A::widen(first.at[1]), y1 = A::widen(second.at[1]);
        *first_at = pack<T>(x0 * t.x - y0 * t.y, x1 * t.z - y1 * t.w);
        *second_at = pack<T>(x0 * t.y + y0 * t.x, x1 * t.w + y1 * t.z);
      }
    }
  }
};

template <typename T, int D>
class ScoreTiles {
 public:
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTile = 64;            // vectors of a tile
  static constexpr int kStages = 4;           // tiles in shared memory
  static constexpr int kSlots = 2 * kStages;  // tiles whose keys are known
  static constexpr int kHeld = 32;            // vectors that a warp holds
  static constexpr int kChunk = 16;           // vectors of a tile that a warp takes at once
  static constexpr int kSteps = D / 16;
  static constexpr int kPitch = 2 * D + 16;  // bytes of a vector: those 8 apart share no bank
  static constexpr int kTileBytes = kTile * kPitch;

  struct Shared {
    int64_t key_at[kSlots][kTile];
    int delta_at[kSlots][kTile];
    int position[kStages * kTile];  // of rows
    float lse[kStages * kTile];
    float2 turns[D / 2];  // cosine and sine of each pair
    int bounds[2][kWarps];
    alignas(16) unsigned char tiles[kStages][kTileBytes];
  };

 protected:
  const ScoreParams& p;
  Shared& sh;
  const int warp, lane, kv_head;
  const Reach reach;
  const int warps_along;  // warps that hold different vectors; others share their tiles out
  const int held_part;    // this warp's vectors, in units of kHeld
  const int tile_part;    // this warp's chunks are tile_part, + 8 / warps_along, …
  const float factor;
  KeyTurner<T, kWarps> turner;
  uint32_t held[2][kSteps][4];

  __device__ ScoreTiles(const ScoreParams& params, Shared& shared, int vectors_held)
      : p(params), sh(shared), warp(threadIdx.x / 32), lane(threadIdx.x % 32),
        kv_head(blockIdx.y), reach(reach_of(params.kv, blockIdx.y)),
        warps_along(vectors_held / kHeld), held_part(warp % warps_along),
        tile_part(warp / warps_along), factor(factor_of(params)), turner(params.kv, shared.turns) {}

  __device__ const T* query_at(int v) const {
    const QueryVector at = query_vector(p, kv_head, v);
    return static_cast<const T*>(p.q) + at.row * p.q_row_stride + at.head * p.q_head_stride;
  }

  // The address of a key whose place `key_at` says, which is not −1.
  __device__ const T* key_address(int64_t key_at) const {
    return static_cast<const T*>(p.kv.cache) + key_at + reach.rank * p.kv.head_stride;
  }

  // Starts the copies of a tile's vectors; zeros where `address_of(row)` is null.
  template <typename AddressOf>
  __device__ void copy_tile(int stage, AddressOf address_of) {
    constexpr int kWords = D / 8;  // of 16 bytes
    const uint32_t tile = shared_address(sh.tiles[stage]);
#pragma unroll
    for (int i = 0; i < (kTile * kWords + kThreads - 1) / kThreads; ++i) {
      const int word = threadIdx.x + i * kThreads;
      if (kTile * kWords % kThreads != 0 && word >= kTile * kWords) break;
      const int row = word / kWords, column = word % kWords;
      const T* from = address_of(row);
      const void* source = from == nullptr ? p.kv.cache : from + column * 8;
      copy_async(tile + row * kPitch + column * 16, source, from != nullptr);
    }
  }

  // Takes this warp's vectors from the stages.
  __device__ void hold() {
    const int first = held_part * kHeld;
    const uint32_t tile = shared_address(sh.tiles[first / kTile]);
    const int row = first % kTile + lane % 16;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        load_matrices(held[m][k], tile + (row + 16 * m) * kPitch + k * 32 + lane / 16 * 16);
      }
    }
  }

  // Scores of what the warp holds and one chunk of a tile, without the factor.
  __device__ void multiply(float (&to)[2][kChunk / 8][4], int stage, int chunk) {
    const int row = chunk * kChunk + lane / 16 * 8 + lane % 8;
    const uint32_t from =
        shared_address(sh.tiles[stage]) + row * kPitch + lane / 8 % 2 * 16;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) to[m][n][e] = 0.0f;
      }
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int n = 0; n < kChunk / 8; n += 2) {
        uint32_t moving[4];
        load_matrices(moving, from + n * 8 * kPitch + k * 32);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply_add<T>(to[m][n], held[m][k], moving[0], moving[1]);
          multiply_add<T>(to[m][n + 1], held[m][k], moving[2], moving[3]);
        }
      }
    }
    if (p.softcap != 0.0f) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n) cap_scores(p, to[m][n]);
      }
    }
  }

  // Brings a tile's keys to their positions; a barrier before, and another inside.
  __device__ void turn_keys(int stage, const int* delta_at) {
    turner.template turn<kTile>(delta_at, [&](int key, int i) {
      return reinterpret_cast<uint32_t*>(sh.tiles[stage] + key * kPitch) + i;
    });
    __syncthreads();
  }
};
