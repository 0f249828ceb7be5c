"""Decode: one token a step for a batch of requests, which leave the batch as they end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvweave import ops
from kvweave.cache import KvRequest
from kvweave.runner.layer import RowGrid, finish, project
from kvweave.runner.model_spec import ModelSpec
from kvweave.runner.report import Report
from kvweave.runner.rope import PositionTable, rows_of
from kvweave.runner.sampling import Sampling


@dataclass
class Decoding:
    """One request while it decodes: what it has said and how it goes on.

    `tokens` are the generated ids; the last of them has no KV yet.
    """

    request: KvRequest
    positions: PositionTable
    sampling: Sampling
    report: Report
    limit: int
    stop: frozenset[int]
    exact: bool
    tokens: list[int] = field(default_factory=list)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = self.sampling.generator()

    @property
    def done(self) -> bool:
        """Whether the limit or a stop token was reached."""
        return len(self.tokens) >= self.limit or (
            bool(self.tokens) and self.tokens[-1] in self.stop
        )

    def choose(self, logits: torch.Tensor) -> int:
        """Samples from logits [V] and remembers the token."""
        token = self.sampling.choose(logits, self.generator)
        self.tokens.append(token)
        return token


def step(spec: ModelSpec, pages: torch.Tensor, batch: Sequence[Decoding]) -> list[int]:
    """Feeds each sequence's last token through the model and chooses its next: B ids.

    # Errors
    `PoolFull` when a sequence needs a block and there is none; its request is unchanged.
    """
    start = time.perf_counter()
    for sequence in batch:
        sequence.request.append(np.asarray(sequence.tokens[-1:], np.int32))
    hidden = _forward(spec, pages, batch)
    logits = spec.head(spec.final_norm(hidden)).float()
    if spec.final_softcap is not None:
        logits = torch.tanh(logits / spec.final_softcap) * spec.final_softcap
    chosen = [sequence.choose(row) for sequence, row in zip(batch, logits, strict=True)]
    spent = time.perf_counter() - start
    for sequence in batch:
        sequence.report.timings.decode_s += spent
    return chosen


def _forward(spec: ModelSpec, pages: torch.Tensor, batch: Sequence[Decoding]) -> torch.Tensor:
    """The last layer's hidden states [B, E] of each sequence's newest token."""
    places = np.asarray([s.request.length - 1 for s in batch], np.int32)
    slots = np.concatenate([s.request.slots(places[i : i + 1]) for i, s in enumerate(batch)])
    entries = [s.request.entries() for s in batch]
    offsets = np.cumsum([0, *(len(e) for e in entries)], dtype=np.int32)
    joined = np.concatenate(entries)
    turns = rows_of(spec, places)
    ids = torch.tensor([s.tokens[-1] for s in batch], device=spec.device)
    hidden: torch.Tensor = spec.embed(ids)
    grid = RowGrid.packed(len(batch))
    for index, layer in enumerate(spec.layers):
        cos, sin = turns[layer.rope_key] if layer.rotates else (None, None)
        q, k, v = project(spec, layer, grid, hidden, cos, sin)
        ops.write_pages(pages, index, k, v, slots)
        attended, _ = ops.attend_decode(
            q,
            places,
            joined,
            pages,
            index,
            kv_heads=spec.kv_heads,
            scale=layer.scale,
            rope=batch[0].positions.rope,
            entry_offsets=offsets,
            window=layer.window,
            softcap=layer.softcap,
        )
        hidden = finish(layer, grid, hidden, attended)
    return hidden


def by_regime(batch: Sequence[Decoding]) -> list[list[Decoding]]:
    """Sequences that can share a step: those whose keys were rotated by the same frequencies."""
    groups: dict[int, list[Decoding]] = {}
    for sequence in batch:
        groups.setdefault(sequence.positions.regime, []).append(sequence)
    return list(groups.values())
