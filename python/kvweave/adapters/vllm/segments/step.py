"""One forward of a batch in which some requests reuse segments: every layer computes fewer rows.

The layers are the model's own. Before each the KV of the rows that it spares is copied from the
store into vLLM's pages; rows of other requests are all computed, in the first pass. Requests
whose policies pass more than once then go on without them: the last states of a row are its states.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context

from kvweave import ops
from kvweave.adapters.vllm.backend.metadata import RowSubset
from kvweave.adapters.vllm.segments.attention_layers import AttentionLayers
from kvweave.adapters.vllm.segments.batch import Batch
from kvweave.adapters.vllm.segments.chunk_work import ChunkWork
from kvweave.adapters.vllm.segments.draft import Drafter
from kvweave.adapters.vllm.segments.draft_steps import DraftSteps
from kvweave.adapters.vllm.segments.layer_rows import LayerRows, States
from kvweave.adapters.vllm.segments.probes import Probes
from kvweave.adapters.vllm.segments.stats import SegmentStats
from kvweave.adapters.vllm.segments.store import SegmentStore
from kvweave.device_memory import sent
from kvweave.plan import Draft, Probe
from kvweave.plan_walk import EARLY, Begin, Deeper, Further


class Step:
    """Carries out the walks of a step's chunks; made once a step, before the forward.

    `drafts` decodes what a policy wants drafted.
    """

    def __init__(
        self,
        store: SegmentStore,
        layers: AttentionLayers,
        stats: SegmentStats,
        works: list[ChunkWork],
        batch: Batch,
        drafts: DraftSteps,
    ) -> None:
        self.store = store
        self.layers = layers
        self.stats = stats
        self.works = works
        self.batch = batch
        self.drafts = drafts
        self.probes = Probes(layers, batch)
        named = {work.request for work in works}
        self.others = set(range(len(batch.row_offsets) - 1)) - named

    def run(self, model: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """A causal language model's layers over states [N, ·] of a batch: their last states [N, ·].

        Rows that no layer computed to the end are zero: nothing asks for their logits.
        """
        context = get_forward_context()
        known: Any = context.attn_metadata
        try:
            return self._run(model, hidden, positions)
        finally:
            context.attn_metadata = known
            for work in self.works:
                work.chunk.close()

    def _run(self, model: Any, embedded: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(embedded)
        drafter = Drafter(model, self.layers, self.batch, self.drafts)
        others, passes = self.others, 0
        while True:
            begun = [work for work in self.works if isinstance(work.chunk.task, Begin)]
            if not begun and passes:
                break
            self._pass(model.model, begun, others, embedded, positions, output)
            others, passes = set(), passes + 1
            for work in self.works:
                self._draft(work, drafter, output)
        for work in self.works:
            self._bound(work)
            work.count(self.stats)
        return output

    def _pass(
        self,
        model: Any,
        works: list[ChunkWork],
        others: Set[int],
        embedded: torch.Tensor,
        positions: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Once through the layers, with all rows of some `others`; what comes out goes to `output`.

        A pass before a request's last one may end above any layer but the first.
        """
        everything = torch.arange(self.batch.rows, device=embedded.device)

        def inputs() -> States:
            # Layers add in place, and embeddings may be needed again.
            return States(embedded.clone(), None, positions, everything)

        state = inputs()
        rows: LayerRows | None = None
        for number, layer in enumerate(model.layers):
            rows, state = self._layer(number, layer, works, others, rows, state)
            further = [work for work in works if isinstance(work.chunk.task, Further)]
            if further:
                _, more = self._layer(number, layer, further, set(), None, inputs())
                state, rows = state.merged(more), None
            if number + 1 == len(self.layers.layers):
                break
            works = [work for work in works if isinstance(work.chunk.task, Deeper)]
            if not works and not others:
                return
        if len(state.index):
            last, _ = model.norm(state.hidden, state.residual)
            output.index_copy_(0, state.index, last[: len(state.index)])

    def _layer(
        self,
        number: int,
        layer: Any,
        works: list[ChunkWork],
        others: Set[int],
        before: LayerRows | None,
        state: States,
    ) -> tuple[LayerRows, States]:
        """One layer over the rows of the works' plans; each work then knows what it does next."""
        plans = {work.request: (work.chunk.plan.rows, work.chunk.start) for work in works}
        if before is not None and before.match(plans):
            rows = before
        else:
            rows = LayerRows.of(self.batch, plans, others, state.index.device)
            state = state.narrowed(rows.index)
        for work in works:
            self._copy(work)
        observer = _LayerObserver(self, number, works, others, rows)
        probes = {work.chunk.plan.probe for work in works} - {None}
        early = not probes.isdisjoint(EARLY)
        if rows.total:
            with self.layers.watched(number, observer if probes else None) as watched:
                told = observer if probes and not watched else None
                tables = [replace(tables, observer=told) for tables in rows.metadata]
                get_forward_context().attn_metadata = self.layers.by_name(tables, number)
                state = state.after_attention(layer) if early else state.after_layer(layer)
        elif works:
            observer.deviations(None, None)
        if early:
            rows, state = self._rest(layer, works, observer.rows, state, observer.queries)
        for work in works:
            work.computed(work.chunk.plan)
            q = None if observer.queries is None else observer.queries[rows.part(work.request)]
            work.chunk.advance(self.probes.asked(work, q))
        return rows, state

    def _rest(
        self,
        layer: Any,
        works: list[ChunkWork],
        rows: LayerRows,
        state: States,
        queries: torch.Tensor | None,
    ) -> tuple[LayerRows, States]:
        """The feed-forward of a layer in which something was measured before its attention.

        Without a head map no head is restored, so that salience may be measured behind attention.
        """
        for work in works:
            if work.chunk.plan.probe is Probe.SALIENCE:
                q = None if queries is None else queries[rows.part(work.request)]
                work.chunk.measured(self.probes.salience(work, q))
        if not rows.total:
            return rows, state
        state = state.narrowed(rows.index)
        fed, spared = np.ones(rows.total, bool), False
        for work in works:
            plan, part = work.chunk.plan, rows.part(work.request)
            if plan.ffn_rows is not None:
                fed[part] = np.isin(plan.rows, plan.ffn_rows, assume_unique=True)
                work.leave_out(plan)
                spared = spared or not bool(fed[part].all())
        index = sent(np.flatnonzero(fed), state.index.device) if spared else None
        return rows, state.after_feed_forward(layer, index)

    def _copy(self, work: ChunkWork) -> None:
        """Brings the KV of spared rows of a layer from the store, the first time it is reached."""
        number = work.chunk.plan.layer
        if number < work.reached:
            return
        work.reached = number + 1
        spared = work.spared()
        if not len(spared):
            return
        if work.copied is not spared:
            work.copies = [
                self.store.copies(
                    work.chunk.admitted, spared, tables.blocks(work.request), tables.page_tokens
                )
                for tables in self.batch.classes
            ]
            work.copied = spared
        for part in self.layers.layers[number]:
            self.store.copy(work.copies[part.number], number, part)
        self.stats.copied_keys += work.copies[0].tokens
        self.stats.moved_keys += work.copies[0].moved

    def _bound(self, work: ChunkWork) -> None:
        """Bounds the pages of a chunk that are full now, for heads that choose by them."""
        tables = self.batch.classes[0]
        size, chunk = tables.page_tokens, work.chunk
        ranked = [part for part in self.layers.parts if part.bounds is not None]
        first, end = chunk.start // size, chunk.end // size
        if not ranked or first == end:
            return
        filled = tables.blocks(work.request).new_zeros((end - first, 3))
        filled[:, 0], filled[:, 2] = tables.blocks(work.request)[first:end], size
        for part in ranked:
            assert part.bounds is not None
            bounds = ops.PageBounds(part.bounds, filled)
            ops.bound_pages(part.pages, bounds, pages=part.kv_heads)

    def _draft(self, work: ChunkWork, drafter: Drafter, output: torch.Tensor) -> None:
        """Drafts that a policy wants behind a pass; none in the middle of a prompt."""
        chunk = work.chunk
        while isinstance(chunk.task, Draft):
            found = None
            if chunk.ends_prompt:
                end = int(self.batch.row_offsets[work.request + 1])
                last = output[end - 1 : end]
                found = drafter.mass(work.request, chunk.end, chunk.task, last)
            chunk.advance(found)


class _LayerObserver:
    """Hears the queries, keys and values of a layer before they are written.

    Where a policy measures how far they moved, it then says which rows are written and attend.
    """

    def __init__(
        self,
        step: Step,
        number: int,
        works: list[ChunkWork],
        others: Set[int],
        rows: LayerRows,
    ) -> None:
        self.step = step
        self.number = number
        self.works = works
        self.others = others
        self.rows = rows
        self.queries: torch.Tensor | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> RowSubset | None:
        self.queries = q
        before = self.rows
        if not self.deviations(k, v):
            return None
        kept = torch.searchsorted(before.index, self.rows.index)
        self.queries = q.index_select(0, kept)
        return RowSubset(kept, self._tables())

    def _tables(self) -> Mapping[str, Any]:
        return self.step.layers.by_name(self.rows.metadata, self.number)

    def deviations(self, k: torch.Tensor | None, v: torch.Tensor | None) -> bool:
        """Asks the policies that measure how far K, V [R, G, D] moved; whether there are any."""
        asking = [work for work in self.works if work.chunk.plan.probe is Probe.DEVIATION]
        for work in asking:
            part = self.rows.part(work.request)
            own = None if k is None or v is None else (k[part], v[part])
            work.chunk.measured(self.step.probes.deviation(work, own))
        if asking:
            plans = {work.request: (work.chunk.plan.rows, work.chunk.start) for work in self.works}
            batch, device = self.step.batch, self.rows.index.device
            self.rows = LayerRows.of(batch, plans, self.others, device)
        return bool(asking)
