"""`Trouble`: what went wrong with a tier while answers went on without it."""

from __future__ import annotations

import threading
import warnings

from kvweave.errors import StoreDegraded
from kvweave.runner.caller import caller_level


class Trouble:
    """Counts of what a tier could not do, by kind, and a warning (`StoreDegraded`) for the first.

    Any thread takes notes; the one that serves the caller warns, so that the warning points there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._untold: list[str] = []

    def note(self, kind: str, text: str) -> None:
        """Counts one more of a kind; the first of them is told of."""
        with self._lock:
            if kind not in self._counts:
                self._untold.append(f"{text}; later ones are counted alone, as {kind!r}")
            self._counts[kind] = self._counts.get(kind, 0) + 1

    def tell(self) -> None:
        """Warns of what nobody was told of yet."""
        with self._lock:
            untold, self._untold = self._untold, []
        for text in untold:
            warnings.warn(text, StoreDegraded, stacklevel=caller_level())

    @property
    def counts(self) -> dict[str, int]:
        """How many there were, by kind."""
        with self._lock:
            return dict(self._counts)
