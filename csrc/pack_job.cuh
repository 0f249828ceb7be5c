// Which pages a row of `packs` names.
#pragma once

#include "api.h"

// A page of a row of `packs`.
struct Job {
  const int32_t* blocks;  // of the cache
  int64_t block;          // packed
  int tokens, page;
  int64_t packed;  // byte at which its packed page begins; −1 for a row that is skipped
};

__device__ __forceinline__ Job job_of(const PackPagesParams& p, int row, int page) {
  const int32_t* of = p.packs + int64_t{row} * p.width;
  const int64_t block = of[0];
  const int tokens = of[1];
  bool sound = block > 0 && block + p.pages <= p.packed_pages && tokens > 0 &&
               tokens <= static_cast<int>(p.page_tokens);
  const int32_t* blocks = of + 2;
  for (int first = 0; sound && first < tokens; first += p.source_tokens) {
    const int64_t source = *blocks++;
    sound = source > 0 && source + p.pages <= p.cache_pages;
  }
  return {of + 2, block, tokens, page, sound ? (block + page) * p.page_bytes : -1};
}

// First key element of a token; its value lies `source_tokens · head_dim` further on.
__device__ __forceinline__ int64_t element_of(const PackPagesParams& p, const Job& job, int token) {
  const int64_t page = int64_t{job.blocks[token / p.source_tokens]} + job.page;
  return (2 * page * p.source_tokens + token % p.source_tokens) * p.head_dim;
}
