"""`Document`: a text whose KV was, or would be, computed with nothing before it."""

from __future__ import annotations

from dataclasses import dataclass

from kvweave.cache import KvCache
from kvweave.runner.kv.tables import Int32


@dataclass(frozen=True, eq=False)
class Document:
    """Token ids i32 [n] of a namespace, under one set of RoPE frequencies (`regime`)."""

    tokens: Int32
    namespace: str
    regime: int

    @property
    def length(self) -> int:
        """Its tokens."""
        return len(self.tokens)

    def is_in(self, cache: KvCache) -> bool:
        """Whether a cache has all of it, as it was computed with nothing before it."""
        found = cache.match_prefix(self.tokens, self.namespace, regime=self.regime)
        return found >= self.length
