"""A KV connector that loads and saves nothing, of which parts of the plugin make their own.

vLLM gives plugins no other way from its scheduler to its workers, and none for statistics.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from kvweave.adapters.vllm.metrics import NamedMetrics


class IdleConnector(KVConnectorBase_V1, SupportsHMA):
    """Answers what every vLLM asks of a connector; subclasses do what they are for.

    `metrics`: what makes its reports metrics of the server.
    """

    metrics: ClassVar[type[NamedMetrics]]

    # ---- in the server's process ----------------------------------------------------------

    @classmethod
    def build_prom_metrics(cls, *given: Any) -> NamedMetrics:
        """Its reports on the server's `/metrics`."""
        return cls.metrics(*given)

    # ---- in the scheduler's process -------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing is handed on when a request ends (asked by vLLM 0.33)."""
        return False

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """No tokens come from elsewhere: all that vLLM has not cached are scheduled."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is to be loaded into these blocks."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing to tell workers."""
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once."""
        return False, None

    # ---- in a worker ----------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **others: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **others: Any
    ) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
