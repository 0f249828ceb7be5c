"""What no runner can be asked for."""

from __future__ import annotations

from kvweave.arguments import shown, whole
from kvweave.cache import HeadClassMap
from kvweave.errors import InvalidArgument


def check_settings(page_tokens: int, chunk_tokens: int | None, mode: str, heads: object) -> None:
    """Raises `InvalidArgument` for numbers, a mode or heads that are none."""
    whole("page_tokens", page_tokens)
    if chunk_tokens is not None:
        whole("chunk_tokens", chunk_tokens, 1)
    if mode not in ("materialise", "share"):
        raise InvalidArgument(f"mode: expected materialise or share, got {shown(mode)}")
    if heads is not None and not isinstance(heads, HeadClassMap):
        raise InvalidArgument(f"heads: expected a HeadClassMap or None, got {shown(heads)}")
