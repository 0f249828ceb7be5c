"""`Chains`: which chunk of a text stands before which, as requests have named them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx


@dataclass
class _Text:
    """What a request has named: of each group of layers where chunks end, and which."""

    ends: defaultdict[int, list[tuple[int, OffloadKey]]] = field(
        default_factory=lambda: defaultdict(list)
    )


class Chains:
    """Of chunks that are there: the nearest one before each that its requests have named.

    A chunk's name stands for all of the text up to its end, so whatever stands before it is the
    same in all requests. It may be there or not.
    """

    def __init__(self) -> None:
        self._there: set[OffloadKey] = set()
        self._before: dict[OffloadKey, OffloadKey] = {}
        self._behind: Counter[OffloadKey] = Counter()

    def follow(self, keys: Iterable[OffloadKey], context: ReqContext) -> None:
        """A request names chunks; those that are there have what stands before them from now on."""
        named = list(keys)
        for key in named:
            end = context.get_offload_key_position(key)
            if end is not None:
                insort(_text(context).ends[get_offload_group_idx(key)], (end, key))
        for key in named:
            if key in self._there:
                self._link(key, context)

    def add(self, key: OffloadKey, context: ReqContext) -> None:
        """A chunk is there, which a request has named."""
        self._there.add(key)
        self._link(key, context)

    def drop(self, key: OffloadKey) -> OffloadKey | None:
        """A chunk is there no more; what stood before it."""
        self._there.discard(key)
        before = self._before.pop(key, None)
        if before is not None:
            self._behind[before] -= 1
            if not self._behind[before]:
                del self._behind[before]
        return before

    def before(self, key: OffloadKey) -> OffloadKey | None:
        """What stands before a chunk that is there."""
        return self._before.get(key)

    def behind(self, key: OffloadKey) -> int:
        """How many of those that are there stand behind a chunk, next to it."""
        return self._behind[key]

    def _link(self, key: OffloadKey, context: ReqContext) -> None:
        end = context.get_offload_key_position(key)
        if end is None or key in self._before:
            return
        ends = _text(context).ends[get_offload_group_idx(key)]
        at = bisect_left(ends, end, key=lambda named: named[0])
        if at:
            before = self._before[key] = ends[at - 1][1]
            self._behind[before] += 1


def _text(context: ReqContext) -> _Text:
    text: _Text | None = context.get_state(_Text)
    if text is None:
        text = _Text()
        context.set_state(text)
    return text
