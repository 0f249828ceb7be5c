"""KV connectors that load and save nothing, of which features of the plugin make their own.

vLLM gives plugins no other way from its scheduler to its workers, and none for statistics. It makes
a connector once for its scheduler and once in each worker, of one class and for a role.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvweave.adapters.vllm.metrics.named import NamedMetrics
from kvweave.adapters.vllm.served_models import check_class


class IdleConnector(KVConnectorBase_V1, SupportsHMA):
    """Answers what every vLLM asks of a connector; subclasses do what one role is for."""

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


class ConnectorByRole(IdleConnector):
    """The class that vLLM is told to load: for a role it makes the connector of that role.

    `metrics`: what makes a feature's reports, `stats`, metrics of the server.
    """

    in_scheduler: ClassVar[type[IdleConnector]]
    in_worker: ClassVar[type[IdleConnector]] = IdleConnector
    metrics: ClassVar[type[NamedMetrics]]
    stats: ClassVar[type[KVConnectorStats]]

    def __new__(cls, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> Any:
        """A connector of another class: none of these is ever made.

        Errors: `Unsupported` beside a model that is of no class of ours.
        """
        check_class(cls.__name__, vllm_config)
        made = cls.in_scheduler if role == KVConnectorRole.SCHEDULER else cls.in_worker
        return made(vllm_config, role, kv_cache_config)

    # ---- in the server's process ----------------------------------------------------------

    @classmethod
    def build_prom_metrics(cls, *given: Any) -> NamedMetrics:
        """The reports on the server's `/metrics`."""
        return cls.metrics(*given)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """A report that came from the scheduler or a worker; without data, an empty one."""
        report = cls.stats()
        report.reset()
        if data is not None:
            report.data = data
        return report
