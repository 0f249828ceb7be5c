"""Where in a model measuring begins."""

from __future__ import annotations


def first_layer(depth: float, layers: int) -> int:
    """The first of so many layers behind a share `depth` of them; the last where that is all."""
    return min(int(depth * layers), layers - 1)
