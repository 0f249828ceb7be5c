"""Attention of models that reuse segments: our backend, and blocks that guard exact prefixes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from kvweave.adapters.vllm.backend.decoder_layers import attention_of_layers, require_whole_context
from kvweave.adapters.vllm.backend.paged_backend import PagedBackend
from kvweave.adapters.vllm.options import Options
from kvweave.adapters.vllm.segments.prefix_guard import ExactPrefixSpec
from kvweave.adapters.vllm.segments.rotation import frequencies
from kvweave.adapters.vllm.segments.store import Geometry, SegmentStore


class SegmentAttention(Attention):
    """A decoder layer's attention; all of a model share one store."""

    store: SegmentStore

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        """Blocks that enter vLLM's prefix cache only where their KV is exact."""
        stock: Any = super().get_kv_cache_spec(vllm_config)
        return ExactPrefixSpec(**{f.name: getattr(stock, f.name) for f in fields(stock) if f.init})


def guard_model(model: nn.Module, options: Options, config: VllmConfig) -> SegmentStore:
    """Replaces the attention of every decoder layer and makes the store beside the weights.

    The arena is taken before vLLM measures what is left for its own cache.

    Errors: `Unsupported` for layers with a window, or frequencies that are not fixed.
    """
    layers: list[SegmentAttention] = []
    for module, stock in attention_of_layers(model, config):
        require_whole_context("segments", stock)
        made = SegmentAttention(
            stock.num_heads,
            stock.head_size,
            stock.impl.scale,
            num_kv_heads=stock.num_kv_heads,
            cache_config=config.cache_config,
            prefix=stock.layer_name,
            attn_backend=PagedBackend,
        )
        layers.append(made)
        module.attn = made
    first = layers[0]
    geometry = Geometry(
        len(layers),
        first.num_kv_heads,
        first.head_size,
        first.kv_cache_torch_dtype,
        torch.empty(0).device,
        frequencies(config.model_config.hf_text_config),
    )
    bytes_, share = options.segment_bytes or 0, options.frozen_share
    store = SegmentStore(geometry, bytes_, share, str(config.model_config.model))
    for made in layers:
        made.store = store
    return store
