"""Bytes by head group, and requests that waited for blocks, on vLLM's `/metrics`.

vLLM's scheduler knows them; its connector's statistics bring them to the front process.
"""

from __future__ import annotations

from collections import Counter as Counts
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvweave.adapters.vllm.metrics.named import DEVICE, HOST, NamedMetrics

BYTES = ("kv_bytes", "Bytes of one worker's KV memory, by tier, by head group and by state")
SPILLED = ("spilled_bytes", "Bytes of one worker that were copied to the host's memory")
GIVEN_BACK = ("given_back_bytes", "Bytes that windows left behind and that became free")
STALLS = ("stalls", "Requests that waited for blocks, or lost theirs to others")


class PoolStats(KVConnectorStats):
    """What a scheduler says of its pool; `data` is plain.

    `bytes`: [group, state, bytes] as they are now, and `host` the same of the host's memory.
    `given_back` by group, `stalls` by kind, "waited" and "preempted", and `spilled`: counts since
    the last report.
    """

    data: dict[str, Any]

    def reset(self) -> None:
        """Starts a new interval."""
        self.data = {"bytes": [], "host": [], "given_back": {}, "stalls": {}, "spilled": 0}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Counts add up; of bytes the newer ones count."""
        for field in ("bytes", "host"):
            self.data[field] = other.data[field] or self.data[field]
        self.data["spilled"] += other.data["spilled"]
        for field in ("given_back", "stalls"):
            self.data[field] = dict(Counts(self.data[field]) + Counts(other.data[field]))
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log shows of an interval."""
        held: Counts[str] = Counts()
        for group, state, count in self.data["bytes"]:
            held[f"KV bytes {group} {state}"] += count
        for group, state, count in self.data["host"]:
            held[f"KV bytes of hosts {group} {state}"] += count
        return {**held, "Requests that waited": self.data["stalls"].get("waited", 0)}

    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not any(self.data.values())


class PoolMetrics(NamedMetrics):
    """Gauges of bytes, and counters, labelled as vLLM's own."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        labels = ("tier", "group", "state")
        self._bytes = self.made(Gauge, *BYTES, *labels, multiprocess_mode="mostrecent")
        self._spilled = self.made(Counter, *SPILLED)
        self._given_back = self.made(Counter, *GIVEN_BACK, "group")
        self._stalls = self.made(Counter, *STALLS, "kind")
        for engine in self.per_engine_labelvalues.values():
            for kind in ("waited", "preempted"):
                self._stalls.labels(*engine, kind).inc(0)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Takes a report: the `data` of `PoolStats`."""
        engine = self.per_engine_labelvalues[engine_idx]
        for tier, field in ((DEVICE, "bytes"), (HOST, "host")):
            for group, state, count in transfer_stats_data[field]:
                self._bytes.labels(*engine, tier, group, state).set(count)
        self._spilled.labels(*engine).inc(transfer_stats_data["spilled"])
        for group, count in transfer_stats_data["given_back"].items():
            self._given_back.labels(*engine, group).inc(count)
        for kind, count in transfer_stats_data["stalls"].items():
            self._stalls.labels(*engine, kind).inc(count)
