"""What each KV head of one layer keeps, in pages of its own: heads may keep unlike tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from kvweave import ops
from kvweave.adapters.kvpress.head_pools import HeadPools
from kvweave.adapters.transformers.live_rows import LiveRows
from kvweave.adapters.transformers.paged_step import Attends, PagedStep
from kvweave.adapters.transformers.ranked_rows import PageRead, RankedRows, RowReads
from kvweave.adapters.transformers.step_rows import Vectors
from kvweave.errors import Unsupported
from kvweave.plan import Rows
from kvweave.runner.kv.tables import send


class HeadPages:
    """The kept tokens of G heads, and what an answer appends to them.

    A head is a row of a batch whose model has one layer and one KV head, so that each has a table
    of its own. An answer is a fork of all rows: `back_to` the context gives back what it wrote.
    `pools`: where heads that keep so many tokens each have their pages. Packed are all of a head's
    tokens but the first and the newest; these and the answer are exact, side by side.
    """

    def __init__(self, pools: Callable[[Sequence[int]], HeadPools]) -> None:
        self._pools = pools
        self._of: HeadPools | None = None
        self._context: LiveRows | None = None
        self._answer: LiveRows | None = None
        self._ranked: RankedRows | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each head."""
        return self._with_packed(self._answer or self._context)

    @property
    def bound_bytes(self) -> int:
        """Bytes of bounds by which decode steps choose exact pages."""
        return 0 if self._ranked is None else self._ranked.nbytes

    def keep(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        reads: Mapping[int, PageRead] | None = None,
    ) -> None:
        """Keeps keys and values [n, D] of each head, in place of all before.

        `reads`: what some heads, by their numbers, read in a decode step; the others do as the
        pools say.

        # Errors
        `PoolFull` when they do not fit; nothing is kept then.
        """
        self.release()
        pools = self._of = self._pools([len(one) for one in keys])
        self._context = LiveRows(pools.exact)
        try:
            each = _row_reads(len(keys), pools.top_k_pages, reads or {})
            if pools.packed is not None:
                keys, values = pools.packed.keep(keys, values, each)
            elif each is not None:
                self._ranked = RankedRows(pools.exact, each)
            self._write(self._context, keys, values)
        except BaseException:
            self.release()
            raise

    def _write(
        self, heads: LiveRows, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        """Writes keys and values [n, D] of each head into exact pages."""
        written = heads.begin(
            [_named(head, len(k)) for head, k in enumerate(keys)], [()] * len(keys)
        )
        slots = [row.request.slots(at) for row, at in zip(heads.rows, written, strict=True)]
        new = (torch.cat(list(vectors))[:, None].contiguous() for vectors in (keys, values))
        pages = heads.pool.pages
        ops.write_pages(pages, 0, *new, *send(pages.device, np.concatenate(slots)))

    def extend(self, vectors: Vectors, how: Attends) -> torch.Tensor:
        """Appends n tokens to every head and attends: [1, n, H, D].

        `vectors`: q [1, H, n, D], k and v [1, G, n, D].

        # Errors
        `PoolFull` when they do not fit; then the answer so far is given back.
        """
        assert self._of is not None
        assert self._context is not None
        query, key, value = (x[0] for x in vectors)
        heads, count, size = key.shape
        if self._answer is None:
            self._answer = LiveRows(self._of.exact)
            self._answer.rows = [row.fork() for row in self._context.rows]
        answer = self._answer
        try:
            written = answer.append([_named(head, count) for head in range(heads)])
            step = PagedStep(answer, written, [count] * heads, count, self._ranked)
            grouped = query.view(heads, -1, count, size)
            states = step.states(0, (grouped, key[:, None], value[:, None]), how)
            if self._of.packed is not None:
                rows = grouped.transpose(1, 2).flatten(0, 1)
                states = self._of.packed.merged(rows, how, states)
        except BaseException:
            self._drop_answer()
            raise
        out = states[0].view(heads, count, -1, size)
        return out.transpose(0, 1).reshape(1, count, len(query), size)

    def back_to(self, length: int) -> None:
        """Forgets what an answer appended, so that the longest head has so many tokens.

        # Errors
        `Unsupported` for any length but the context's, or the one that there is.
        """
        if length == max(self.lengths):
            return
        context = max(self._with_packed(self._context))
        if length != context:
            raise Unsupported(
                f"kept tokens: expected the {context} of the context, got a cut to {length}"
            )
        self._drop_answer()

    def release(self) -> None:
        """Gives all pages back."""
        self._drop_answer()
        if self._context is not None:
            self._context.release()
        if self._of is not None and self._of.packed is not None:
            self._of.packed.release()
        self._context, self._of, self._ranked = None, None, None

    def _with_packed(self, exact: LiveRows | None) -> list[int]:
        """Tokens of each head, exact and packed."""
        if exact is None:
            return []
        packed = self._of.packed if self._of is not None else None
        if packed is None:
            return exact.lengths
        return [one + other for one, other in zip(exact.lengths, packed.lengths, strict=True)]

    def _drop_answer(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.release()


def _row_reads(heads: int, pages: int | None, reads: Mapping[int, PageRead]) -> RowReads | None:
    """What each head reads; None where each reads all."""
    others = None if pages is None else PageRead(pages)
    rows = tuple(reads.get(head, others) for head in range(heads))
    return None if all(row is None for row in rows) else RowReads(rows)


def _named(head: int, count: int) -> Rows:
    """Token ids that tell one head's row from another's; what they are is never looked at."""
    return np.full(count, head, np.int32)
