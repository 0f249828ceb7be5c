"""What policies measure in vLLM's layers, in the words of the runner's probes."""

from __future__ import annotations

import torch

from kvweave.adapters.vllm.segments.attention_layers import AttentionLayers
from kvweave.adapters.vllm.segments.batch import Batch
from kvweave.adapters.vllm.segments.chunk_kv import ChunkKv, SentRows
from kvweave.adapters.vllm.segments.chunk_work import ChunkWork
from kvweave.plan import Salience
from kvweave.question import ASKED, scores


class Probes:
    """Measures in the layers of one step. Queries, keys and values are those of a work's rows."""

    def __init__(self, layers: AttentionLayers, batch: Batch) -> None:
        self.layers = layers
        self.batch = batch
        self._tables = SentRows()

    def asked(self, work: ChunkWork, q: torch.Tensor | None) -> torch.Tensor | None:
        """What the plan's probe measures behind attention, f32 [T]; None without a probe."""
        plan = work.chunk.plan
        if plan.probe is None:
            return None
        kv, asking = self._kv(work), self._asking(work, q)
        if asking is None:
            return torch.zeros(kv.tokens, device=kv.device)
        return ASKED[plan.probe](kv, asking, plan.score_rows)

    def salience(self, work: ChunkWork, q: torch.Tensor | None) -> Salience:
        """Mass that each token gets; policies know of no windows here: no head misses anything."""
        kv, asking = self._kv(work), self._asking(work, q)
        edge = torch.zeros(kv.kv_heads, device=kv.device)
        if asking is None:
            return Salience(torch.zeros(kv.tokens, device=kv.device), edge)
        return Salience(scores(kv, asking, work.chunk.plan.score_rows), edge)

    def deviation(
        self, work: ChunkWork, fresh: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """How far fresh K, V [R, G, D] are from those in the pages, f32 [R]."""
        kv, rows = self._kv(work), work.chunk.plan.rows
        if fresh is None or not len(rows):
            return torch.zeros(len(rows), device=kv.device)
        blocks = [tables.blocks(work.request) for tables in self.batch.classes]
        return kv.moved(*fresh, rows, blocks)

    def _kv(self, work: ChunkWork) -> ChunkKv:
        chunk = work.chunk
        # Whoever asks is a row of the chunk, or stands before the question that is one.
        entries = self.batch.entries(work.request, chunk.start, chunk.end)
        return ChunkKv(self.layers.layers[chunk.plan.layer], entries, chunk.end, self._tables)

    def _asking(self, work: ChunkWork, q: torch.Tensor | None) -> torch.Tensor | None:
        """The queries that ask; None where there are none."""
        plan = work.chunk.plan
        if q is None or not len(plan.score_rows):
            return None
        return q.index_select(0, self._tables.places(q.device, plan.score_rows, plan.rows))
