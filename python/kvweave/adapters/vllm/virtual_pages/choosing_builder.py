"""Once a step: tables of virtual pages, and what requests that decode choose among."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig

from kvweave.adapters.vllm.backend.metadata import PagedMetadata
from kvweave.adapters.vllm.backend.step_tables import StepBatch
from kvweave.adapters.vllm.top_k.builder import ChoosingMetadataBuilder
from kvweave.adapters.vllm.top_k.choice import OwnTables, RankedHeads, StepChoice
from kvweave.adapters.vllm.top_k.metadata import ChoosingMetadata
from kvweave.adapters.vllm.virtual_pages.builder import VirtualMetadata, VirtualMetadataBuilder
from kvweave.adapters.vllm.virtual_pages.far_choice import FarChoice, HeadRun
from kvweave.adapters.vllm.virtual_pages.far_memory import FarMemory
from kvweave.adapters.vllm.virtual_pages.layout import PageLayout
from kvweave.adapters.vllm.virtual_pages.page_memory import PageMemory


@dataclass(kw_only=True)
class VirtualChoosingMetadata(ChoosingMetadata):
    """As `ChoosingMetadata`, of pages that are known when the first layer runs.

    `slots` are then i32 [tables, R, 2]. `filled_of` i32 [R, 3] of each table of heads that choose,
    and `bound_rows` i32 [R]: the pages whose last slot has been written, and where the bounds of a
    virtual page begin. `runs`: the heads that choose, by layer.
    """

    runs: list[list[HeadRun]]
    layout: PageLayout
    filled_of: dict[int, torch.Tensor] = field(default_factory=dict)
    bound_rows: torch.Tensor | None = None
    looked_up: bool = False

    def look_up(self, memory: PageMemory, far: FarMemory | None) -> None:
        """Finds the blocks, the changes of the step having come."""
        if self.looked_up:
            return
        self.looked_up = True
        parts: list[torch.Tensor] = []
        for tables in self._parts():
            assert isinstance(tables, VirtualMetadata)
            tables.look_up(memory)
            parts.append(tables.slots)
        self.slots = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        if far is not None and self.deciding is not None:
            one, choice = self.deciding
            assert one.batch is not None
            choice.far = FarChoice(far, self.runs, one.batch)

    def _parts(self) -> list[PagedMetadata]:
        deciding = [] if self.deciding is None else [self.deciding[0]]
        return deciding + ([] if self.reading is None else [self.reading])

    def begin_step(self, page_tokens: int) -> None:
        """Does once for all layers what they do with slots and lengths, on the device."""
        if self.deciding is not None:
            self.deciding[1].begin_step()
        last = self.slots[-1, :, 1] == page_tokens - 1
        on_host = last.device.type == "cpu"
        rows = self.slots[-1, :, 0]
        # On the host all that is listed must be there.
        self.bound_rows = rows[last] if on_host else rows.contiguous()
        for table in self.layout.choosing:
            filled = self.slots.new_zeros((self.rows, 3))
            filled[:, 0] = torch.where(last, self.slots[table, :, 0], -1)
            filled[:, 2] = page_tokens
            self.filled_of[table] = filled[last] if on_host else filled
        self.filled = self.bound_rows


class VirtualChoosingBuilder(ChoosingMetadataBuilder):
    """Makes `VirtualChoosingMetadata` of vLLM's own description of a batch."""

    def _prepare(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        context = vllm_config.compilation_config.static_forward_context
        layers: list[Any] = sorted((context[name] for name in layer_names), key=_number)
        layout, budgets = kv_cache_spec.layout, layers[0].budgets
        self.pages: PageLayout = layout
        requests = vllm_config.scheduler_config.max_num_seqs
        ranked = [layer for layer in layers if layer.ranked is not None]
        self.runs = [[run.on(device) for run in layer.runs] for layer in ranked]
        bounds = []
        for layer in ranked:
            ranks = np.zeros(len(budgets.of[layer.number]), np.int32)
            for run in layer.runs:
                first = layout.bound_row(run.table) + run.rank
                ranks[run.heads.cpu().numpy()] = first + np.arange(len(run.heads))
            bounds.append(ranks)
        heads = [layout.head_rows(layer.number, layer.rank) for layer in ranked]
        own = OwnTables(layout.step_tables, len(layout.tables), heads, bounds)
        self.heads = RankedHeads(budgets, device, requests, own)
        self.plain = VirtualMetadataBuilder(
            kv_cache_spec, layer_names, vllm_config, device, self.heads.room(requests)
        )

    def _deciding(
        self, batch: StepBatch, prefilling: torch.Tensor | None
    ) -> tuple[PagedMetadata, StepChoice]:
        kept, more = self.plain.kept, self.heads.room(batch.requests)
        tables = self.plain.tables_of(batch, more)
        chooses = self.singles.deciding(batch.requests, prefilling)
        offsets, columns = tables.entries.offsets, tables.columns
        if kept is not None:
            entries, begin = kept.entries, kept.room
        else:
            entries, begin = tables.entries.rows, batch.requests * sum(columns)
        choice = StepChoice(self.heads, entries, offsets, begin, chooses, columns[-1])
        return tables, choice

    def _made(
        self,
        batch: StepBatch,
        deciding: tuple[PagedMetadata, StepChoice] | None,
        reading: PagedMetadata | None,
    ) -> ChoosingMetadata:
        known = deciding[0] if deciding is not None else reading
        assert known is not None
        made = batch.rows, known.slots, deciding, reading, batch
        return VirtualChoosingMetadata(*made, runs=self.runs, layout=self.pages)


def _number(layer: Any) -> int:
    return int(layer.number)
