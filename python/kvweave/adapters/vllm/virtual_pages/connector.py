"""How workers learn where pages lie: vLLM's scheduler sends them each step's changes."""

from __future__ import annotations

from kvweave.adapters.vllm.connector import ConnectorByRole
from kvweave.adapters.vllm.metrics.pool import PoolMetrics, PoolStats
from kvweave.adapters.vllm.virtual_pages.scheduler import PageSchedulerConnector
from kvweave.adapters.vllm.virtual_pages.worker import PageWorkerConnector


class KvweavePages(ConnectorByRole):
    """Changes of tables, from the scheduler to the workers."""

    in_scheduler = PageSchedulerConnector
    in_worker = PageWorkerConnector
    metrics = PoolMetrics
    stats = PoolStats
