"""vLLM's description of a batch, and the tables of our ops that come of it. Needs no vLLM.

B requests, R rows (tokens that are computed), P tokens a page. No size depends on what tensors
hold: on a device nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvweave import ops
from kvweave.adapters.vllm.backend.attention_span import AttentionSpan


class Entries(NamedTuple):
    """Entries [N, 5] and offsets [B + 1]; rows from `offsets[B]` on hold nothing of use."""

    rows: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, tables: ops.StepTables) -> Entries:
        """Those of a step; on the host they are as long as they say."""
        rows, offsets = tables.entries, tables.offsets
        if offsets.is_cpu:
            rows = rows[: int(offsets.numpy()[-1])]
        return cls(rows, offsets)


@dataclass
class StepBatch:
    """What vLLM says of a step, its tensors on one device.

    `blocks` i32 [B, M], `lengths` i32 [B], `row_offsets` i32 [B + 1], `slot_mapping` i64 [R], as
    `ops.step_tables` has them; requests that pad a graph are requests too. `most_rows` and
    `longest`, of any request, are known on the host; tokens may be fewer.
    """

    rows: int
    most_rows: int
    longest: int
    blocks: torch.Tensor
    lengths: torch.Tensor
    row_offsets: torch.Tensor
    slot_mapping: torch.Tensor

    @classmethod
    def of(cls, common: Any) -> StepBatch:
        """Of vLLM's `CommonAttentionMetadata`."""
        requests, most_rows = common.num_reqs, common.max_query_len
        rows = requests if most_rows == 1 else int(common.query_start_loc_cpu[requests])
        return cls(
            rows,
            most_rows,
            common.max_seq_len,
            first(common.block_table_tensor, requests),
            first(common.seq_lens, requests),
            first(common.query_start_loc, requests + 1),
            first(common.slot_mapping, rows),
        )

    @property
    def decode(self) -> bool:
        """Whether every request has one row."""
        return self.most_rows == 1

    @property
    def requests(self) -> int:
        """B."""
        return self.lengths.shape[0]


@dataclass(frozen=True)
class StepLayout:
    """How pages of P tokens lie and what rows see of them: a span a table.

    A block of vLLM is the `block_pages` pages of a layer's KV heads, one after another. With
    `virtual` pages a block number says nothing of a place: a table for each span does.
    """

    page_tokens: int
    spans: Sequence[AttentionSpan]
    block_pages: int = 1
    virtual: bool = False

    def columns(self, longest: int, most_rows: int) -> list[int]:
        """Most entries of a request in each table."""
        return [span.columns(self.page_tokens, longest, most_rows) for span in self.spans]

    def room(
        self,
        device: torch.device,
        requests: int,
        rows: int,
        columns: Sequence[int],
        more: int = 0,
    ) -> ops.StepTables:
        """Room for the tables of so many requests and rows, and `more` entries behind them."""
        return ops.StepTables.empty(
            device,
            requests=requests,
            rows=rows,
            entries=requests * sum(columns) + more,
            tables=len(self.spans) if self.virtual else None,
        )

    def fill(
        self,
        out: ops.StepTables,
        batch: StepBatch,
        columns: Sequence[int],
        places: torch.Tensor | None = None,
    ) -> ops.StepTables:
        """Writes the tables of a batch; `places` i32 [tables, pages], if pages are virtual."""
        seen = zip(self.spans, columns, strict=True)
        return ops.step_tables(
            batch.blocks,
            batch.lengths,
            batch.row_offsets,
            batch.slot_mapping,
            page_tokens=self.page_tokens,
            block_pages=self.block_pages,
            spans=[(span.window or 0, span.sink, count) for span, count in seen],
            places=places,
            out=out,
        )


class KeptTables:
    """Tables at addresses that do not change: of decode steps, which a GPU may have captured.

    `entries` i32 [N, 5]: those of requests, and from `room` on `more` that are not theirs.
    """

    def __init__(
        self,
        layout: StepLayout,
        device: torch.device,
        *,
        requests: int,
        longest: int,
        more: int = 0,
    ) -> None:
        self.layout, self.requests = layout, requests
        # The number of columns is part of what is captured.
        self.columns = layout.columns(longest, 1)
        self.room = requests * sum(self.columns)
        self._tables = layout.room(device, requests, requests, self.columns, more)
        self.entries = self._tables.entries
        self._of: dict[int, ops.StepTables] = {}

    @classmethod
    def of_engine(
        cls, layout: StepLayout, device: torch.device, config: Any, more: int = 0
    ) -> KeptTables | None:
        """For all decode steps under a `VllmConfig`, one at a time.

        None on CPUs where `more` is wanted: what lies behind entries has to follow those that
        count there, and how many do is known with each step.
        """
        if device.type == "cpu" and more:
            return None
        requests = config.scheduler_config.max_num_seqs
        longest = config.model_config.max_model_len
        return cls(layout, device, requests=requests, longest=longest, more=more)

    def room_of(self, requests: int) -> ops.StepTables:
        """The first rows of those that are kept, for the tables of a step of so many requests."""
        if requests not in self._of:
            positions, slots, rows, ends = self._tables
            tables = len(self.layout.spans) if self.layout.virtual else 1
            own = slots.view(-1, 2)[: tables * requests]
            self._of[requests] = ops.StepTables(
                positions[:requests],
                own.view(tables, requests, 2) if self.layout.virtual else own,
                rows[: requests * sum(self.columns)],
                ends[: requests * tables + 1],
            )
        return self._of[requests]

    def fill(self, batch: StepBatch) -> ops.StepTables:
        """The tables of a decode step."""
        return self.layout.fill(self.room_of(batch.requests), batch, self.columns)


def first(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The first rows; the tensor itself, which costs nothing, where it has no others."""
    return tensor if tensor.shape[0] == count else tensor[:count]
