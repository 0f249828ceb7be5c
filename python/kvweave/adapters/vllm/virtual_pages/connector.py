"""How workers learn where pages lie: vLLM's scheduler sends them each step's changes.

It is a KV connector because vLLM gives plugins no other way from its scheduler to its workers; it
loads and saves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from kvweave.adapters.vllm.virtual_pages.manager import VirtualPagesManager
from kvweave.adapters.vllm.virtual_pages.memory import PageMemory
from kvweave.errors import Unsupported


@dataclass
class PageChanges(KVConnectorMetadata):
    """Changes of a step: i32 [N, 3] of table, virtual page, arena page of its block (0: none)."""

    rows: npt.NDArray[np.int32]


class KvweavePages(KVConnectorBase_V1, SupportsHMA):
    """Sends changes of tables from the scheduler to the workers."""

    manager: VirtualPagesManager | None = None
    memory: PageMemory | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """No request waits for what is sent."""
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Finds the manager whose tables are sent.

        Errors: `Unsupported` where there is none: the model was not told to use virtual pages.
        """
        super().bind_kv_cache_manager(kv_cache_manager)
        managers = kv_cache_manager.coordinator.single_type_managers
        if len(managers) != 1 or not isinstance(managers[0], VirtualPagesManager):
            expected = "additional_config with kvweave.virtual_pages"
            text = f"KvweavePages: expected {expected}, got a cache without"
            raise Unsupported(text, expected=expected, got="a cache without")
        self.manager = managers[0]

    def build_connector_meta(self, scheduler_output: Any) -> PageChanges:
        """What changed since the last step."""
        assert self.manager is not None, "the scheduler binds its cache manager first"
        return PageChanges(self.manager.residency.pages.take_changes())

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Makes tables over what vLLM allocated, for all layers."""
        config: VllmConfig = self._vllm_config
        layers = [config.compilation_config.static_forward_context[name] for name in kv_caches]
        self.memory = PageMemory(layers[0].layout, kv_caches)
        for layer in layers:
            layer.memory = self.memory

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Brings the tables up to date, before the step's layers run."""
        super().bind_connector_metadata(connector_metadata)
        assert self.memory is not None, "the worker allocates its cache first"
        self.memory.apply(connector_metadata.rows)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once."""
        return False, None

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Nothing is loaded from elsewhere."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is loaded."""

    def start_load_kv(self, forward_context: Any, **others: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **others: Any
    ) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
