"""`KvweaveHeads`: what head classes hold, on the metrics of a server that has them.

`--kv-transfer-config '{"kv_connector": "KvweaveHeads", "kv_role": "kv_producer",
"kv_connector_module_path": "kvweave.adapters.vllm.heads.connector"}'` beside a head map.
"""

from __future__ import annotations

from kvweave.adapters.vllm.connector import ConnectorByRole
from kvweave.adapters.vllm.heads.scheduler import HeadSchedulerConnector
from kvweave.adapters.vllm.metrics.pool import PoolMetrics, PoolStats


class KvweaveHeads(ConnectorByRole):
    """The scheduler reports; workers have nothing to do."""

    in_scheduler = HeadSchedulerConnector
    metrics = PoolMetrics
    stats = PoolStats
