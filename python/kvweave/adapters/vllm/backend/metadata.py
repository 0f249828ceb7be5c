"""What the layers of a cache group read in a step: the tables, and who looks on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from vllm.v1.attention.backend import AttentionMetadata

from kvweave import ops
from kvweave.adapters.vllm.backend.dense_prefill import Runs
from kvweave.adapters.vllm.backend.step_tables import Entries, StepBatch


@dataclass
class PagedMetadata(AttentionMetadata):
    """Tables of one step: B requests, R rows (tokens that are computed), as `kvweave.ops` has them.

    `decode`: every request has one row. Rows of the batch beyond R are padding. `observer`,
    if any, is given the queries [R, H, D], keys and values [R, G, D] of a layer before they are
    written, and may say that only some of the rows are. `writes`: whether they are written, or are
    there already. `arena`: the pages of all layers, where KV is not in the tensors that vLLM
    allocated. `runs`: the same once more for a dense kernel, where rows are runs that see every key
    and such a kernel is there. `batch`: what vLLM said of the step, if that is where tables come
    from.
    """

    rows: int
    decode: bool
    positions: torch.Tensor
    row_offsets: torch.Tensor
    slots: torch.Tensor
    entries: Entries
    workspace: ops.Workspace
    observer: QkvObserver | None = None
    writes: bool = True
    arena: torch.Tensor | None = None
    runs: Runs | None = None
    batch: StepBatch | None = None


@dataclass
class RowSubset:
    """Rows of a step that are written and attend, i64 `index`, with the tables of these alone.

    `metadata`: the tables by the name of an attention layer.
    """

    index: torch.Tensor
    metadata: Mapping[str, Any]


QkvObserver: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], RowSubset | None]
