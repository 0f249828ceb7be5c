"""`SegmentCopies`: the text of a request in segments that are packed finally, one behind the other.

A request's pages are packed at once, as those of all text. Every so many tokens have been packed
the segment that they are is packed once more behind the request, while that goes on (MosaicKV,
sections 5.2 and 5.4, where a segment is 64K tokens). What is behind the last whole segment stays as
it was packed first.
"""

from __future__ import annotations

import numpy as np
import torch

from kvweave.cache import KvRequest
from kvweave.packed_page import PAGE_TOKENS
from kvweave.runner.kv.tables import Int32
from kvweave.runner.report import PackingReport
from kvweave.runner.tiers.final_packing import FinalPacking, TextCopy


class SegmentCopies:
    """Is told of the pages that a request packs itself, from its first `tokens` tokens on.

    `request`: that of the packed blocks. `reports`: where what becomes of each segment is told.
    """

    def __init__(
        self,
        of: FinalPacking,
        request: KvRequest,
        tokens: int,
        segment_tokens: int,
        reports: list[PackingReport],
    ) -> None:
        self._of, self._request, self._reports = of, request, reports
        # Tokens of the text whose pages are packed.
        self._done = tokens
        self._pages = segment_tokens // PAGE_TOKENS
        self._copy: TextCopy | None = None
        self._blocks: list[Int32] = []
        # Pages of the segment under way that are still to come.
        self._left = self._pages

    def add(self, exact: torch.Tensor, packs: Int32, left_out: int) -> None:
        """As `PageCopy.add`; each segment that is full is packed finally."""
        while len(packs):
            some, packs = packs[: self._left], packs[self._left :]
            self._take(exact, some, left_out)
            self._done += PAGE_TOKENS * len(some)
            self._left -= len(some)
            left_out = 0
            if not self._left:
                self._finish()

    def add_queries(self, q: torch.Tensor, first: int, kv_heads: int) -> None:
        """As `PageCopy.add_queries`, of the segment that the next pages are of."""
        self._begun().add_queries(q, first, kv_heads)

    def drop(self) -> None:
        """Forgets the segment under way."""
        if self._copy is not None and self._copy.size:
            self._copy.end("the text ended before it was full")

    def _begun(self) -> TextCopy:
        """The segment under way."""
        if self._copy is None:
            report = self._of.report_of(self._pages * PAGE_TOKENS)
            self._copy = TextCopy(self._of, report, 0)
            self._reports.append(report)
        return self._copy

    def _take(self, exact: torch.Tensor, packs: Int32, left_out: int) -> None:
        copy = self._begun()
        if copy.report.why or not copy.grow(len(packs) * self._of.block_bytes):
            return
        self._blocks.append(packs[:, 0])
        copy.add(exact, packs, left_out)

    def _finish(self) -> None:
        """Has the segment packed finally; a next one begins with the next page."""
        copy, blocks = self._copy, self._blocks
        self._copy, self._blocks, self._left = None, [], self._pages
        if copy is not None and copy.size:
            held = self._request.fork()
            held.truncate(self._done)
            copy.finish_blocks(held, np.concatenate(blocks))
