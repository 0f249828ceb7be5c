"""Documents that came and went, as the KV events that vLLM publishes to routers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllm.config import VllmConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvweave.adapters.vllm.segments.known_documents import Change

MEDIUM = "KVWEAVE_SEGMENT"
"""What tells these events from those of vLLM's blocks, which are prefixes."""


def are_published(config: VllmConfig) -> bool:
    """Whether somebody may listen."""
    events = config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def events_of(changes: Iterable[Change]) -> Iterator[KVCacheEvent]:
    """One event for each change: a document is one block of as many tokens as the store has."""
    for kind, name, tokens in changes:
        hashes = [maybe_convert_block_hash(BlockHash(name))]
        if kind == "removed":
            yield BlockRemoved(block_hashes=hashes, medium=MEDIUM)
            continue
        yield BlockStored(
            block_hashes=hashes,
            parent_block_hash=None,
            token_ids=[],
            block_size=tokens,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
        )
