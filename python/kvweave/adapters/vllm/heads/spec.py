"""What vLLM's scheduler knows of local heads: a cache spec."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec


@dataclass(frozen=True, kw_only=True)
class SinkWindowSpec(SlidingWindowSpec):
    """A window, and the first `sink` tokens of a request besides.

    `full_block_size`: tokens of a block of the layer's other heads, which keep everything; 0: it
    has none.
    """

    sink: int = 0
    full_block_size: int = 0

    @property
    def sink_blocks(self) -> int:
        """Blocks at the start of a request that are never given back."""
        return -(-self.sink // int(self.block_size))

    @property
    def kept_blocks(self) -> int:
        """Most blocks of a request that hold its sink or its window.

        A window of w tokens, and f rows in flight, begin and end inside blocks of b tokens: they
        lie in ⌈(w − 1 + f) / b⌉ + 1 blocks, of which less than f / b are counted elsewhere.
        """
        return self.sink_blocks + -(-(int(self.sliding_window) - 1) // int(self.block_size)) + 2

    @property
    def num_retained_tokens(self) -> int:
        """Tokens below which vLLM's second model runner (0.33) nulls a request's block table.

        A sink lies there, so none: 0 turns it off.
        """
        stock: Any = super()
        return 0 if self.sink else int(stock.num_retained_tokens)

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Most blocks that a request holds at a time: sink, window and all rows in flight."""
        stock: Any = super()
        window: int = stock.max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)
        return window + self.sink_blocks

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes that vLLM reckons with for these heads, of a request of the model's length.

        Before vLLM has counted its blocks it asks whether one request fits: that one may hold all
        rows in flight besides its sink and window, and one block, the null block, is nobody's.
        Afterwards it asks how many fit. `max_in_flight_tokens` bounds the rows in flight of all
        requests together, so their blocks are taken off once and not for each request.
        """
        stock: Any = super()
        alone = int(stock.max_memory_usage_bytes(vllm_config)) // int(self.page_size_bytes)
        blocks = vllm_config.cache_config.num_gpu_blocks
        if not blocks or not self.full_block_size:
            return (alone + 1) * int(self.page_size_bytes)
        whole = -(-vllm_config.model_config.max_model_len // self.full_block_size)
        in_flight = -(-vllm_config.max_in_flight_tokens // int(self.block_size))
        kept = min(alone, self.kept_blocks)
        fit = max((blocks - 1) / (whole + alone), (blocks - 1 - in_flight) / (whole + kept))
        return int(math.ceil(blocks / fit) - whole) * int(self.page_size_bytes)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether one block table does for all these layers: they keep the same tokens."""
        return all(
            isinstance(spec, SinkWindowSpec)
            and (spec.sliding_window, spec.sink) == (self.sliding_window, self.sink)
            for spec in kv_cache_specs.values()
        )
