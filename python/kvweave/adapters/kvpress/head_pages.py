"""What each KV head of one layer keeps, in pages of its own: heads may keep unlike tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvweave import ops
from kvweave.adapters.transformers.live_rows import LiveRows
from kvweave.adapters.transformers.page_pool import PagePool
from kvweave.adapters.transformers.paged_step import Attends, PagedStep, Vectors
from kvweave.errors import Unsupported
from kvweave.plan import Rows
from kvweave.runner.kv.tables import send


class HeadPages:
    """The kept tokens of G heads, and what an answer appends to them.

    A head is a row of a batch whose model has one layer and one KV head, so that each has a table
    of its own. An answer is a fork of all rows: `back_to` the context gives back what it wrote.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._context = LiveRows(pool)
        self._answer: LiveRows | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each head."""
        return (self._answer or self._context).lengths

    def keep(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Keeps keys and values [n, D] of each head, in place of all before.

        # Errors
        `PoolFull` when they do not fit; nothing is kept then.
        """
        self.release()
        heads = self._context
        written = heads.begin(
            [_named(head, len(k)) for head, k in enumerate(keys)], [()] * len(keys)
        )
        slots = [row.request.slots(at) for row, at in zip(heads.rows, written, strict=True)]
        new = (torch.cat(list(vectors))[:, None].contiguous() for vectors in (keys, values))
        pages = self._pool.pages
        ops.write_pages(pages, 0, *new, *send(pages.device, np.concatenate(slots)))

    def extend(self, vectors: Vectors, how: Attends) -> torch.Tensor:
        """Appends n tokens to every head and attends: [1, n, H, D].

        `vectors`: q [1, H, n, D], k and v [1, G, n, D].

        # Errors
        `PoolFull` when they do not fit; then the answer so far is given back.
        """
        query, key, value = (x[0] for x in vectors)
        heads, count, size = key.shape
        if self._answer is None:
            self._answer = LiveRows(self._pool)
            self._answer.rows = [row.fork() for row in self._context.rows]
        answer = self._answer
        try:
            written = answer.append([_named(head, count) for head in range(heads)])
            step = PagedStep(answer, written, [count] * heads, count)
            grouped = query.view(heads, -1, count, size)
            out = step.attend(0, (grouped, key[:, None], value[:, None]), how)
        except BaseException:
            self._drop_answer()
            raise
        return out.transpose(0, 1).reshape(1, count, len(query), size)

    def back_to(self, length: int) -> None:
        """Forgets what an answer appended, so that the longest head has so many tokens.

        # Errors
        `Unsupported` for any length but the context's, or the one that there is.
        """
        if length == max(self.lengths):
            return
        if length != max(self._context.lengths):
            raise Unsupported(
                f"kept tokens: expected the {max(self._context.lengths)} of the context, "
                f"got a cut to {length}"
            )
        self._drop_answer()

    def release(self) -> None:
        """Gives all pages back."""
        self._drop_answer()
        self._context.release()

    def _drop_answer(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.release()


def _named(head: int, count: int) -> Rows:
    """Token ids that tell one head's row from another's; what they are is never looked at."""
    return np.full(count, head, np.int32)
