"""Presses of kvpress over kvweave's pages; `docs/kvpress.md` says how they are used.

`PressedCache` holds what a press keeps, each head in pages of its own. It needs transformers alone.
`PagedPress` brings such pages along, and `HeadMapPress` is a press by a `HeadClassMap`: these need
kvpress, and are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvweave.adapters.kvpress.pressed_cache import PressedCache

if TYPE_CHECKING:
    from kvweave.adapters.kvpress.head_map_press import HeadMapPress
    from kvweave.adapters.kvpress.paged_press import PagedPress

_LATER = {"HeadMapPress": "head_map_press", "PagedPress": "paged_press"}

__all__ = ["HeadMapPress", "PagedPress", "PressedCache"]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "kvpress":
            raise
        raise ModuleNotFoundError(
            f"{name}: expected the package kvpress to be installed; "
            "run: pip install 'kvweave[kvpress]'",
            name=error.name,
        ) from error
