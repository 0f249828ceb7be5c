"""What head classes hold, as vLLM's scheduler knows it, reported."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvweave.adapters.vllm.backend.cache_specs import attention_span_of
from kvweave.adapters.vllm.heads.sink_manager import SinkWindowManager
from kvweave.adapters.vllm.metrics.scheduler import PoolReporter, group_name
from kvweave.adapters.vllm.pool_managers import manager_of
from kvweave.errors import Unsupported


class HeadSchedulerConnector(PoolReporter):
    """Reports the blocks of global and of local heads, which share vLLM's pool."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Finds the manager of the local heads.

        Errors: `Unsupported` where there is none: the model was given no head map, or one whose
        heads are all full.
        """
        manager = manager_of(gpu_block_pool, SinkWindowManager)
        if manager is None:
            expected = "a head map with a window among its heads"
            text = f"KvweaveHeads: expected {expected}, got a cache of whole contexts alone"
            raise Unsupported(text, expected=expected, got="a cache of whole contexts alone")
        self.pool, self.manager = gpu_block_pool, manager
        # One cache layer has the heads of all.
        self.block_bytes = int(manager.kv_cache_spec.page_size_bytes)
        self.local = group_name(attention_span_of(manager.kv_cache_spec))

    def bytes_now(self) -> list[tuple[str, str, int]]:
        """What both groups hold; all else is free to either, cached prefixes too."""
        free = int(self.pool.get_num_free_blocks())
        local = self.manager.held_blocks()
        whole = int(self.pool.num_gpu_blocks) - 1 - free - local
        counts = [("full", "held", whole), (self.local, "held", local), ("any", "free", free)]
        return [(group, state, count * self.block_bytes) for group, state, count in counts]

    def given_back_now(self) -> Counter[str]:
        """Bytes that the local heads' windows left behind."""
        return Counter({self.local: self.manager.given_back * self.block_bytes})

    def is_idle(self) -> bool:
        """Whether no request holds blocks."""
        return not any(self.manager.req_to_blocks.values())
