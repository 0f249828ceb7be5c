"""`BoundsPromise`: room for bounds that a request was promised when it was admitted."""

from __future__ import annotations


class BoundsPromise:
    """Room for the bounds of a request of up to so many `tokens`; it counts among others' so long.

    `others`: those that have not been released, this one from now on.
    """

    def __init__(self, tokens: int, others: set[BoundsPromise]) -> None:
        self.tokens = tokens
        self._others = others
        others.add(self)

    def release(self) -> None:
        """Needs no room any more; safe to call twice."""
        self._others.discard(self)
