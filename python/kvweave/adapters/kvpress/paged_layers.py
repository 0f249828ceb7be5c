"""Layers in pages inside a cache of transformers' own, and attention over them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from kvweave.adapters.kvpress.pressed_layer import PressedLayer, expect_plain
from kvweave.adapters.transformers.attention import NAME, STEP, register
from kvweave.adapters.transformers.cache_argument import given_cache
from kvweave.adapters.transformers.paged_step import Attends
from kvweave.adapters.transformers.step_rows import Vectors
from kvweave.errors import InvalidArgument, Unsupported


class PagedLayers:
    """What attends for the layers of one forward, all of which lie in pages."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers

    def attend(self, layer: int, vectors: Vectors, how: Attends) -> torch.Tensor:
        """Appends a layer's new tokens and attends over all: [1, n, H, D]."""
        expect_plain(how)
        pages: torch.Tensor = self._layers[layer].pages.extend(vectors, how)
        return pages


class AttendingCache:
    """Hooks by which a model attends over the pages of one cache, for as long as that lives.

    In a forward that is given the cache, the model's attention is `"kvweave"`; behind it the model
    has what it had. Forwards with other caches are not touched.
    """

    def __init__(self, model: Any, cache: Any) -> None:
        register()
        self._model, self._cache = model, weakref.ref(cache)
        self._before: str | None = None
        decoder = model.get_decoder()
        hooks = (
            decoder.register_forward_pre_hook(self._begin, with_kwargs=True),
            decoder.register_forward_hook(self._end, with_kwargs=True, always_call=True),
        )
        for hook in hooks:
            weakref.finalize(cache, hook.remove)

    def _begin(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        cache = self._cache()
        if cache is None or given_cache(kwargs) is not cache:
            return None
        if not all(isinstance(layer, PressedLayer) for layer in cache.layers):
            raise Unsupported(
                "cache: expected a context that was prefilled in one forward, in whole, got some "
                "layers whose keys are no pages"
            )
        mask = kwargs.get("attention_mask")
        if mask is not None and not bool((mask != 0).all()):
            raise InvalidArgument("attention_mask: expected no padding, got some")
        self._before = self._model.config._attn_implementation
        self._attend_by(NAME)
        return args, {**kwargs, "attention_mask": None, STEP: PagedLayers(cache.layers)}

    def _end(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        before, self._before = self._before, None
        if before is not None:
            self._attend_by(before)

    def _attend_by(self, implementation: str) -> None:
        if self._model.config._attn_implementation != implementation:
            self._model.set_attn_implementation(implementation)
