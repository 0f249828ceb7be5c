"""What vLLM's scheduler knows of virtual pages: one spec for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from kvweave.adapters.vllm.virtual_pages.layout import PageLayout


@dataclass(frozen=True, kw_only=True)
class VirtualPagesSpec(FullAttentionSpec):
    """A page of all heads of a layer, where each keeps what its class does.

    `in_flight`: most tokens of a request that a step computes or that are not yet settled. Of so
    many `seats` of requests pages may lie in `host_bytes` of each worker, where they leave devices.
    """

    layout: PageLayout
    in_flight: int
    host_bytes: int = 0
    seats: int = 0

    @property
    def home_blocks(self) -> int:
        """Virtual pages that have room in the host's memory."""
        if not self.layout.spills:
            return 0
        page_bytes: int = self.num_states * self.state_content_size_bytes
        return self.layout.home_blocks(self.host_bytes, page_bytes)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Most memory that a request of the model's length takes in a layer, the null block too."""
        tokens: int = vllm_config.model_config.max_model_len
        page: int = self.num_states * self.state_content_size_bytes
        return self.layout.charged(tokens, self.in_flight) * page

    @classmethod
    def merge(cls, specs: Sequence[Any]) -> Any:
        """One spec for layers of one layout."""
        assert all(spec == specs[0] for spec in specs), "expected layers of one layout"
        return specs[0]

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether one block table does for all these layers."""
        return all(spec == self for spec in kv_cache_specs.values())
