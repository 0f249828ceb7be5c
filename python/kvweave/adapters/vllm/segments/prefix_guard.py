"""Approximate KV never enters vLLM's prefix cache: cache specs, and managers of their blocks.

The scheduler does not know what a worker will find in its store. So the blocks of a request with
marked segments are cached up to the first of them, with discovery not at all, unless the request
asked for policy "full". What is there already is found and used like any other prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from kvweave.adapters.vllm.heads.sink_manager import SinkWindowManager
from kvweave.adapters.vllm.heads.spec import SinkWindowSpec
from kvweave.adapters.vllm.segments.eligibility import eligible_markers
from kvweave.adapters.vllm.top_k.prompt_prefix import PromptPrefixManager, PromptPrefixSpec


@dataclass(frozen=True, kw_only=True)
class ExactPrefixSpec(FullAttentionSpec):
    """All tokens are kept; only those whose KV is exact may be found by later requests."""


@dataclass(frozen=True, kw_only=True)
class ExactWindowSpec(SinkWindowSpec):
    """The same of heads that keep a sink and a window."""


@dataclass(frozen=True, kw_only=True)
class ExactPromptSpec(PromptPrefixSpec):
    """The same beside heads that choose what they read: exact tokens of prompts."""


def guarded(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec by which vLLM keeps the same, and lets later requests find exact KV alone."""
    kinds: dict[type[KVCacheSpec], type[Any]] = {
        FullAttentionSpec: ExactPrefixSpec,
        SinkWindowSpec: ExactWindowSpec,
        PromptPrefixSpec: ExactPromptSpec,
    }
    made = {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}
    found: KVCacheSpec = kinds[type(spec)](**made)
    return found


class _Guard:
    """Mixed in before a manager: stops caching a request's blocks at the first doubtful token."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._exact: dict[str, int | None] = {}

    def cache_blocks(self, request: Any, num_tokens: int, *others: Any, **named: Any) -> None:
        """Lets later requests find the blocks of exact tokens alone."""
        try:
            limit = self._exact[request.request_id]
        except KeyError:
            markers = eligible_markers(request)
            approximate = markers is not None and markers.approximates
            limit = markers.exact_tokens(num_tokens) if approximate and markers else None
            self._exact[request.request_id] = limit
        if limit is not None and limit < num_tokens:
            num_tokens = limit
        stock: Any = super()
        stock.cache_blocks(request, num_tokens, *others, **named)

    def pop_blocks_for_free(self, request_id: str) -> Any:
        """Forgets the request."""
        self._exact.pop(request_id, None)
        stock: Any = super()
        return stock.pop_blocks_for_free(request_id)


class ExactPrefixManager(_Guard, FullAttentionManager):
    """Blocks of heads that keep everything."""


class ExactWindowManager(_Guard, SinkWindowManager):
    """Blocks of heads that keep a sink and a window."""


class ExactPromptManager(_Guard, PromptPrefixManager):
    """Blocks beside heads that choose what they read."""


MANAGERS: dict[type[KVCacheSpec], type[Any]] = {
    ExactPrefixSpec: ExactPrefixManager,
    ExactWindowSpec: ExactWindowManager,
    ExactPromptSpec: ExactPromptManager,
}
"""By spec, what manages its blocks in vLLM's scheduler."""
