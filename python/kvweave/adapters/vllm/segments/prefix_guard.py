"""Approximate KV never enters vLLM's prefix cache: a cache spec, and the manager of its blocks.

The scheduler does not know what a worker will find in its store. So the blocks of a request with
marked segments are cached up to the first of them, with discovery not at all, unless the request
asked for policy "full". What is there already is found and used like any other prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvweave.adapters.vllm.segments.eligibility import eligible_markers


@dataclass(frozen=True, kw_only=True)
class ExactPrefixSpec(FullAttentionSpec):
    """All tokens are kept; only those whose KV is exact may be found by later requests."""


class ExactPrefixManager(FullAttentionManager):
    """Stops caching a request's blocks at the first token that may be approximate."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._exact: dict[str, int | None] = {}

    def cache_blocks(self, request: Any, num_tokens: int, *others: Any, **named: Any) -> None:
        """Lets later requests find the blocks of exact tokens alone."""
        if request.request_id not in self._exact:
            markers = eligible_markers(request)
            approximate = markers is not None and markers.approximates
            exact = markers.exact_tokens(num_tokens) if approximate and markers else None
            self._exact[request.request_id] = exact
        limit = self._exact[request.request_id]
        if limit is not None:
            num_tokens = min(num_tokens, limit)
        super().cache_blocks(request, num_tokens, *others, **named)

    def pop_blocks_for_free(self, request_id: str) -> Any:
        """Forgets the request."""
        self._exact.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)
