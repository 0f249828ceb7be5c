"""`DocumentKv`: the KV of a prompt that reads packed documents, while it is prefilled."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvweave import ops
from kvweave.cache import KvRequest
from kvweave.errors import Unsupported
from kvweave.ops import Reach
from kvweave.plan import Rows
from kvweave.runner.kv.gathered_tokens import GatheredTokens
from kvweave.runner.kv.heads import HeadReads
from kvweave.runner.kv.packed_documents import DraftedDocuments, PackedDocuments
from kvweave.runner.kv.packed_pool import RECENT_TOKENS
from kvweave.runner.kv.packed_prefix import PackedPrefix
from kvweave.runner.kv.request_kv import LayerLook, RequestKv
from kvweave.runner.kv.tables import Int32
from kvweave.runner.model.rope import PositionTable


class DocumentKv(RequestKv):
    """Tables of one request whose rows are written aside, and read documents where they lie.

    Its own exact pages, of sink and newest tokens, are those of decode steps: they are filled when
    the prompt is done.
    """

    def __init__(
        self,
        heads: HeadReads,
        pages: torch.Tensor,
        request: KvRequest,
        positions: PositionTable,
        rotates: bool,
        documents: PackedDocuments,
    ) -> None:
        super().__init__(heads, pages, request, positions, rotates, documents)
        self.documents = documents

    def begin(self) -> None:
        """Has the prompt's own text lie aside: nothing before its end is computed elsewhere.

        With it go the first tokens of documents that are exact.

        # Errors
        `PoolFull` without room.
        """
        self.request.advance(self.request.length, self.request.length)
        self.own(self.documents.fresh, None)
        self.documents.keep_firsts(self.positions.rope)

    def _slots(self, rows: Rows, local_rows: Rows | None) -> Int32:
        # How far rows have moved is measured before they are written.
        self.own(rows, None)
        return self.documents.aside[rows, :2]

    def own(self, rows: Rows, local_rows: Rows | None) -> None:
        """Has rows that will be written to lie aside, as they were reused.

        # Errors
        `PoolFull` without room.
        """
        if self._rows is not None and self._rows.same(rows, local_rows):
            return
        if self.documents.keep(rows, self.positions.rope):
            self.gathered.forget()

    def advance(self, start: int, end: int) -> None:
        """Behind the last row, fills what decode steps read exactly."""
        if start == self.request.length:
            self.documents.settle(self.request, self.positions.rope)

    def commit(self, computed: int, exact: int) -> None:
        """Nothing: see `PackedDocuments.commit`."""

    def reach(self, layer: int) -> Reach | None:
        """None: rows are written for all heads alike."""
        return None

    def paged(self, layer: int) -> ops.PagedKv:
        """A layer as rows read it: heads with windows what lies in these."""
        reach = self.documents.pool.heads.windows(layer)
        return replace(super().paged(layer), reach=reach)

    def whole_reach(self, layer: int) -> Reach | None:
        """None, as `reach`."""
        return None

    def look(self, layer: int) -> LayerLook:
        """A layer as probes see it: all of it in pages of its own."""
        rope = self.positions.rope
        tokens, pages = self.gathered.layer(layer, 0, self.request.length, rope)
        paged = replace(super().paged(layer), cache=pages, window=None)
        return LayerLook(pages, paged, tokens.table, lambda _: tokens.entries)

    @property
    def keeps_drafts(self) -> bool:
        """True: a draft is shorter than what windows keep."""
        return True

    def drafted(self, tokens: int) -> tuple[KvRequest, PackedPrefix | None]:
        """A fork to draft in, whose windows are filled from what is aside now.

        # Errors
        `Unsupported` for more tokens than windows keep.
        """
        if tokens >= RECENT_TOKENS:
            raise Unsupported(
                f"draft: expected fewer than {RECENT_TOKENS} tokens beside packed documents, "
                f"got {tokens}"
            )
        self.documents.settle(self.request, self.positions.rope)
        return self.request.fork(), DraftedDocuments(self.documents)

    def forked(self, fork: KvRequest) -> RequestKv:
        """The KV of a fork that a draft was decoded in."""
        known = self.heads, self.pages, fork, self.positions, self.rotates, self.documents
        return DocumentKv(*known)

    def gathering(self, first: int, end: int) -> GatheredTokens:
        """How the tokens [first, end) of any layer are brought together."""
        return self.documents.gathering(self.request, first, end)

    def is_gathered(self, rows: int) -> bool:
        """True: documents are unpacked before they are read anyway."""
        return True
