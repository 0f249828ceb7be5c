"""A KV connector that loads and saves nothing: vLLM has no other way for a plugin's statistics."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvweave.adapters.vllm.pool_metrics import PoolMetrics, PoolStats
from kvweave.adapters.vllm.tables import Span

BYTES_EVERY_S = 0.5
"""Bytes are counted that often while requests run; and whenever none does."""


class PoolConnector(KVConnectorBase_V1, SupportsHMA):
    """Reports who waits for blocks; a subclass, what the groups of heads hold."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._asking: str | None = None
        self._waiting: set[str] = set()
        self._stalls: Counter[str] = Counter()
        self._given_back: Counter[str] = Counter()
        self._bytes: list[tuple[str, str, int]] = []
        self._counted = float("-inf")

    @abstractmethod
    def bytes_now(self) -> list[tuple[str, str, int]]:
        """(group, state, bytes) of one worker's memory, now."""

    @abstractmethod
    def given_back_now(self) -> Counter[str]:
        """Bytes that windows gave back since the engine started, by group."""

    @abstractmethod
    def is_idle(self) -> bool:
        """Whether no request holds blocks."""

    # ---- in the scheduler's process -------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is handed on when a request ends (asked by vLLM 0.33)."""
        return False

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Nothing is loaded from elsewhere; what is asked next is whether there are blocks."""
        self._asking = request.request_id
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """There were blocks."""
        self._asking = None
        self._waiting.discard(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing to tell workers; a request that asked and got no blocks waits."""
        self.count_stalls(scheduler_output)
        return KVConnectorMetadata()

    def count_stalls(self, scheduler_output: Any) -> None:
        """Once for each wait: a request asks anew in every step."""
        if self._asking is not None and self._asking not in self._waiting:
            self._waiting.add(self._asking)
            self._stalls["waited"] += 1
        self._asking = None
        preempted = len(scheduler_output.preempted_req_ids or ())
        if preempted:
            self._stalls["preempted"] += preempted

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once."""
        self._waiting.discard(request.request_id)
        return False, None

    def get_kv_connector_stats(self) -> PoolStats | None:
        """What changed since the last report; None in a worker, and where nothing did."""
        if self.role != KVConnectorRole.SCHEDULER:
            return None
        now = time.monotonic()
        if now < self._counted + BYTES_EVERY_S and not self.is_idle():
            return None
        self._counted = now
        bytes_now, total = self.bytes_now(), self.given_back_now()
        changed = bytes_now if bytes_now != self._bytes else []
        given_back, stalls = total - self._given_back, self._stalls
        self._bytes, self._given_back, self._stalls = bytes_now, total, Counter()
        found = {"bytes": changed, "given_back": dict(given_back), "stalls": dict(stalls)}
        return PoolStats(found)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PoolStats:
        """A report that came from the scheduler."""
        stats = PoolStats()
        stats.reset()
        if data is not None:
            stats.data = data
        return stats

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PoolMetrics:
        """These reports on the server's `/metrics`."""
        return PoolMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- in a worker ----------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **others: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **others: Any
    ) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""


def name_of(span: Span) -> str:
    """What metrics call the heads of a span: "full", or "window-256-sink-16"."""
    if span.window is None:
        return "full"
    return f"window-{span.window}" + (f"-sink-{span.sink}" if span.sink else "")
