"""Rows of a batch on their way through the layers: which a layer computes, and their states."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvweave.adapters.vllm.segments.batch import Batch, Metadata
from kvweave.device_memory import sent
from kvweave.plan import Rows

Places = npt.NDArray[np.int64]


@dataclass
class LayerRows:
    """Rows of a batch that a layer computes: the plans' own, and all of some other requests.

    `plans` are the rows that each request's plan names, `counts` how many each request has,
    `metadata` the tables of each class of heads.
    """

    plans: dict[int, Rows]
    counts: list[int]
    index: torch.Tensor
    metadata: list[Metadata]

    @property
    def total(self) -> int:
        """How many there are."""
        return len(self.index)

    @classmethod
    def of(
        cls,
        batch: Batch,
        plans: dict[int, tuple[Rows, int]],
        others: Set[int],
        device: torch.device,
    ) -> LayerRows:
        """Those of plans, by request: positions, and the first that the batch has; and of others.

        `others` have all of their rows.
        """
        parts: list[Places] = []
        for request, (first, end) in enumerate(pairwise(batch.row_offsets)):
            if request in plans:
                rows, start = plans[request]
                parts.append(rows.astype(np.int64) - start + first)
            else:
                parts.append(np.arange(first, end if request in others else first))
        index = sent(np.concatenate(parts), device)
        counts = [len(part) for part in parts]
        named = {request: rows for request, (rows, _) in plans.items()}
        return cls(named, counts, index, batch.narrowed(index, counts))

    def match(self, plans: dict[int, tuple[Rows, int]]) -> bool:
        """Whether plans name these very rows."""
        return self.plans.keys() == plans.keys() and all(
            rows is self.plans[request] for request, (rows, _) in plans.items()
        )

    def part(self, request: int) -> slice:
        """Where the rows of a request are among them."""
        first = sum(self.counts[:request])
        return slice(first, first + self.counts[request])


@dataclass
class States:
    """Hidden states and residual of some rows of a batch, i64 `index`, with their positions.

    States may have more rows than the index: padding behind the batch's own.
    """

    hidden: torch.Tensor
    residual: torch.Tensor | None
    positions: torch.Tensor
    index: torch.Tensor

    def narrowed(self, index: torch.Tensor) -> States:
        """Some of these rows, `index` in the batch."""
        if len(index) == len(self.index) == len(self.hidden):
            return self
        kept = torch.searchsorted(self.index, index)
        residual = None if self.residual is None else self.residual.index_select(0, kept)
        hidden, positions = (x.index_select(0, kept) for x in (self.hidden, self.positions))
        return States(hidden, residual, positions, index)

    def merged(self, other: States) -> States:
        """These and others behind the same layer, in the order of the batch."""
        if not len(self.index):
            return other
        index = torch.cat((self.index, other.index))
        order = torch.argsort(index)
        residual = None
        if self.residual is not None and other.residual is not None:
            own = self.residual[: len(self.index)]
            residual = torch.cat((own, other.residual)).index_select(0, order)
        hidden = torch.cat((self.hidden[: len(self.index)], other.hidden))
        positions = torch.cat((self.positions[: len(self.index)], other.positions))
        return States(
            hidden.index_select(0, order),
            residual,
            positions.index_select(0, order),
            index.index_select(0, order),
        )

    def after_layer(self, layer: Any) -> States:
        """What a layer of the model makes of them."""
        hidden, residual = layer(self.positions, self.hidden, self.residual)
        return States(hidden, residual, self.positions, self.index)

    def after_attention(self, layer: Any) -> States:
        """What the attention of a layer makes of them: the first half of `after_layer`."""
        hidden, residual = self.hidden, self.residual
        if residual is None:
            residual, hidden = hidden, layer.input_layernorm(hidden)
        else:
            hidden, residual = layer.input_layernorm(hidden, residual)
        hidden = layer.self_attn(positions=self.positions, hidden_states=hidden)
        return States(hidden, residual, self.positions, self.index)

    def after_feed_forward(self, layer: Any, fed: torch.Tensor | None) -> States:
        """What the feed-forward makes of those at i64 `fed`, None: all: the second half.

        The others keep their residual.
        """
        hidden, residual = layer.post_attention_layernorm(self.hidden, self.residual)
        if fed is None:
            hidden = layer.mlp(hidden)
        else:
            some = layer.mlp(hidden.index_select(0, fed))
            hidden = torch.zeros_like(hidden).index_copy_(0, fed, some)
        return States(hidden, residual, self.positions, self.index)
