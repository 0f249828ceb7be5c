"""Progress bars on long work, when a person is watching."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def track(items: Sequence[T], what: str, shown: bool) -> Iterable[T]:
    """Iterates with a progress bar on standard error, if wanted and that is a terminal."""
    if not shown or len(items) < 2 or not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track as bar

    return bar(items, description=what, console=Console(stderr=True), transient=True)
