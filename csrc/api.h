// Params of the kernels, mirrored field by field in rust/cuda/src/params.rs.
//
// Pointers are device addresses; sizes and strides count elements. One struct per op, passed by
// value as the kernel's only argument.
#pragma once

#include <cstddef>
#include <cstdint>

struct CopyRerotateParams {
  void* cache;            // paged KV, written in place
  const int32_t* copies;  // [copy_count, 6]: src_block, src_slot, dst_block, dst_slot, count, delta
  const float* inv_freq;  // [layers, pairs]
  int64_t blocks;         // block numbers below this lie within the cache
  int64_t block_stride;   // from block number b to b + 1
  int64_t layer_stride;
  int64_t head_stride;
  int64_t token_stride;
  int64_t value_offset;  // from a token's key to its value
  uint32_t copy_count;
  uint32_t layers;
  uint32_t kv_heads;
  uint32_t page_tokens;
  uint32_t head_dim;
  uint32_t pairs;            // rotary_dim / 2
  uint32_t heads_per_block;  // KV heads that one thread block copies
  uint32_t head_chunks;      // ceil(kv_heads / heads_per_block)
};

static_assert(sizeof(CopyRerotateParams) == 104, "params.rs says 104 bytes");
static_assert(offsetof(CopyRerotateParams, copy_count) == 72, "params.rs says 72 bytes");
