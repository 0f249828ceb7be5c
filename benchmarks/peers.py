"""Figures of other systems, measured elsewhere and quoted here as such.

vLLM 0.33.0's own `block_pool.py`, `kv_cache_utils.py` and `hashing.py`, heavyweight imports
stubbed, Python 3.11, one thread of a 2-vCPU AMD EPYC (avx512f, sha_ni), medians on a shared
machine: read ratios, not absolutes. Scheduler work is left out, so engine cost is higher.
"""

# Nanoseconds a block, by the name of our own case.
VLLM_NS_PER_BLOCK = {
    "allocate_and_free/1": 684.0,
    "allocate_and_free/16": 290.0,
    "allocate_and_free/256": 254.0,
    "allocate_and_free/4096": 249.0,
    "lookup/active_hashed_before/8192": 308.0,
    "hash_128k_tokens/xxh3-128": 729.0,
    "hash_128k_tokens/sha256": 1078.0,
}
# 8192 blocks, each hashed and looked up: the sums of the figures above.
VLLM_LOOKUP_128K_MS = {"xxh3-128": 8.5, "sha256": 11.4}
