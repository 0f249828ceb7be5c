"""The rows of the batch that a model is generating for: a request of the cache for each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from kvweave.adapters.transformers.page_pool import Marks, PagePool
from kvweave.cache import KvRequest, ReusePlan
from kvweave.errors import InvalidArgument, KvweaveError
from kvweave.plan import Rows


class LiveRow:
    """One text: its request, and of how many of its tokens the KV is there.

    `exact`: leading tokens whose KV is that of a full prefill, None for all.
    """

    def __init__(self, request: KvRequest, exact: int | None) -> None:
        self.request = request
        self.exact = exact
        self.computed = 0

    def fork(self) -> LiveRow:
        """The same text once more: its blocks are shared until either is written to."""
        fork = LiveRow(self.request.fork(), self.exact)
        fork.computed = self.computed
        return fork

    def commit(self) -> None:
        """Lets later prompts find what has KV."""
        exact = self.computed if self.exact is None else min(self.exact, self.computed)
        self.request.commit(self.computed, exact)


class LiveRows:
    """The rows of one batch, in its order; rows that are the same text share one `LiveRow`.

    Such rows part when they are appended to. So `num_return_sequences` and beams hold their prompt
    once.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.rows: list[LiveRow] = []

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [row.request.length for row in self.rows]

    @property
    def plans(self) -> list[ReusePlan]:
        """What was reused of the prompt of each row, and why not the rest."""
        return [row.request.plan for row in self.rows]

    def begin(self, prompts: Sequence[Rows], marks: Sequence[Marks]) -> list[Rows]:
        """Admits prompts in place of the rows before; the positions to be computed of each row.

        Of rows that are the same text the first one's are computed, and none of the others'.

        # Errors
        `PoolFull` when they do not fit, whatever the cache refuses; no row is live then.
        """
        self.release()
        known: dict[tuple[bytes, Marks], LiveRow] = {}
        chosen: list[Rows] = []
        try:
            for tokens, spans in zip(prompts, marks, strict=True):
                name = tokens.tobytes(), tuple(spans)
                if name in known:
                    chosen.append(np.zeros(0, np.int32))
                else:
                    request, rows = self.pool.admit(tokens, spans)
                    found = [s.start for s in request.plan.spans if s.kind == "segment"]
                    known[name] = LiveRow(request, min(found) if found else None)
                    chosen.append(rows)
                self.rows.append(known[name])
        except BaseException:
            for row in known.values():
                row.request.release()
            self.rows = []
            raise
        return chosen

    def append(self, tokens: Sequence[Rows], *, exact: bool = True) -> list[Rows]:
        """Appends tokens to each row: their positions, all of which are to be computed.

        Where they are not `exact`, as they read few pages, no later prompt takes them for a prefix.

        # Errors
        `PoolFull` when they do not fit; no row is live then.
        """
        try:
            self._part()
            for row in self.rows:
                if not exact and row.exact is None:
                    row.exact = row.request.length
            requests = [row.request for row in self.rows]
            if all(len(new) == 1 for new in tokens):
                self.pool.cache.append_step(requests, np.concatenate(tokens))
            else:
                for request, new in zip(requests, tokens, strict=True):
                    request.append(new)
            positions = []
            for request, new in zip(requests, tokens, strict=True):
                self.pool.copy(request)
                end = request.length
                positions.append(np.arange(end - len(new), end, dtype=np.int32))
                request.make_writable(positions[-1])
                self.pool.copy(request)
        except BaseException:
            self.release()
            raise
        return positions

    def done(self) -> None:
        """Says that all tokens have their KV; later prompts may find a prompt from now on.

        They find what was appended to it once its rows are given back.
        """
        for row in self._different():
            begun = row.computed == 0
            row.computed = row.request.length
            if begun:
                row.commit()

    def select(self, index: Sequence[int]) -> None:
        """Row i becomes what row `index[i]` was; those that nobody names are given back.

        # Errors
        `InvalidArgument` for a row that is not there; nothing has changed then.
        """
        if any(not 0 <= at < len(self.rows) for at in index):
            raise InvalidArgument(
                f"rows: expected 0 <= row < {len(self.rows)}, got {list(index)[:8]}"
            )
        before, self.rows = self._different(), [self.rows[at] for at in index]
        for row in before:
            if not any(row is kept for kept in self.rows):
                row.request.release()

    def release(self) -> None:
        """Gives all blocks back; what has KV stays cached for later prompts."""
        rows, self.rows = self._different(), []
        for row in rows:
            # A row whose copies were never carried out has nothing to be found.
            with suppress(KvweaveError):
                row.commit()
            row.request.release()

    def _different(self) -> list[LiveRow]:
        """Each live row once."""
        return list({id(row): row for row in self.rows}.values())

    def _part(self) -> None:
        """Gives rows that share a text a request each."""
        seen: set[int] = set()
        for number, row in enumerate(self.rows):
            if id(row) in seen:
                self.rows[number] = row.fork()
            seen.add(id(row))
