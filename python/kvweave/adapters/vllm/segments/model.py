"""What a model class needs to reuse segments: checks at its making, and its forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from kvweave.adapters.vllm.composition import OURS
from kvweave.adapters.vllm.require import require
from kvweave.adapters.vllm.segments.attention import give_store, guard_model
from kvweave.adapters.vllm.segments.connector import KvweaveSegments
from kvweave.adapters.vllm.segments.worker import SegmentWorker, SegmentWorkerConnector
from kvweave.errors import InvalidArgument

CONNECTOR = KvweaveSegments.__name__

__all__ = ["check_connector", "forward_of_step", "give_store", "guard_model", "weights_replaced"]


def check_connector(config: VllmConfig) -> None:
    """Expects the connector by which scheduler and workers speak of segments.

    One of others is no error here: `check_together` refuses it, and says why.

    Errors: `InvalidArgument` without any, and for another one of ours.
    """
    transfer = config.kv_transfer_config
    connector = None if transfer is None else transfer.kv_connector
    expected = f"kv_connector {CONNECTOR}"
    there = connector == CONNECTOR or (connector is not None and connector not in OURS)
    require("kv_transfer_config", there, expected, str(connector), InvalidArgument)


def forward_of_step(
    model: Any,
    input_ids: torch.Tensor | None,
    positions: torch.Tensor,
    intermediate_tensors: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor | None:
    """Hidden states [N, ·] of a step in which segments are reused; None where none are."""
    worker = _worker()
    if worker is None:
        return None
    try:
        step = worker.step()
        if step is None:
            return None
        if inputs_embeds is None:
            inputs_embeds = model.model.embed_input_ids(input_ids)
        return step.run(model, inputs_embeds, positions)
    except BaseException:
        worker.abandon()
        raise


@contextmanager
def weights_replaced(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[Iterable[tuple[str, torch.Tensor]]]:
    """Weights on their way into a model that has served: behind them its store is empty."""
    worker = _worker()
    if worker is None:
        yield weights
        return
    try:
        yield worker.watched(weights)
    finally:
        worker.weights_were_replaced()


def _worker() -> SegmentWorker | None:
    """This process's, if its engine reuses segments and has begun."""
    connector: Any = get_kv_transfer_group() if has_kv_transfer_group() else None
    return connector.worker if isinstance(connector, SegmentWorkerConnector) else None
