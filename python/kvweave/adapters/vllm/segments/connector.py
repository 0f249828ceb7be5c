"""The connector of vLLM through which scheduler and workers speak of segments.

It claims no tokens of its own: what is reused is found by the workers, and every prompt token is
scheduled. `--kv-transfer-config '{"kv_connector": "KvweaveSegments", "kv_role": "kv_both",
"kv_connector_module_path": "kvweave.adapters.vllm.segments.connector"}'`.
"""

from __future__ import annotations

from kvweave.adapters.vllm.connector import ConnectorByRole
from kvweave.adapters.vllm.metrics.segments import SegmentMetrics
from kvweave.adapters.vllm.segments.scheduler import SegmentSchedulerConnector
from kvweave.adapters.vllm.segments.stats import SegmentConnectorStats
from kvweave.adapters.vllm.segments.worker import SegmentWorkerConnector


class KvweaveSegments(ConnectorByRole):
    """The scheduler notes which requests have segments; workers find and keep their KV."""

    in_scheduler = SegmentSchedulerConnector
    in_worker = SegmentWorkerConnector
    metrics = SegmentMetrics
    stats = SegmentConnectorStats
