// Pages of an arena by the numbers that rows give them.
#pragma once

#include "api.h"

// The arena's page under a number of a row, or −1.
__device__ __forceinline__ int64_t page_of(const RowPagesParams& of, int32_t row, int32_t number) {
  const uint32_t r = row, n = number;
  if (r >= of.rows || n >= of.width) return -1;
  const int32_t first = of.blocks[int64_t{r / of.ranks} * of.width + n];
  const int64_t page = int64_t{first} + r % of.ranks;
  return first >= 0 && page < of.pages ? page : -1;
}
