"""Metrics of kvweave on vLLM's own `/metrics`; `docs/vllm.md` says what each name means."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

PREFIX = "kvweave_"
DEVICE, HOST = "device", "host"
"""The tiers that workers keep KV in, as labels."""

_made: list[Any] = []


class NamedMetrics(KVConnectorPromMetrics):
    """Metrics of kvweave's names with vLLM's labels first.

    A process that makes another engine, as a test does, starts the names anew.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._types, self._labels = metric_types, labelnames
        while _made:
            # Another kind of metric (of Ray) was never there.
            with suppress(KeyError):
                REGISTRY.unregister(_made.pop())

    def made(self, kind: Any, name: str, says: str, *labels: str, **options: Any) -> Any:
        """A metric of a kind (`Counter`, `Gauge`) with more labels."""
        names = [*self._labels, *labels]
        metric = self._types[kind](
            name=PREFIX + name, documentation=says, labelnames=names, **options
        )
        _made.append(metric)
        return metric
