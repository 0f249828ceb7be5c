"""The rows of the batch that a model is generating for: a request of the cache for each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from kvweave.adapters.transformers.packed_plan import plan_beside_packed
from kvweave.adapters.transformers.page_pool import Marks, PagePool
from kvweave.cache import KvRequest, ReusePlan
from kvweave.errors import InvalidArgument, KvweaveError
from kvweave.plan import Rows
from kvweave.runner.kv.packed_prefix import PackedPrefix

_AT_ONCE = 64
"""Tokens beside packed pages that are appended at once: windows move on before there are more."""


class LiveRow:
    """One text: its request, and of how many of its tokens the KV is there.

    `exact`: leading tokens whose KV is that of a full prefill, None for all. `packed`: its packed
    pages, where the pool has any; the request has the first and the newest tokens then. `reused`:
    leading tokens of its prompt that were there before. `before`: while tokens are being computed
    behind packed ones, the request as it was before they came, if it was.
    """

    before: KvRequest | None = None

    def __init__(
        self,
        request: KvRequest,
        exact: int | None,
        packed: PackedPrefix | None = None,
        reused: int = 0,
    ) -> None:
        self.request = request
        self.exact = exact
        self.packed = packed
        self.reused = reused
        self.computed = 0

    @property
    def plan(self) -> ReusePlan:
        """What was reused of its prompt."""
        plan = self.request.plan
        return plan if self.packed is None else plan_beside_packed(plan, self.reused)

    def fork(self) -> LiveRow:
        """The same text once more: its blocks are shared until either is written to."""
        packed = None if self.packed is None else self.packed.fork()
        try:
            fork = LiveRow(self.request.fork(), self.exact, packed, self.reused)
        except BaseException:
            if packed is not None:
                packed.release()
            raise
        fork.computed = self.computed
        return fork

    def read_in_part(self) -> None:
        """Says that its next token is computed over a part of what there is."""
        if self.packed is not None:
            self.packed.read_in_part(self.request.length)
        elif self.exact is None:
            self.exact = self.request.length

    def done(self) -> None:
        """Says that all of its tokens have KV."""
        self.computed = self.request.length
        self._forget_before()

    def release(self) -> None:
        """Gives all blocks back."""
        self._forget_before()
        self.request.release()
        if self.packed is not None:
            self.packed.release()

    def _forget_before(self) -> None:
        before, self.before = self.before, None
        if before is not None:
            before.release()

    def commit(self) -> None:
        """Lets later prompts find what has KV."""
        if self.packed is not None:
            self.packed.commit_text(self.request, self.computed)
            return
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
        return [row.plan for row in self.rows]

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
                    made = self.pool.admit(tokens, spans)
                    found = [s.start for s in made.request.plan.spans if s.kind == "segment"]
                    exact, reused = min(found) if found else None, len(tokens) - len(made.rows)
                    known[name] = LiveRow(made.request, exact, made.packed, reused)
                    chosen.append(made.rows)
                self.rows.append(known[name])
        except BaseException:
            for row in known.values():
                row.release()
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
                if not exact:
                    row.read_in_part()
                if row.packed is not None:
                    # Before windows move on behind a page that is full.
                    row.packed.pack(row.request, row.computed)
            requests = [row.request for row in self.rows]
            ends = [request.length for request in requests]
            if all(len(new) == 1 for new in tokens):
                self.pool.cache.append_step(requests, np.concatenate(tokens))
            elif self.pool.packed is not None:
                self._append_many(tokens)
            else:
                for request, new in zip(requests, tokens, strict=True):
                    request.append(new)
            positions = []
            for request, end, new in zip(requests, ends, tokens, strict=True):
                self.pool.copy(request)
                positions.append(np.arange(end, end + len(new), dtype=np.int32))
                if self.pool.packed is None:
                    request.make_writable(positions[-1])
                    self.pool.copy(request)
        except BaseException:
            self.release()
            raise
        return positions

    def _append_many(self, tokens: Sequence[Rows]) -> None:
        """Appends beside packed pages, so that no more room is taken than the windows'.

        What these have let go of is read from the requests as they were before.
        """
        for row, new in zip(self.rows, tokens, strict=True):
            row.before = row.request.fork()
            for first in range(0, len(new), _AT_ONCE):
                row.request.append(new[first : first + _AT_ONCE])
                self.pool.copy(row.request)

    def done(self) -> None:
        """Says that all tokens have their KV; later prompts may find a prompt from now on.

        They find what was appended to it once its rows are given back.
        """
        for row in self._different():
            begun = row.computed == 0
            row.done()
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
                row.release()

    def release(self) -> None:
        """Gives all blocks back; what has KV stays cached for later prompts."""
        rows, self.rows = self._different(), []
        for row in rows:
            # A row whose copies were never carried out has nothing to be found.
            with suppress(KvweaveError):
                row.commit()
            row.release()

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
