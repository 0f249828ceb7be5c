"""`KvweaveOffloading`: vLLM's own offloading, whose store tiers are told what their chunks are of.

Of a tier vLLM says the model's name and no more; the connector knows all of its configuration. It
also knows a request's `cache_salt`: whose chunks are salted, his quota of the store it counts on.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import asdict
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvweave.adapters.vllm import versions
from kvweave.adapters.vllm.store_tier.origin import chunk_origin
from kvweave.adapters.vllm.store_tier.settings import OF, WHERE
from kvweave.adapters.vllm.store_tier.tier import StoreTier


class KvweaveOffloading(OffloadingConnector):
    """What vLLM is told to load, beside `StoreTier` in its `secondary_tiers`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        versions.check_installed(versions.WITH_TIERS)
        if role == KVConnectorRole.SCHEDULER:
            vllm_config = _told(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)

    def on_new_request(self, request: Any) -> None:
        """A request comes; the tiers are told whose it is."""
        manager: Any = self.scheduler.manager
        for tier in manager.secondary_tiers:
            if isinstance(tier, StoreTier):
                tier.expect(request.request_id, namespace_of(request.cache_salt))
        super().on_new_request(request)


def namespace_of(salt: str | None) -> str:
    """The store's namespace of requests with a `cache_salt`, which is a secret and not in it."""
    return f"salt-{hashlib.sha256(salt.encode()).hexdigest()[:32]}" if salt else ""


def _told(config: Any, kv_cache_config: Any) -> Any:
    """The same configuration, in which tiers of ours have what their chunks are of."""
    transfer = copy.copy(config.kv_transfer_config)
    extra = transfer.kv_connector_extra_config = copy.deepcopy(transfer.kv_connector_extra_config)
    ours = [tier for tier in extra.get(WHERE, []) if tier.get("type") == StoreTier.__name__]
    if ours:
        origin = asdict(chunk_origin(config, kv_cache_config))
        for tier in ours:
            tier[OF] = origin
    told = copy.copy(config)
    told.kv_transfer_config = transfer
    return told
