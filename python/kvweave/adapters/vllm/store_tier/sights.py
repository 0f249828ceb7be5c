"""Which chunks were offered to a tier before: admission on second sight where room is short."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

MOST = 1 << 17
"""So many of the latest are remembered, of some hundred bytes each."""


class Sights:
    """Names that were offered lately, at most `most` of them. From any thread."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._lock = threading.Lock()

    def again(self, name: Hashable) -> bool:
        """Notes that a name is offered; whether it was before."""
        with self._lock:
            seen = name in self._seen
            self._seen[name] = None
            self._seen.move_to_end(name)
            if len(self._seen) > self._most:
                self._seen.popitem(last=False)
        return seen
