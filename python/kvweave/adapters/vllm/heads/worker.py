"""The KV heads of a layer as two cache layers of vLLM: one that keeps all, one with a window."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvweave.adapters.vllm.backend.decoder_layers import attention_of_layers, require_whole_context
from kvweave.adapters.vllm.backend.paged_backend import PagedBackend
from kvweave.adapters.vllm.heads.spec import SinkWindowSpec
from kvweave.adapters.vllm.heads.split import HeadSplit


class _Part(Attention):
    """Some of a layer's heads, in blocks of a size that makes the pages of both parts equal."""

    def __init__(self, *given: Any, split: HeadSplit, local: bool, **named: Any) -> None:
        window = {"per_layer_sliding_window": split.recent, "sink": split.sink} if local else {}
        super().__init__(*given, attn_backend=PagedBackend, **window, **named)
        self.split = split
        self.local = local

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        """What the scheduler must keep for these heads."""
        sizes = self.split.block_tokens(vllm_config.cache_config.block_size)
        common = {
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "dtype": self.kv_cache_torch_dtype,
        }
        if not self.local:
            return FullAttentionSpec(block_size=sizes[0], **common)
        window = {"sliding_window": self.split.recent, "sink": self.split.sink}
        return SinkWindowSpec(block_size=sizes[1], full_block_size=sizes[0], **common, **window)


class SplitAttention(nn.Module):
    """Replaces a layer's `Attention`: q [R, H·D], k and v [R, G·D] of one rank.

    Heads lie in the order of `HeadSplit`: the global ones, then the local ones.
    """

    def __init__(self, whole: Attention, split: HeadSplit, config: VllmConfig) -> None:
        super().__init__()
        group = whole.num_heads // whole.num_kv_heads
        self.sizes = [
            split.global_heads * whole.head_size,
            split.local_heads * whole.head_size,
        ]
        self.group = group
        parts = [
            _Part(
                heads * group,
                whole.head_size,
                whole.impl.scale,
                num_kv_heads=heads,
                cache_config=config.cache_config,
                prefix=f"{whole.layer_name}_{name}",
                split=split,
                local=name == "local",
            )
            for name, heads in (("global", split.global_heads), ("local", split.local_heads))
        ]
        self.whole, self.local = parts

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of both parts, side by side [R, H·D]."""
        queries = torch.split(q, [self.group * size for size in self.sizes], dim=-1)
        keys, values = (torch.split(x, self.sizes, dim=-1) for x in (k, v))
        parts = zip((self.whole, self.local), queries, keys, values, strict=True)
        return torch.cat([part(*given) for part, *given in parts], dim=-1)


def split_model(model: nn.Module, split: HeadSplit, config: VllmConfig) -> None:
    """Replaces the attention of every decoder layer that this rank holds.

    Errors: `Unsupported` for layers that have a window of their own.
    """
    for module, whole in attention_of_layers(model, config):
        require_whole_context("heads", whole)
        module.attn = SplitAttention(whole, split, config)
