"""Presses of the tests' own: hooks on a model's attention, as kvpress sets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvweave.adapters.kvpress.pressed_layer import READS
from kvweave.adapters.transformers.ranked_rows import PageRead

Dropped = Callable[[int], torch.Tensor]
"""Of a layer the tokens that each KV head is not to keep, bool [G, T]."""


@contextmanager
def hooked(model: Any, press: Callable[[Any, Any], None], cache: Any) -> Iterator[None]:
    """While entered, a press is given each layer's module and its layer of the cache."""

    def hook(module: Any, _given: Any, _named: Any, _out: Any) -> None:
        press(module, cache.layers[module.layer_idx])

    hooks = [
        layer.self_attn.register_forward_hook(hook, with_kwargs=True)
        for layer in model.model.layers
    ]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def reading(reads: Callable[[int, int], tuple[int, str] | None]) -> Callable[[Any, Any], None]:
    """As a press by a head map says what heads read, by layer and KV head, where it is asked."""

    def press(module: Any, _layer: Any) -> None:
        for head in range(module.config.num_key_value_heads):
            if (read := reads(module.layer_idx, head)) is not None:
                getattr(module, READS)[head] = PageRead(read[0], read[1] == "mean")

    return press


def masking(dropped: Dropped) -> Callable[[Any, Any], None]:
    """As AdaKV and DuoAttention do it."""

    def press(module: Any, _layer: Any) -> None:
        index = torch.nonzero(dropped(module.layer_idx)[None], as_tuple=True)
        module.masked_key_indices = index

    return press
