"""vLLM's attention layers as a step of segments needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from kvweave.adapters.vllm.backend.attention import PagedAttention, pages_of
from kvweave.adapters.vllm.backend.decoder_layers import layer_number
from kvweave.adapters.vllm.backend.metadata import QkvObserver
from kvweave.adapters.vllm.heads.worker import ClassLayer, LayerWatch


@dataclass(frozen=True)
class HeadPart:
    """KV heads of a layer that share a block table: vLLM's attention layer `name`, and its memory.

    `pages` [pages, 2, P, D] from those of these heads on, in blocks of `block_pages`. `number`: the
    class of the heads, 0 of those that keep everything; they are behind `first_head` of the layer.
    `bounds`: of the same pages, where heads choose by them.
    """

    name: str
    attends: PagedAttention
    pages: torch.Tensor
    block_pages: int
    number: int
    bounds: torch.Tensor | None

    @classmethod
    def of(cls, layer: Any) -> HeadPart:
        """Of an attention layer whose memory vLLM has allocated."""
        bounds, impl = getattr(layer, "bounds", None), layer.impl
        return cls(
            layer.layer_name,
            impl,
            pages_of(layer.kv_cache)[impl.first_page :],
            int(layer.kv_cache.shape[1]),
            int(isinstance(layer, ClassLayer) and layer.local),
            None if bounds is None else bounds.values(),
        )

    @property
    def first_head(self) -> int:
        """Heads of the layer before these."""
        return self.attends.first_head

    @property
    def kv_heads(self) -> int:
        """How many there are."""
        return self.attends.num_kv_heads

    @property
    def page_tokens(self) -> int:
        """P."""
        return int(self.pages.shape[2])

    @cached_property
    def query_heads(self) -> slice:
        """The layer's query heads that read these."""
        group = self.attends.num_heads // self.kv_heads
        return slice(self.first_head * group, (self.first_head + self.kv_heads) * group)


@dataclass(frozen=True)
class AttentionLayers:
    """Of each layer its parts; `watches`: who can be told of all of a layer's heads, if split."""

    layers: list[list[HeadPart]]
    watches: list[LayerWatch | None]

    @classmethod
    def of(cls, layers: list[list[Any]]) -> AttentionLayers:
        """Of attention layers whose memory vLLM has allocated, those of each layer of the model."""
        watches = [getattr(parts[0], "watch", None) for parts in layers]
        return cls([[HeadPart.of(part) for part in parts] for parts in layers], watches)

    @cached_property
    def parts(self) -> list[HeadPart]:
        """All parts, in the order in which they are computed."""
        return [part for layer in self.layers for part in layer]

    @cached_property
    def classes(self) -> list[HeadPart]:
        """The first part of each class."""
        found = {part.number: part for part in reversed(self.parts)}
        return [found[number] for number in sorted(found)]

    @cached_property
    def draft_tokens(self) -> int:
        """Tokens of a draft that there is room for in the null block.

        Of all classes its memory is the same: each has some of a page's slots, if pages are equal.
        """
        sizes = {part.page_tokens for part in self.classes}
        return min(sizes) // len(self.classes) if len(sizes) == 1 else 0

    def by_name(self, tables: list[Any], layer: int | None = None) -> dict[str, Any]:
        """Tables of each class, by the names of the attention layers of a layer, or of all."""
        parts = self.parts if layer is None else self.layers[layer]
        return {part.name: tables[part.number] for part in parts}

    @contextmanager
    def watched(self, layer: int, observer: QkvObserver | None) -> Iterator[bool]:
        """Has a split layer tell who looks on; whether there is such a layer."""
        watch = self.watches[layer]
        if watch is not None:
            watch.observer = observer
        try:
            yield watch is not None
        finally:
            if watch is not None:
                watch.observer = None


def layers_with_store(config: VllmConfig) -> list[list[Any]]:
    """The attention layers of each layer of a model that have a store of segments."""
    known = config.compilation_config.static_forward_context
    found: dict[int, list[Any]] = {}
    for layer in known.values():
        if isinstance(layer, Attention) and getattr(layer, "store", None) is not None:
            found.setdefault(layer_number(layer), []).append(layer)
    return [found[number] for number in sorted(found)]
