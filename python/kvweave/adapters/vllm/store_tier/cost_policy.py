"""`CostAware`: what leaves vLLM's host memory first, in the order that our caches and stores have.

vLLM loads it by name, as `eviction_policy` with `cache_policy_module_path`. A chunk's rank is what
it costs to compute for each of its bytes, times how likely it is to be used again, above the rank
of what had to go last; the core ranks. Of one text a tail goes before what it stands behind: a
chunk is found only where all before it are.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from kvweave._native import CostOrder
from kvweave.adapters.vllm.store_tier.chains import Chains
from kvweave.adapters.vllm.store_tier.settings import ChunkCost

_Entry = tuple[tuple[int, int], OffloadKey]
_FEW = 64


class CostAware(CachePolicy):
    """vLLM's cache policy for so many chunks, all of one size.

    What a chunk costs is what a `StoreTier` behind the host's memory says with each request
    (`ChunkCost`); without one all cost the same. Those that had to go lately are remembered, as
    many as there is room for: one that comes again was used before.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._begin()

    def _begin(self) -> None:
        self._order, self._chains = CostOrder(), Chains()
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._gone: OrderedDict[OffloadKey, None] = OrderedDict()
        # What nobody copies. Each of them that nothing stands behind has an entry in the heap by
        # its rank of now; other entries are void, and left there until they come up.
        self._free: set[OffloadKey] = set()
        self._heap: list[_Entry] = []

    # ---- what is there ---------------------------------------------------------------------------

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """A chunk that is there, or on its way."""
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext) -> None:
        """A chunk is about to be copied here, for a request."""
        cost = req_context.get_state(ChunkCost)
        end = req_context.get_offload_key_position(key)
        again = key in self._gone
        self._gone.pop(key, None)
        self._chunks[key] = chunk
        self._order.enter(bytes(key), 1 if cost is None else cost.density(end), again=again)
        self._chains.add(key, req_context)
        if chunk.ref_cnt == 0:
            self.mark_evictable(key)

    def remove(self, key: OffloadKey) -> None:
        """A chunk did not come after all."""
        self._order.withdraw(bytes(key))
        self._drop(key)

    def clear(self) -> None:
        """Nothing is there, and nothing is remembered."""
        self._begin()

    def mark_evictable(self, key: OffloadKey) -> None:
        """Nobody copies a chunk any more."""
        self._free.add(key)
        self._enter(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """Somebody copies a chunk."""
        self._free.discard(key)

    # ---- what is used ----------------------------------------------------------------------------

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Chunks are used, in the order of a text; those on their way are not used again."""
        for key in reversed(list(keys)):
            chunk = self._chunks.get(key)
            if chunk is not None and chunk.is_ready:
                self._order.note_used(bytes(key))
                if key in self._free:
                    self._enter(key)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """What is remembered of chunks counts when they come."""

    def on_request_access(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """A request names chunks for the first time, there or not."""
        self._chains.follow(keys, req_context)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """A request has used each chunk once that it did not bring itself."""
        for keys in key_groups:
            self.touch([key for key in keys if key in reused_keys], req_context)

    # ---- what goes -------------------------------------------------------------------------------

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Gives up n chunks that nobody copies, none of `protected`; None, and nothing, if fewer.

        Where all that is left has something behind it that stays, the order alone says what goes.
        """
        chosen, passed = self._ends(n, protected)
        if len(chosen) < n:
            chosen += self._others(n - len(chosen), protected, chosen)
        done = len(chosen) == n
        given = [(key, self._chunks[key]) for key in chosen] if done else None
        for key in chosen if done else ():
            self._order.note_gone(bytes(key))
            self._drop(key)
            self._gone[key] = None
        while len(self._gone) > self.cache_capacity:
            self._gone.popitem(last=False)
        for key in passed if done else passed + chosen:
            self._enter(key)
        return given

    def _ends(
        self, n: int, protected: Collection[OffloadKey]
    ) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Up to n chunks that go, with nothing behind them but what goes too; and those kept."""
        chosen: dict[OffloadKey, None] = {}
        passed: dict[OffloadKey, None] = {}
        going: Counter[OffloadKey] = Counter()
        while self._heap and len(chosen) < n:
            entry = heapq.heappop(self._heap)
            key = entry[1]
            ends = key in self._free and self._chains.behind(key) == going[key]
            if not ends or key in chosen or key in passed or entry[0] != self._rank(key):
                continue
            if key in protected:
                passed[key] = None
                continue
            chosen[key] = None
            before = self._chains.before(key)
            if before is not None:
                going[before] += 1
                if before in self._free:
                    heapq.heappush(self._heap, (self._rank(before), before))
        return list(chosen), list(passed)

    def _others(
        self, n: int, protected: Collection[OffloadKey], chosen: Collection[OffloadKey]
    ) -> list[OffloadKey]:
        left = self._free.difference(protected, chosen)
        return heapq.nsmallest(n, left, key=self._rank)

    def _drop(self, key: OffloadKey) -> None:
        del self._chunks[key]
        self._free.discard(key)
        before = self._chains.drop(key)
        if before in self._free:
            self._enter(before)

    def _enter(self, key: OffloadKey) -> None:
        """Has a chunk in the heap that nobody copies, if nothing stands behind it."""
        if self._chains.behind(key):
            return
        heapq.heappush(self._heap, (self._rank(key), key))
        if len(self._heap) > _FEW + 2 * len(self._free):
            ends = [free for free in self._free if not self._chains.behind(free)]
            self._heap = [(self._rank(end), end) for end in ends]
            heapq.heapify(self._heap)

    def _rank(self, key: OffloadKey) -> tuple[int, int]:
        return self._order.rank(bytes(key))
