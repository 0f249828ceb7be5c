"""What no runner can be asked for."""

from __future__ import annotations

from kvweave.arguments import shown, whole
from kvweave.cache import HeadClassMap
from kvweave.errors import InvalidArgument


def check_settings(
    page_tokens: int, chunk_tokens: int | None, mode: str, heads: object, bounds_dtype: object
) -> None:
    """Raises `InvalidArgument` for numbers, a mode, heads or a dtype of bounds that are none."""
    whole("page_tokens", page_tokens)
    if chunk_tokens is not None:
        whole("chunk_tokens", chunk_tokens, 1)
    if mode not in ("materialise", "share"):
        raise InvalidArgument(f"mode: expected materialise or share, got {shown(mode)}")
    if heads is not None and not isinstance(heads, HeadClassMap):
        raise InvalidArgument(f"heads: expected a HeadClassMap or None, got {shown(heads)}")
    if bounds_dtype not in (None, "fp8"):
        raise InvalidArgument(f"bounds_dtype: expected fp8 or None, got {shown(bounds_dtype)}")
