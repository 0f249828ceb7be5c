"""One forward of a batch in which some requests reuse segments: every layer computes fewer rows.

The layers are the model's own. Before each the KV of the rows that it spares is copied from the
store into vLLM's pages; rows of other requests go through as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context

from kvweave import ops
from kvweave.adapters.vllm.attention import PagedAttention
from kvweave.adapters.vllm.builder import PagedMetadata
from kvweave.adapters.vllm.segments.batch import Batch
from kvweave.adapters.vllm.segments.chunk import ChunkPlan
from kvweave.adapters.vllm.segments.stats import SegmentStats
from kvweave.adapters.vllm.segments.store import Copies, Rows, SegmentStore


@dataclass
class Layers:
    """vLLM's attention of each layer: its name, what attends, its pages [pages, 2, P, D]."""

    names: list[str]
    attends: list[PagedAttention]
    pages: list[torch.Tensor]


@dataclass
class Work:
    """A chunk of which something is reused; `request` is its number in the batch."""

    chunk: ChunkPlan
    request: int
    copied: Rows | None = None
    copies: Copies | None = None

    def asks(self, layer: int) -> bool:
        """Whether the policy wants something measured in a layer."""
        return self.chunk.plan.layer == layer and self.chunk.plan.probe is not None


class Step:
    """Carries out the plans of a step's chunks; made once a step, before the forward."""

    def __init__(
        self,
        store: SegmentStore,
        layers: Layers,
        stats: SegmentStats,
        works: list[Work],
        batch: Batch,
    ) -> None:
        self.store = store
        self.layers = layers
        self.stats = stats
        self.works = works
        self.batch = batch

    def run(self, model: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The decoder `model` over hidden states [N, ·] of a batch: its last states [N, ·].

        Rows that no layer computed to the end are zero: nothing asks for their logits.
        """
        context = get_forward_context()
        known: Any = context.attn_metadata
        try:
            return self._run(model, hidden, positions, context)
        finally:
            context.attn_metadata = known

    def _run(
        self, model: Any, embedded: torch.Tensor, positions: torch.Tensor, context: Any
    ) -> torch.Tensor:
        batch = self.batch
        everything = torch.arange(batch.metadata.rows, device=embedded.device)
        state = _States(embedded, None, positions, everything)
        chosen: _Chosen | None = None
        number = 0
        while number < len(self.layers.names):
            if number == 0:
                # Layers add in place, and the first may be run again.
                state = _States(embedded.clone(), None, positions, everything)
            if chosen is None or not chosen.stands(self.works):
                chosen = _Chosen.of(self.works, batch, embedded.device)
                state = state.narrowed(chosen.index)
            self._copy(number)
            queries: list[torch.Tensor] = []
            if chosen.rows:
                asked = any(work.asks(number) for work in self.works)
                metadata = replace(chosen.metadata, tap=queries if asked else None)
                context.attn_metadata = dict.fromkeys(self.layers.names, metadata)
                state = state.through(model.layers[number])
            self._count(number)
            if not self._advance(number, chosen.counts, queries):
                chosen = None
                continue
            number += 1
        output = torch.zeros_like(embedded)
        if len(state.index):
            last, _ = model.norm(state.hidden, state.residual)
            output.index_copy_(0, state.index, last)
        return output

    def _copy(self, number: int) -> None:
        """Brings the KV of spared rows of a layer from the store."""
        for work in self.works:
            spared = work.chunk.spared
            if not len(spared) or work.chunk.plan.layer != number:
                continue
            if work.copies is None or work.copied is not spared:
                held, batch = work.chunk.held, self.batch
                blocks = batch.blocks(work.request)
                work.copies = self.store.copies(held, spared, blocks, batch.page_tokens)
                work.copied = spared
            self.store.copy(work.copies, number, self.layers.pages[number])
            self.stats.copied_keys += work.copies.tokens
            self.stats.moved_keys += work.copies.moved

    def _advance(self, number: int, counts: list[int], queries: list[torch.Tensor]) -> bool:
        """Asks every policy for its next plan; false where the first layer is to be run again."""
        starts = np.cumsum([0, *counts])
        done = True
        for work in self.works:
            chunk, scores = work.chunk, None
            if chunk.plan.layer != number:
                continue
            if chunk.plan.probe is not None:
                own = queries[0][int(starts[work.request]) : int(starts[work.request + 1])]
                scores = self._scores(work, own)
            done &= chunk.advance(scores)
        return done

    def _scores(self, work: Work, q: torch.Tensor) -> torch.Tensor:
        """Sparse-Q mass of every token up to the chunk's end, f32, over all heads of all ranks."""
        chunk, number = work.chunk, work.chunk.plan.layer
        asking = chunk.plan.score_rows
        index = torch.from_numpy(np.searchsorted(chunk.rows, asking)).to(q.device)
        attend = self.layers.attends[number]
        mass = ops.score_tokens(
            q.index_select(0, index),
            torch.from_numpy(asking).to(q.device),
            self.batch.entries(work.request),
            self.layers.pages[number],
            0,
            kv_heads=attend.num_kv_heads,
            scale=attend.scale,
            rope=attend.rope,
            softcap=attend.softcap,
            tokens=chunk.end,
        )
        if get_tensor_model_parallel_world_size() > 1:
            mass = tensor_model_parallel_all_reduce(mass)
        return mass

    def _count(self, number: int) -> None:
        last = number + 1 == len(self.layers.names)
        for work in self.works:
            chunk = work.chunk
            if chunk.plan.layer != number:
                continue
            computed = len(chunk.rows)
            self.stats.rows += computed
            self.stats.rows_spared += chunk.end - chunk.start - computed
            if last:
                self.stats.reused_tokens += len(chunk.reused)
                self.stats.recomputed_rows += len(chunk.reused) - len(chunk.spared)


@dataclass
class _Chosen:
    """Rows of a batch that layers compute: the plans' own, and all of the other requests."""

    plans: list[Rows]
    counts: list[int]
    index: torch.Tensor
    metadata: PagedMetadata

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.index)

    @classmethod
    def of(cls, works: list[Work], batch: Batch, device: torch.device) -> _Chosen:
        """Those of the plans' current layer."""
        by_request = {work.request: work.chunk for work in works}
        parts = []
        for request, (first, end) in enumerate(pairwise(batch.row_offsets)):
            chunk = by_request.get(request)
            if chunk is None:
                parts.append(np.arange(first, end))
            else:
                parts.append(chunk.rows.astype(np.int64) - chunk.start + first)
        index = torch.from_numpy(np.concatenate(parts)).to(device)
        counts = [len(part) for part in parts]
        plans = [work.chunk.rows for work in works]
        return cls(plans, counts, index, batch.narrowed(index, counts))

    def stands(self, works: list[Work]) -> bool:
        """Whether the current layer has the same rows."""
        pairs = zip(self.plans, works, strict=True)
        return all(rows is work.chunk.rows for rows, work in pairs)


@dataclass
class _States:
    """Hidden states and residual of some rows of a batch, i64 `index`, with their positions.

    States may have more rows than the index: padding behind the batch's own.
    """

    hidden: torch.Tensor
    residual: torch.Tensor | None
    positions: torch.Tensor
    index: torch.Tensor

    def narrowed(self, index: torch.Tensor) -> _States:
        """Some of these rows, `index` in the batch."""
        if len(index) == len(self.index) == len(self.hidden):
            return self
        kept = torch.searchsorted(self.index, index)
        residual = None if self.residual is None else self.residual.index_select(0, kept)
        hidden, positions = (x.index_select(0, kept) for x in (self.hidden, self.positions))
        return _States(hidden, residual, positions, index)

    def through(self, layer: Any) -> _States:
        """What a layer of the model makes of them."""
        hidden, residual = layer(self.positions, self.hidden, self.residual)
        return _States(hidden, residual, self.positions, self.index)
