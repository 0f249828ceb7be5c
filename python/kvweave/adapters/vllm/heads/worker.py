"""The KV heads of all layers in two cache layers of vLLM: one that keeps all, one with a window."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvweave.adapters.vllm.backend.decoder_layers import attention_of_layers, require_whole_context
from kvweave.adapters.vllm.backend.paged_backend import PagedBackend
from kvweave.adapters.vllm.heads.spec import SinkWindowSpec
from kvweave.adapters.vllm.heads.split import ClassBlocks, HeadSplit, LayerPart

NAMES = ("global", "local")


class ClassLayer(Attention):
    """Heads of one class in one layer, in blocks that all layers' heads of the class share.

    The first such layer of a class is the cache layer that vLLM allocates, `first`; the others have
    its memory and its block table.
    """

    def __init__(
        self,
        *given: Any,
        split: HeadSplit,
        blocks: tuple[ClassBlocks, ClassBlocks],
        local: bool,
        part: LayerPart,
        first: str | None,
        **named: Any,
    ) -> None:
        window = {"per_layer_sliding_window": split.recent, "sink": split.sink} if local else {}
        super().__init__(
            *given,
            attn_backend=PagedBackend,
            kv_sharing_target_layer_name=first,
            **window,
            **named,
        )
        self.split = split
        self.blocks = blocks
        self.local = local
        impl: Any = self.impl
        impl.own_pages_of(blocks[local].pages, part.first_page)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        """What the scheduler must keep for the heads of this class in all layers."""
        tokens, pages = self.blocks[self.local]
        common = {
            "block_size": tokens,
            "num_kv_heads": pages,
            "head_size": self.head_size,
            "dtype": self.kv_cache_torch_dtype,
        }
        if not self.local:
            return FullAttentionSpec(**common)
        window = {"sliding_window": self.split.recent, "sink": self.split.sink}
        whole, _ = self.blocks
        return SinkWindowSpec(full_block_size=whole.tokens, **common, **window)


class SplitAttention(nn.Module):
    """Replaces a layer's `Attention`: q [R, H·D], k and v [R, G·D] of one rank.

    Heads lie in the order of `HeadSplit`: the global ones, then the local ones; `parts` are those
    of which the layer has any.
    """

    def __init__(self, parts: list[ClassLayer], group: int) -> None:
        super().__init__()
        self.sizes = [part.num_kv_heads * part.head_size for part in parts]
        self.group = group
        self.parts = nn.ModuleList(parts)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of both parts, side by side [R, H·D]."""
        if len(self.sizes) == 1:
            whole: torch.Tensor = self.parts[0](q, k, v)
            return whole
        queries = torch.split(q, [self.group * size for size in self.sizes], dim=-1)
        keys, values = (torch.split(x, self.sizes, dim=-1) for x in (k, v))
        parts = zip(self.parts, queries, keys, values, strict=True)
        return torch.cat([part(*given) for part, *given in parts], dim=-1)


def split_model(model: nn.Module, split: HeadSplit, config: VllmConfig) -> None:
    """Replaces the attention of every decoder layer that this rank holds.

    Errors: `Unsupported` for layers that have a window of their own.
    """
    rank = get_tensor_model_parallel_rank() if split.ranks > 1 else 0
    blocks = split.blocks(config.cache_config.block_size)
    layers = zip(attention_of_layers(model, config), split.parts(rank), strict=True)
    first: list[str | None] = [None, None]
    for (module, stock), parts in layers:
        require_whole_context("heads", stock)
        group, made = stock.num_heads // stock.num_kv_heads, []
        for number, part in enumerate(parts):
            if not part.heads:
                continue
            layer = ClassLayer(
                part.heads * group,
                stock.head_size,
                stock.impl.scale,
                num_kv_heads=part.heads,
                cache_config=config.cache_config,
                prefix=f"{stock.layer_name}_{NAMES[number]}",
                split=split,
                blocks=blocks,
                local=NAMES[number] == "local",
                part=part,
                first=first[number],
            )
            first[number] = first[number] or layer.layer_name
            made.append(layer)
        module.attn = SplitAttention(made, group)
