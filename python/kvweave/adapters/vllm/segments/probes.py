"""What policies measure in vLLM's layers, in the words of the runner's probes."""

from __future__ import annotations

import numpy as np
import torch

from kvweave.adapters.vllm.segments.attention_layers import AttentionLayers
from kvweave.adapters.vllm.segments.batch import Batch
from kvweave.adapters.vllm.segments.chunk_kv import ChunkKv, SentRows
from kvweave.adapters.vllm.segments.chunk_work import ChunkWork
from kvweave.plan import Rows, Salience
from kvweave.question import ASKED, scores


class Probes:
    """Measures in the layers of one step. Queries, keys and values are those of a work's rows."""

    def __init__(self, layers: AttentionLayers, batch: Batch) -> None:
        self.layers = layers
        self.batch = batch
        self._tables = SentRows()
        self._asked: tuple[Rows, Rows, Rows] | None = None

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
        known = self._asked
        if known is None or known[0] is not plan.rows or known[1] is not plan.score_rows:
            asking: Rows = np.searchsorted(plan.rows, plan.score_rows).astype(np.int32)
            known = self._asked = plan.rows, plan.score_rows, asking
        return q.index_select(0, self._tables.on(q.device, known[2]))
