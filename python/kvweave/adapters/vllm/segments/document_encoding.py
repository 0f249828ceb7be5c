"""Documents of a knowledge base, encoded alone: the model's layers over pages of the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context

from kvweave import ops
from kvweave.adapters.vllm.backend.metadata import PagedMetadata, QkvObserver
from kvweave.adapters.vllm.backend.step_tables import Entries
from kvweave.adapters.vllm.segments.store import DocumentRoom
from kvweave.device_memory import sent
from kvweave.errors import InvalidArgument


def checked_tokens(tokens: Any, vocabulary: int, longest: int) -> list[int]:
    """Token ids of a document, at least one and at most `longest`.

    Errors: `InvalidArgument` for anything else, ids outside the vocabulary included.
    """
    whole = isinstance(tokens, (list, tuple)) and set(map(type, tokens)) <= {int}
    if not whole or not 0 < len(tokens) <= longest:
        got = f"{len(tokens)} of them" if whole else type(tokens).__name__
        text = f"tokens: expected a list of 1 to {longest} token ids, got {got}"
        raise InvalidArgument(text, expected=f"1 to {longest} token ids", got=got)
    outside = [token for token in tokens if not 0 <= token < vocabulary]
    if outside:
        expected, got = f"ids in [0, {vocabulary})", str(outside[0])
        raise InvalidArgument(f"tokens: expected {expected}, got {got}", expected=expected, got=got)
    return list(tokens)


@torch.inference_mode()
def encode_document(
    model: Any,
    layers: list[list[Any]],
    room: DocumentRoom,
    tokens: list[int],
    config: VllmConfig,
) -> None:
    """Writes K and V of all of a document's tokens into its room, a chunk at a time.

    `model` is a causal language model of vLLM, `layers` has each of its layers' attention layers.
    """
    device, request = room.pages.device, room.request
    every = request.entries()
    whole = np.array([0, len(every)], np.int32)
    entries = Entries(*(sent(x, device) for x in (every, whole)))
    workspace = ops.Workspace(device)
    step = config.scheduler_config.max_num_batched_tokens
    for start in range(0, len(tokens), step):
        rows = np.arange(start, min(start + step, len(tokens)), dtype=np.int32)
        at = sent(rows, device)
        metadata = PagedMetadata(
            rows=len(rows),
            decode=False,
            positions=at,
            row_offsets=sent(np.array([0, len(rows)], np.int32), device),
            slots=sent(request.slots(rows), device),
            entries=entries,
            workspace=workspace,
            arena=room.pages,
        )
        ids = torch.tensor(tokens[start : start + step], device=device)
        watched = dict(_watched(metadata, layers, room))
        with set_forward_context(watched, config, slot_mapping={}):
            hidden, residual = model.model.embed_input_ids(ids), None
            for layer in model.model.layers:
                hidden, residual = layer(at.long(), hidden, residual)


def _watched(
    metadata: PagedMetadata, layers: list[list[Any]], room: DocumentRoom
) -> Iterator[tuple[str, PagedMetadata]]:
    """The tables of each attention layer by its name; it tells the room of its queries, if asked.

    In a block of the room layers' KV heads lie one behind the other.
    """
    heads = room.cache.shape.kv_heads
    for number, parts in enumerate(layers):
        for part in parts:
            told = metadata
            if room.take_queries is not None:
                pages = number * heads + part.impl.first_head, part.impl.num_kv_heads
                told = replace(metadata, observer=_observer(room.take_queries, *pages))
            yield part.layer_name, told


def _observer(
    take: Callable[[torch.Tensor, int, int], None], first: int, kv_heads: int
) -> QkvObserver:
    """Takes a layer's queries, and leaves its rows as they are."""

    def observer(q: torch.Tensor, _k: torch.Tensor, _v: torch.Tensor) -> None:
        take(q, first, kv_heads)

    return observer
