"""Attention of models that reuse segments: our backend, and blocks that guard exact prefixes."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from kvweave.adapters.vllm.backend.decoder_layers import attention_of_layers, require_whole_context
from kvweave.adapters.vllm.backend.paged_backend import PagedBackend
from kvweave.adapters.vllm.options import Options
from kvweave.adapters.vllm.require import require
from kvweave.adapters.vllm.segments.packed_store import PackedSegmentStore, page_tokens_of
from kvweave.adapters.vllm.segments.prefix_guard import guarded
from kvweave.adapters.vllm.segments.rotation import frequencies
from kvweave.adapters.vllm.segments.store import Geometry, SegmentStore


class SegmentAttention(Attention):
    """A decoder layer's attention whose heads all keep and read everything."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        """Blocks that enter vLLM's prefix cache only where their KV is exact."""
        return guarded(super().get_kv_cache_spec(vllm_config))


def guard_model(model: nn.Module, config: VllmConfig) -> None:
    """Replaces the attention of every decoder layer of a model without a head map.

    Errors: `Unsupported` for layers with a window.
    """
    for module, stock in attention_of_layers(model, config):
        require_whole_context("segments", stock)
        module.attn = SegmentAttention(
            stock.num_heads,
            stock.head_size,
            stock.impl.scale,
            num_kv_heads=stock.num_kv_heads,
            cache_config=config.cache_config,
            prefix=stock.layer_name,
            attn_backend=PagedBackend,
        )


def give_store(options: Options, config: VllmConfig) -> SegmentStore:
    """Makes the store beside the weights, and gives it to all attention layers as `store`.

    The arena is taken before vLLM measures what is left for its own cache.

    Errors: `Unsupported` for frequencies that are not fixed, and as `packed_tokens` and
    `PackedSegmentStore`.
    """
    known = config.compilation_config.static_forward_context
    layers: list[Any] = [layer for layer in known.values() if isinstance(layer, Attention)]
    first, model = layers[0], config.model_config
    geometry = Geometry(
        model.hf_text_config.num_hidden_layers,
        first.impl.layer_heads,
        first.head_size,
        first.kv_cache_torch_dtype,
        torch.empty(0).device,
        frequencies(model.hf_text_config),
    )
    bytes_, share = options.segment_bytes or 0, options.frozen_share
    named = named_under(str(model.model), options)
    if options.segment_dtype is None:
        store = SegmentStore(geometry, bytes_, share, named)
    else:
        size = packed_tokens([layer.get_kv_cache_spec(config) for layer in layers])
        kind, others = options.segment_dtype, options.store is not None
        packed = kind, size, others, options.exact_first
        store = PackedSegmentStore(geometry, bytes_, share, named, *packed)
    for layer in layers:
        layer.store = store
    return store


def packed_tokens(specs: list[Any]) -> int:
    """Tokens of a page that is packed from blocks of all of these cache specs.

    Errors: `Unsupported` for blocks that make no page, and for a window that is shorter than one:
    a page's first tokens would be gone before its last are there.
    """
    size = page_tokens_of(math.lcm(*(spec.block_size for spec in specs)))
    windows = [spec.sliding_window for spec in specs if spec.sliding_window is not None]
    least = min(windows, default=size)
    expected = f"windows of at least {size} tokens, as a packed page has"
    require("heads", least >= size, expected, f"one of {least}")
    return size


def named_under(model: str, options: Options) -> str:
    """A model's name with its head map's.

    Under another map heads lie in another order, and their keys and values are others.
    """
    if options.heads is None:
        return model
    return f"{model} under {hashlib.sha256(options.heads.read_bytes()).hexdigest()}"
