"""What vLLM's scheduler knows of its pool of blocks, reported by way of a KV connector."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from kvweave.adapters.vllm.backend.attention_span import AttentionSpan
from kvweave.adapters.vllm.connector import IdleConnector
from kvweave.adapters.vllm.metrics.pool import PoolStats

BYTES_EVERY_S = 0.5
"""Bytes are counted that often while requests run; and once when none does any more."""


class PoolReporter(IdleConnector):
    """Reports who waits for blocks; a subclass, what the groups of heads hold."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # The request that asked last, and the tokens that it has to compute.
        self._asking: tuple[str, int] | None = None
        self._waiting: set[str] = set()
        self._stalls: Counter[str] = Counter()
        self._given_back: Counter[str] = Counter()
        self._bytes: list[tuple[str, str, int]] = []
        self._host: list[tuple[str, str, int]] = []
        self._spilled = 0
        self._counted, self._counted_idle = float("-inf"), False

    @abstractmethod
    def bytes_now(self) -> list[tuple[str, str, int]]:
        """(group, state, bytes) of one worker's memory, now."""

    def host_now(self) -> list[tuple[str, str, int]]:
        """The same of the host's memory; nothing where none is used."""
        return []

    def spilled_now(self) -> int:
        """Bytes that one worker has copied there since the engine started."""
        return 0

    @abstractmethod
    def given_back_now(self) -> Counter[str]:
        """Bytes that windows gave back since the engine started, by group."""

    @abstractmethod
    def is_idle(self) -> bool:
        """Whether no request holds blocks."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Nothing is loaded from elsewhere; what is asked next is whether there are blocks."""
        self._asking = request.request_id, request.num_tokens - num_computed_tokens
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """There were blocks."""
        self._asking, self._counted_idle = None, False
        self._waiting.discard(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing to tell workers; a request that asked and got no blocks waits."""
        self.count_stalls(scheduler_output)
        return KVConnectorMetadata()

    def count_stalls(self, scheduler_output: Any) -> None:
        """Once for each wait: a request asks anew in every step."""
        if self._asking is not None:
            request, tokens = self._asking
            if request not in self._waiting and self._fits_step(tokens, scheduler_output):
                self._waiting.add(request)
                self._stalls["waited"] += 1
        self._asking = None
        preempted = len(scheduler_output.preempted_req_ids or ())
        if preempted:
            self._stalls["preempted"] += preempted

    def _fits_step(self, tokens: int, scheduler_output: Any) -> bool:
        """Whether a prompt had a place in the step, but for blocks: in chunks any has."""
        limits = self._vllm_config.scheduler_config
        if limits.enable_chunked_prefill:
            return True
        most = limits.max_num_scheduled_tokens or limits.max_num_batched_tokens
        tokens = min(tokens, limits.long_prefill_token_threshold or tokens)
        return bool(tokens <= most - scheduler_output.total_num_scheduled_tokens)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once."""
        self._waiting.discard(request.request_id)
        return False, None

    def get_kv_connector_stats(self) -> PoolStats | None:
        """What changed since the last report; None where nothing did."""
        now, idle = time.monotonic(), self.is_idle()
        known = self._counted_idle and not self._stalls
        if known if idle else now < self._counted + BYTES_EVERY_S:
            return None
        self._counted, self._counted_idle = now, idle
        bytes_now, total = self.bytes_now(), self.given_back_now()
        changed = bytes_now if bytes_now != self._bytes else []
        host_now, spilled = self.host_now(), self.spilled_now()
        of_host = host_now if host_now != self._host else []
        given_back, stalls = total - self._given_back, self._stalls
        self._bytes, self._given_back, self._stalls = bytes_now, total, Counter()
        found = {"bytes": changed, "host": of_host, "spilled": spilled - self._spilled}
        self._host, self._spilled = host_now, spilled
        stats = PoolStats({**found, "given_back": dict(given_back), "stalls": dict(stalls)})
        return None if stats.is_empty() else stats


def group_name(span: AttentionSpan, pages: int = 0) -> str:
    """What metrics call heads: "full", "top-k-64" of those that choose, or "window-256-sink-16"."""
    if span.window is None:
        return f"top-k-{pages}" if pages else "full"
    return f"window-{span.window}" + (f"-sink-{span.sink}" if span.sink else "")
