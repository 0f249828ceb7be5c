"""One forward of a batch in which some requests reuse segments: every layer computes fewer rows.

The layers are the model's own. Before each the KV of the rows that it spares is copied from the
store into vLLM's pages; rows of other requests go through as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context

from kvweave import ops
from kvweave.adapters.vllm.attention import PagedAttention
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
        everything = np.arange(self.batch.metadata.rows)
        number = 0
        while number < len(self.layers.names):
            if number == 0:
                state = _Rows(embedded, None, positions, everything)
            rows, counts = self._rows()
            state = state.narrowed(rows)
            self._copy(number)
            queries: list[torch.Tensor] = []
            if len(rows):
                metadata = self.batch.narrowed(state.index, counts)
                metadata.tap = queries if any(w.chunk.plan.probe for w in self.works) else None
                context.attn_metadata = dict.fromkeys(self.layers.names, metadata)
                layer = model.layers[number]
                hidden, residual = layer(state.positions, state.hidden, state.residual)
                state = _Rows(hidden, residual, state.positions, rows, state.index)
            self._count(number)
            number += self._advance(number, counts, queries)
        output = torch.zeros_like(embedded)
        if len(state.rows):
            last, _ = model.norm(state.hidden, state.residual)
            output.index_copy_(0, state.index, last)
        return output

    def _rows(self) -> tuple[np.ndarray[Any, Any], list[int]]:
        """Rows of the batch that the current layer computes, and how many of each request."""
        by_request = {work.request: work.chunk for work in self.works}
        parts = []
        for request, first in enumerate(self.batch.row_offsets[:-1]):
            chunk = by_request.get(request)
            if chunk is None:
                parts.append(np.arange(first, self.batch.row_offsets[request + 1]))
            else:
                parts.append(chunk.rows.astype(np.int64) - chunk.start + first)
        return np.concatenate(parts), [len(part) for part in parts]

    def _copy(self, number: int) -> None:
        """Brings the KV of spared rows of a layer from the store."""
        for work in self.works:
            spared = work.chunk.spared
            if not len(spared) or work.chunk.plan.layer != number:
                continue
            if work.copies is None or work.copied is None or not _same(work.copied, spared):
                to = self.batch.places(work.request, spared)
                work.copies = self.store.copies(work.chunk.held, spared, to)
                work.copied = spared
            self.store.copy(work.copies, number, self.layers.pages[number])
            self.stats.copied_keys += len(work.copies)
            self.stats.moved_keys += work.copies.moved

    def _advance(self, number: int, counts: list[int], queries: list[torch.Tensor]) -> int:
        """Asks every policy for its next plan; 0 where the first layer is to be run again."""
        starts = np.cumsum([0, *counts])
        done = 1
        for work in self.works:
            chunk, scores = work.chunk, None
            if chunk.plan.layer != number:
                continue
            if chunk.plan.probe is not None:
                own = queries[0][int(starts[work.request]) : int(starts[work.request + 1])]
                scores = self._scores(work, own)
            if not chunk.advance(scores):
                done = 0
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
class _Rows:
    """Hidden states and residual of some rows of a batch, with their positions."""

    hidden: torch.Tensor
    residual: torch.Tensor | None
    positions: torch.Tensor
    rows: np.ndarray[Any, Any]
    at: torch.Tensor | None = None

    @property
    def index(self) -> torch.Tensor:
        """The rows as an index i64 on the device."""
        if self.at is None:
            self.at = torch.from_numpy(self.rows.astype(np.int64)).to(self.hidden.device)
        return self.at

    def narrowed(self, rows: np.ndarray[Any, Any]) -> _Rows:
        """Some of these rows; the states of padding behind the batch's rows go first."""
        if len(rows) == len(self.rows) == len(self.hidden):
            return self
        kept = torch.from_numpy(np.searchsorted(self.rows, rows)).to(self.hidden.device)
        residual = None if self.residual is None else self.residual.index_select(0, kept)
        return _Rows(
            self.hidden.index_select(0, kept), residual, self.positions.index_select(0, kept), rows
        )


def _same(a: Rows, b: Rows) -> bool:
    return a is b or np.array_equal(a, b)
