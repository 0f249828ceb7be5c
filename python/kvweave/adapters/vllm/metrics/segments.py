"""What segments did, on vLLM's own `/metrics`; `docs/vllm.md` says what each name means.

vLLM asks the connector for this object and hands it every report of a worker.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge

from kvweave.adapters.vllm.metrics.named import DEVICE, NamedMetrics

# Names without "_total", which the library adds; the field of a report; what it says.
COUNTS = {
    "requests": ("requests", "Prompts with marks that were looked up"),
    "prompt_tokens": ("prompt_tokens", "Tokens of their prompts that were scheduled"),
    "reused_tokens": ("reused_tokens", "Tokens whose KV came from the store"),
    "recomputed_tokens": ("recomputed_rows", "Reused tokens that the policy computed again"),
    "rows": ("rows", "Tokens times layers that were computed"),
    "spared_rows": ("rows_spared", "Tokens times layers that were not computed"),
    "copied_keys": ("copied_keys", "Tokens times layers whose KV was copied from the store"),
    "moved_keys": ("moved_keys", "Of these, keys rotated to another position (Delta-RoPE)"),
}
BY_LABEL = {
    "hit_tokens": ("hits", "kind", "Tokens that the store had, by kind of hit"),
    "missed_tokens": ("misses", "reason", "Tokens that were not reused, by reason"),
}
STORE = ("store_bytes", "Bytes of the store, by tier and by what holds them")


class SegmentMetrics(NamedMetrics):
    """Counters that go up with the reports of workers, and one gauge."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._counts = {
            field: self.made(Counter, name, says) for name, (field, says) in COUNTS.items()
        }
        self._by_label = {
            field: self.made(Counter, name, says, label)
            for name, (field, label, says) in BY_LABEL.items()
        }
        self._store = self.made(Gauge, *STORE, "tier", "state", multiprocess_mode="sum")
        for engine in self.per_engine_labelvalues.values():
            for metric in self._counts.values():
                metric.labels(*engine).inc(0)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds a report: `SegmentStats.to_dict`."""
        engine = self.per_engine_labelvalues[engine_idx]
        for field, metric in self._counts.items():
            metric.labels(*engine).inc(transfer_stats_data[field])
        for field, metric in self._by_label.items():
            for label, value in transfer_stats_data[field].items():
                metric.labels(*engine, label).inc(value)
        # Reports say how the bytes changed, so that any number of them adds up.
        for state, change in transfer_stats_data.get(STORE[0], {}).items():
            self._store.labels(*engine, DEVICE, state).inc(change)
