"""What the tier counts on vLLM's `/metrics`, among vLLM's own names of its offloading.

vLLM makes the metrics, and anew for another engine in a process: those whose names begin with its.
"""

from __future__ import annotations

import threading
from collections import Counter

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

BYTES = "vllm:kv_offload_kvweave_bytes"
REFUSED = "vllm:kv_offload_kvweave_refused"
READS = "vllm:kv_offload_kvweave_reads"
WAITING = "vllm:kv_offload_kvweave_first_sights"


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """The metrics of a tier, by name."""
    return {
        BYTES: OffloadingGaugeMetadata("Bytes of the store's files, of all who write there."),
        REFUSED: OffloadingCounterMetadata(
            "Chunks that the store did not look up, load or store, by the kind of its error.",
            ("action", "error"),
        ),
        READS: OffloadingCounterMetadata(
            "Chunks that were read, by the way they came: direct is past the page cache.", ("path",)
        ),
        WAITING: OffloadingCounterMetadata(
            "Chunks that were not written: the store is full, and they were offered once."
        ),
    }


class TierCounts:
    """Counts of any thread, until the scheduler's takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._held: int | None = None

    def refused(self, action: str, error: str) -> None:
        """A chunk that did not come through, and the error's class."""
        self._count(REFUSED, action, error)

    def path(self, path: str) -> None:
        """A chunk that was read: `direct`, `bounced`, `buffered` or `refused`."""
        self._count(READS, path)

    def first_sight(self) -> None:
        """A chunk that is not written before it comes again."""
        self._count(WAITING)

    def holds(self, size: int) -> None:
        """Bytes that the store holds now."""
        with self._lock:
            self._held = size

    def taken(self) -> OffloadingConnectorStats | None:
        """What came since the last call."""
        stats = OffloadingConnectorStats()
        with self._lock:
            counted, self._counted = self._counted, Counter()
            held, self._held = self._held, None
        for (name, labels), count in counted.items():
            stats.increase_counter(name, count, labels)
        if held is not None:
            stats.set_gauge(BYTES, held)
        return None if stats.is_empty() else stats

    def _count(self, name: str, *labels: str) -> None:
        with self._lock:
            self._counted[name, labels] += 1
