"""The KV heads of all layers in two cache layers of vLLM: one that keeps all, one with a window."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvweave.adapters.vllm.backend.decoder_layers import attention_of_layers, require_whole_context
from kvweave.adapters.vllm.backend.metadata import QkvObserver
from kvweave.adapters.vllm.backend.step_tables import first as first_rows
from kvweave.adapters.vllm.heads.class_attention import ClassBackend, EqualPages
from kvweave.adapters.vllm.heads.spec import SinkWindowSpec
from kvweave.adapters.vllm.heads.split import ClassBlocks, HeadSplit, LayerPart, Window
from kvweave.adapters.vllm.segments.prefix_guard import guarded

NAMES = ("global", "local")


@dataclass
class LayerWatch:
    """Who hears the queries, keys and values of all of a layer's heads, before they are written."""

    observer: QkvObserver | None = None


@dataclass(frozen=True)
class ClassPlace:
    """What all parts of a model under a map have in common.

    `reusing`: segments are reused beside it, so that not all KV is exact.
    """

    split: HeadSplit
    blocks: tuple[ClassBlocks, ClassBlocks]
    reusing: bool


class ClassLayer(Attention):
    """Heads of one class in one layer, in blocks that all layers' heads of the class share.

    The first such layer of a class is the cache layer that vLLM allocates, `first`; the others have
    its memory and its block table. `number`: the layer's, whatever its name says.
    `windows`: what each local head sees of what the class keeps, if they do not all see it.
    """

    def __init__(
        self,
        *given: Any,
        place: ClassPlace,
        number: int,
        local: bool,
        part: LayerPart,
        windows: Sequence[Window],
        first: str | None,
        watch: LayerWatch,
        **named: Any,
    ) -> None:
        split = place.split
        window = {"per_layer_sliding_window": split.recent, "sink": split.sink} if local else {}
        super().__init__(
            *given,
            attn_backend=EqualPages if place.reusing else ClassBackend,
            kv_sharing_target_layer_name=first,
            **window,
            **named,
        )
        self.place = place
        self.number = number
        self.local = local
        self.watch = watch
        impl: Any = self.impl
        heads = split.kv_heads // split.ranks
        impl.own_pages_of(
            place.blocks[local].pages,
            part.first_page,
            first_head=heads - part.heads if local else 0,
            layer_heads=heads,
        )
        if local and windows:
            impl.see(windows)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        """What the scheduler must keep for the heads of this class in all layers."""
        spec = self._spec()
        return guarded(spec) if self.place.reusing else spec

    def _spec(self) -> Any:
        split, (whole, _) = self.place.split, self.place.blocks
        tokens, pages = self.place.blocks[self.local]
        common = {
            "block_size": tokens,
            "num_kv_heads": pages,
            "head_size": self.head_size,
            "dtype": self.kv_cache_torch_dtype,
        }
        if not self.local:
            return FullAttentionSpec(**common)
        window = {"sliding_window": split.recent, "sink": split.sink}
        return SinkWindowSpec(full_block_size=whole.tokens, **common, **window)


class SplitAttention(nn.Module):
    """Replaces a layer's `Attention`: q [R, H·D], k and v [R, G·D] of one rank.

    Heads lie in the order of `HeadSplit`: the global ones, then the local ones; `parts` are those
    of which the layer has any. Who watches is told of all heads at once.
    """

    def __init__(self, parts: list[ClassLayer], watch: LayerWatch) -> None:
        super().__init__()
        self.watch = watch
        self.first, self.head_size = parts[0].layer_name, int(parts[0].head_size)
        self.parts = nn.ModuleList(parts)
        # No module of the model: all of it is in its parts.
        self.whole = (whole_of(parts),)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of both parts, side by side [R, H·D]."""
        observer = self.watch.observer
        if observer is None:
            return self._attend(q, k, v)
        context: Any = get_forward_context()
        known = context.attn_metadata
        rows = known[self.first].rows
        queries, keys, values = (first_rows(x, rows) for x in (q, k, v))
        subset = observer(*(x.view(rows, -1, self.head_size) for x in (queries, keys, values)))
        if subset is None:
            return self._attend(q, k, v)
        some = (x.index_select(0, subset.index) for x in (queries, keys, values))
        try:
            context.attn_metadata = {**known, **subset.metadata}
            return torch.zeros_like(q).index_copy_(0, subset.index, self._attend(*some))
        finally:
            context.attn_metadata = known

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.whole[0](q, k, v)
        return attended


def whole_of(parts: list[ClassLayer]) -> ClassLayer:
    """An attention layer that takes the heads of all parts, and has the first attend for all."""
    first, *others = parts
    if not others:
        return first
    impl: Any = first.impl
    impl.beside = others
    whole = copy(first)
    whole.num_heads = sum(part.num_heads for part in parts)
    whole.num_kv_heads = sum(part.num_kv_heads for part in parts)
    return whole


def split_model(model: nn.Module, split: HeadSplit, config: VllmConfig, *, reusing: bool) -> None:
    """Replaces the attention of every decoder layer that this rank holds.

    `reusing`: segments are reused beside the map. The cache layer of a class is named after the
    model's first layer: ranks may have their first heads of it in different layers, and vLLM takes
    layers of the same name for those that have the same blocks.

    Errors: `Unsupported` for layers that have a window of their own.
    """
    rank = get_tensor_model_parallel_rank() if split.ranks > 1 else 0
    blocks = split.blocks(config.cache_config.block_size)
    place = ClassPlace(split, blocks, reusing)
    layers = list(attention_of_layers(model, config))
    home, first = layers[0][1].layer_name, dict[str, str]()
    for number, ((module, stock), parts) in enumerate(zip(layers, split.parts(rank), strict=True)):
        require_whole_context("head classes", stock)
        group, made, watch = stock.num_heads // stock.num_kv_heads, [], LayerWatch()
        for kind, part in zip(NAMES, parts, strict=True):
            if not part.heads:
                continue
            layer = ClassLayer(
                part.heads * group,
                stock.head_size,
                stock.impl.scale,
                num_kv_heads=part.heads,
                cache_config=config.cache_config,
                prefix=f"{stock.layer_name if kind in first else home}_{kind}",
                place=place,
                number=number,
                local=kind == "local",
                part=part,
                windows=split.own_windows(number, rank),
                first=first.get(kind),
                watch=watch,
            )
            first.setdefault(kind, layer.layer_name)
            made.append(layer)
        module.attn = SplitAttention(made, watch)
