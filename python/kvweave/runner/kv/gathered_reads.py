"""What rows and probes of one request read of a layer whose tokens have been brought together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from kvweave import ops
from kvweave.runner.kv.gathered_tokens import GatheredTokens
from kvweave.runner.kv.packed_pool import SCRATCH_TOKENS
from kvweave.runner.kv.states import States, merged_states
from kvweave.runner.kv.tables import KvTable, RowTable

WORTH_GATHERING = 1 << 19
"""Rows times changes of delta between entries from which on a GPU gathers a layer first: a change
costs 4000 rows some 1.5 µs (one H200, 32 query heads), and gathering 32 768 tokens 150."""


class GatheredReads:
    """Layers of one request, gathered when they are read; `of` says how its tokens [a, b) are."""

    def __init__(self, of: Callable[[int, int], GatheredTokens]) -> None:
        self._of = of
        self._known: dict[tuple[int, int], GatheredTokens] = {}
        self._kept: tuple[int, int, torch.Tensor] | None = None
        # Bytes of the pages that were gathered at once, at most.
        self.most_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that are kept."""
        return 0 if self._kept is None else self._kept[2].nbytes

    def forget(self) -> None:
        """Has tokens looked up anew, for some lie elsewhere or nobody reads them now."""
        self._known, self._kept = {}, None

    def written(self) -> None:
        """Has layers gathered anew: rows were written."""
        self._kept = None

    def layer(
        self, layer: int, first: int, end: int, rope: ops.RopeTable
    ) -> tuple[GatheredTokens, torch.Tensor]:
        """The tokens [first, end) of a layer, and the pages that they have been brought to.

        Those of a layer from its first token on are kept for probes that follow its attention.
        """
        if (first, end) not in self._known:
            self._known[first, end] = self._of(first, end)
        tokens = self._known[first, end]
        if self._kept is not None and not first and self._kept[:2] == (layer, end):
            return tokens, self._kept[2]
        # The layer before is given back first.
        self._kept = None
        pages = tokens.gathered(layer, rope)
        self.most_bytes = max(self.most_bytes, pages.nbytes)
        if not first:
            self._kept = layer, end, pages
        return tokens, pages

    def attend(self, layer: int, q: torch.Tensor, rows: RowTable, kv: ops.PagedKv) -> States:
        """Attention and lse of rows q [R, H, D], `SCRATCH_TOKENS` brought together at once.

        `kv`: how the rows read the layer, of other pages.
        """
        length, found = int(rows.rows[-1]) + 1, []
        for first in range(0, length, SCRATCH_TOKENS):
            end = min(first + SCRATCH_TOKENS, length)
            tokens, pages = self.layer(layer, first, end, kv.rope)
            found.append(
                ops.attend_prefill(
                    q,
                    rows.positions,
                    tokens.table.entries,
                    replace(kv, cache=pages),
                    row_offsets=rows.offsets,
                    entry_offsets=tokens.table.offsets,
                )
            )
        return found[0] if len(found) == 1 else merged_states(*found)


def is_worth_gathering(table: KvTable, rows: int, device: torch.device) -> bool:
    """Whether so many rows read what a table lists sooner when it is gathered."""
    return device.type == "cuda" and table.turns * rows >= WORTH_GATHERING
