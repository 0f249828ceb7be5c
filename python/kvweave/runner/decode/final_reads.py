"""What decode steps read of texts that are packed by strategies of their own, format by format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from kvweave import ops
from kvweave.ops import RopeTable, Table, Workspace
from kvweave.runner.kv.final_texts import FinalEntries, FinalText, FormatPages
from kvweave.runner.kv.states import States
from kvweave.runner.kv.tables import send
from kvweave.runner.model.layer_spec import LayerSpec


@dataclass(frozen=True, eq=False)
class FinalRead:
    """What a batch reads of the pages of one format of one `text`.

    `entries` i32 [N, 5] of its blocks, `offsets` i32 [2 B + 1]: of two tables a request, of which
    the second is empty and read by heads that have other formats.
    """

    text: FinalText
    pages: FormatPages
    entries: Table
    offsets: Table


def final_reads(
    listed: Sequence[Sequence[FinalEntries]], device: torch.device
) -> Sequence[FinalRead]:
    """What the requests of a batch read: `listed` of each are the texts and its entries of them.

    Formats that only heads with windows have are read by none.
    """
    reads = []
    for text in dict.fromkeys(text for text, _ in chain.from_iterable(listed)):
        of_each = [[entries for of, entries in some if of is text] for some in listed]
        counts = [sum(map(len, entries)) for entries in of_each]
        entries = np.concatenate(list(chain.from_iterable(of_each)))
        ends = np.repeat(np.cumsum([0, *counts], dtype=np.int32), 2)[1:]
        for part in text.parts:
            if not any(part.reaches) and not any(part.choosing):
                continue
            own = entries.copy()
            own[:, 0] = part.blocks(entries[:, 0])
            reads.append(FinalRead(text, part, *send(device, own, ends)))
    return reads


def final_states(
    reads: Sequence[FinalRead],
    layer: int,
    of: LayerSpec,
    rope: RopeTable,
    rows: tuple[torch.Tensor, Table],
    workspace: Workspace | None,
) -> list[States]:
    """Attention and lse of queries [B, H, D] and their positions over them, each apart.

    Of heads that read all: those that choose see nothing here.
    """
    states = []
    for read in reads:
        reach = read.pages.reaches[layer]
        if reach is None:
            continue
        # Which page of a block a head reads says the reach, whatever layer that is of.
        heads = len(reach.heads)
        kv = ops.PackedKv(read.pages.pages, 0, heads, of.scale, rope, None, of.softcap, reach)
        known: dict[str, Any] = {"entry_offsets": read.offsets, "workspace": workspace}
        states.append(ops.attend_packed(*rows, read.entries, kv, **known))
    return states
