"""Presses of kvpress over kvweave's pages; `docs/kvpress.md` says how they are used.

`PressedCache` holds what a press keeps, each head in pages of its own. It needs transformers alone;
`HeadMapPress`, a press by a `HeadClassMap`, is in `head_map_press` and needs kvpress.
"""

from kvweave.adapters.kvpress.pressed_cache import PressedCache

__all__ = ["PressedCache"]
