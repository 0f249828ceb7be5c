"""The argument that a forward takes its cache by: `cache` since transformers 5.24."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

CACHE_NAMES = ("cache", "past_key_values")
"""The name of now and the one of before, which transformers renames to it."""


def cache_argument(forward: Any) -> str:
    """The name by which a forward takes its cache; empty for one that takes none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), "")


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a forward, by either name; None without one."""
    return next((arguments[name] for name in CACHE_NAMES if name in arguments), None)
