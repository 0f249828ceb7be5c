"""A cache by the name that a model's forward has for it, in any version of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from kvweave.adapters.transformers.cache_argument import CACHE_NAMES, cache_argument

needs_both_names = pytest.mark.skipif(
    cache_argument(transformers.LlamaForCausalLM.forward) != "cache",
    reason="transformers below 5.24 knows no argument `cache`",
)


def by_name(model: Any, cache: Any) -> dict[str, Any]:
    """The argument by which a model, or its `generate`, is given a cache."""
    return {cache_argument(model.forward): cache}


def cache_of(out: Any) -> Any:
    """The cache in what a forward gives back. The field is looked up as it is declared: the name
    of before would be answered too, with a warning."""
    return next(out[name] for name in CACHE_NAMES if name in out)
