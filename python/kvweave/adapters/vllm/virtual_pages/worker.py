"""A worker's part of the connector: tables over what vLLM allocated, as the scheduler has them."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvweave.adapters.vllm.connector import IdleConnector
from kvweave.adapters.vllm.virtual_pages.far_memory import FarMemory
from kvweave.adapters.vllm.virtual_pages.page_memory import PageMemory


class PageWorkerConnector(IdleConnector):
    """Gives the layers of a worker the memory that tables name, and keeps the tables up to date."""

    memory: PageMemory | None = None
    far: FarMemory | None = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Makes tables over what vLLM allocated, for all layers."""
        config: VllmConfig = self._vllm_config
        layers = [config.compilation_config.static_forward_context[name] for name in kv_caches]
        spec = layers[0].get_kv_cache_spec(config)
        self.memory = PageMemory(spec.layout, kv_caches, spec.seats)
        if spec.layout.spills:
            pages = -(-config.model_config.max_model_len // spec.block_size)
            heads = len(layers[0].budgets.ranked), layers[0].num_kv_heads
            self.far = FarMemory(self.memory, layers[0].host, spec.seats, pages, heads)
        for layer in layers:
            layer.memory, layer.far = self.memory, self.far

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Brings the tables up to date, before the step's layers run."""
        super().bind_connector_metadata(connector_metadata)
        assert self.memory is not None, "the worker allocates its cache first"
        changes = connector_metadata.far
        if self.far is not None and changes is not None:
            self.far.copy(changes)
        self.memory.apply(connector_metadata.rows)
        if self.far is not None and changes is not None:
            self.far.apply(changes)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages of requests whose transfers failed in the step: vLLM ends these requests alone."""
        return set() if self.far is None else self.far.take_failed()

    def restore_kv_caches(self) -> None:
        """After a sleep: what tables said is said again, and no request has pages any more."""
        if self.memory is not None:
            self.memory.restore()
        if self.far is not None:
            self.far.forget()
