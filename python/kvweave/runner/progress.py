"""Progress bars on long work, when a person is watching."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import TypeVar

T = TypeVar("T")


def track(items: Sequence[T], what: str, shown: bool) -> Iterable[T]:
    """Iterates with a progress bar, if wanted: in a notebook, or on a terminal's standard error."""
    if not shown or len(items) < 2:
        return items
    if in_notebook() and find_spec("tqdm") is not None:
        from tqdm.auto import tqdm

        bar: Iterable[T] = tqdm(items, desc=what, leave=False)
        return bar
    if not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track as tracked

    return tracked(items, description=what, console=Console(stderr=True), transient=True)


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook: there standard error is no terminal."""
    shell = sys.modules.get("IPython")
    running = None if shell is None else shell.get_ipython()
    return running is not None and "IPKernelApp" in running.config
