"""Figures of other systems, measured elsewhere and quoted here as such.

vLLM 0.33.0's own `block_pool.py`, `kv_cache_utils.py` and `hashing.py`, heavyweight imports
stubbed, Python 3.11, one thread of a 2-vCPU AMD EPYC (avx512f, sha_ni), medians on a shared
machine: read ratios, not absolutes. Scheduler work is left out, so engine cost is higher.
"""

SOURCE = "vLLM 0.33.0 block pool and hashing, 2-vCPU EPYC"
VLLM_NS_PER_BLOCK = {
    "allocate and free, 1 a call": 684.0,
    "allocate and free, 16 a call": 290.0,
    "allocate and free, 256 a call": 254.0,
    "allocate and free, 4096 a call": 249.0,
    "look up an active block": 308.0,
    "hash 16 tokens, xxhash": 729.0,
    "hash 16 tokens, sha256": 1078.0,
}
# 8192 blocks, each hashed and looked up: the sums of the figures above.
VLLM_LOOKUP_128K_MS = {"xxh3-128": 8.5, "sha256": 11.4}
