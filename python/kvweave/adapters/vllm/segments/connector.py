"""The connector of vLLM through which scheduler and workers speak of segments.

It claims no tokens of its own: what is reused is found by the workers, and every prompt token is
scheduled. `--kv-transfer-config '{"kv_connector": "KvweaveSegments", "kv_role": "kv_both",
"kv_connector_module_path": "kvweave.adapters.vllm.segments.connector"}'`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from kvweave.adapters.vllm.idle_connector import IdleConnector
from kvweave.adapters.vllm.metrics import SegmentMetrics
from kvweave.adapters.vllm.segments.message import SegmentMessage
from kvweave.adapters.vllm.segments.scheduling import Bookkeeper
from kvweave.adapters.vllm.segments.stats import SegmentConnectorStats, SegmentStats
from kvweave.adapters.vllm.segments.worker import SegmentWorker


class KvweaveSegments(IdleConnector):
    """Both halves: `books` in the scheduler's process, `worker` in each worker.

    Layers copy what they need themselves, and what is new is kept after the last one.
    """

    metrics = SegmentMetrics

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.config = vllm_config
        self.worker: SegmentWorker | None = None
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.books = Bookkeeper(int(block_size))

    # ---- in the scheduler's process -------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Takes note of markers."""
        self.books.arrived(request)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The message of a step."""
        return self.books.message(scheduler_output)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once."""
        self.books.finished(request.request_id)
        return False, None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Counts that came from a worker."""
        return SegmentConnectorStats(SegmentStats().to_dict() if data is None else data)

    # ---- in a worker ----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Tensors of vLLM are there: segments may come."""
        self.worker = SegmentWorker.of(self.config)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Looks up the prompts of a step: every vLLM says this before the forward.

        `start_load_kv`, too, comes before it in 0.26, and in 0.33 after it.
        """
        super().bind_connector_metadata(connector_metadata)
        if self.worker is not None and isinstance(connector_metadata, SegmentMessage):
            self.worker.begin(connector_metadata)

    def wait_for_save(self) -> None:
        """Keeps what the step computed."""
        if self.worker is not None:
            self.worker.finish()

    def get_kv_connector_stats(self) -> SegmentConnectorStats | None:
        """Counts since the last step, from the first worker alone: all count the same."""
        return None if self.worker is None else self.worker.taken_stats()
