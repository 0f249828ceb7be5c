"""Once a step: tables of virtual pages, and what requests that decode choose among."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport

from kvweave.adapters.vllm.backend.metadata import PagedMetadata
from kvweave.adapters.vllm.backend.step_tables import StepBatch
from kvweave.adapters.vllm.top_k.builder import ChoosingMetadataBuilder
from kvweave.adapters.vllm.top_k.choice import OwnTables, RankedHeads, StepChoice
from kvweave.adapters.vllm.top_k.metadata import ChoosingMetadata, filled_pages
from kvweave.adapters.vllm.virtual_pages.builder import VirtualMetadata, VirtualMetadataBuilder
from kvweave.adapters.vllm.virtual_pages.far_choice import FarChoice, HeadRun
from kvweave.adapters.vllm.virtual_pages.far_memory import FarMemory, waits_for_host
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
        self.filled = filled_pages(self.slots[-1], page_tokens)
        self.bound_rows = self.filled[:, 0].contiguous()
        for table in self.layout.choosing:
            self.filled_of[table] = filled_pages(self.slots[table], page_tokens)


class VirtualChoosingBuilder(ChoosingMetadataBuilder):
    """Makes `VirtualChoosingMetadata` of vLLM's own description of a batch."""

    _tables: ClassVar[Any] = VirtualMetadataBuilder

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> Any:
        """None where the host copies what heads choose: a captured step cannot wait for it."""
        layers = vllm_config.compilation_config.static_forward_context.values()
        hosts = [layer.host for layer in layers if getattr(layer, "host", None) is not None]
        waits = any(waits_for_host(host) for host in hosts)
        return AttentionCGSupport.NEVER if waits else cls._cudagraph_support

    def _ranked_heads(self, layers: list[Any], requests: int) -> RankedHeads:
        layout, budgets = self.kv_cache_spec.layout, layers[0].budgets
        self.pages: PageLayout = layout
        ranked = [layer for layer in sorted(layers, key=_number) if layer.ranked is not None]
        self.runs = [[run.on(self.device) for run in layer.runs] for layer in ranked]
        bounds = []
        for layer in ranked:
            ranks = np.zeros(len(budgets.of[layer.number]), np.int32)
            for run in layer.runs:
                first = layout.bound_row(run.table) + run.rank
                ranks[run.heads.cpu().numpy()] = first + np.arange(len(run.heads))
            bounds.append(ranks)
        heads = [layout.head_rows(layer.number, layer.rank) for layer in ranked]
        own = OwnTables(layout.step_tables, len(layout.tables), heads, bounds)
        return RankedHeads(budgets, self.device, requests, own)

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
