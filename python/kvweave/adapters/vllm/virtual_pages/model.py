"""A model whose layers keep their KV in virtual pages."""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention

from kvweave import ops
from kvweave.adapters.vllm import versions
from kvweave.adapters.vllm.backend.decoder_layers import attention_of_layers, require_whole_context
from kvweave.adapters.vllm.heads.class_map import HeadClass
from kvweave.adapters.vllm.require import require
from kvweave.adapters.vllm.virtual_pages.backend import VirtualBackend
from kvweave.adapters.vllm.virtual_pages.layout import PageLayout, layout_of
from kvweave.adapters.vllm.virtual_pages.page_memory import PageMemory
from kvweave.adapters.vllm.virtual_pages.spec import VirtualPagesSpec

CONNECTOR = "KvweavePages"
BLOCK_TOKENS = (16, 32, 64)


class _VirtualLayer(Attention):
    """The attention of a layer, its heads as `layout` has them."""

    memory: PageMemory | None = None

    def __init__(self, *given: Any, layout: PageLayout, reach: ops.Reach, **named: Any) -> None:
        super().__init__(*given, attn_backend=VirtualBackend, reach=reach, **named)
        self.layout = layout

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        """What the scheduler must keep."""
        return VirtualPagesSpec(
            block_size=self.layout.page_tokens,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.kv_cache_torch_dtype,
            layout=self.layout,
            in_flight=vllm_config.max_in_flight_tokens,
        )


def layout_for(config: VllmConfig, classes: list[list[HeadClass]] | None) -> PageLayout:
    """The layout of a model under a head map, or with all heads full.

    Errors: `Unsupported` for what virtual pages are not made for.
    """
    versions.check_installed(versions.WITH_VIRTUAL_PAGES)
    _check(config)
    model, page_tokens = config.model_config, config.cache_config.block_size
    layers = model.hf_text_config.num_hidden_layers
    if classes is None:
        kv_heads = model.get_num_kv_heads(config.parallel_config)
        return layout_of([[{"kind": "full"}] * kv_heads] * layers, page_tokens)
    return layout_of(classes, page_tokens, config.parallel_config.tensor_parallel_size)


def use_virtual_pages(model: nn.Module, layout: PageLayout, config: VllmConfig) -> None:
    """Replaces the attention of every decoder layer by that of this rank's heads.

    Errors: `Unsupported` for layers that have a window of their own.
    """
    rank = get_tensor_model_parallel_rank() if layout.ranks > 1 else 0
    for number, (module, stock) in enumerate(attention_of_layers(model, config)):
        require_whole_context("virtual pages", stock)
        module.attn = _VirtualLayer(
            stock.num_heads,
            stock.head_size,
            stock.impl.scale,
            num_kv_heads=stock.num_kv_heads,
            cache_config=config.cache_config,
            prefix=stock.layer_name,
            layout=layout,
            reach=ops.Reach(len(layout.tables), layout.head_rows(number, rank)),
        )


def _check(config: VllmConfig) -> None:
    size = config.cache_config.block_size
    sizes = ", ".join(map(str, BLOCK_TOKENS))
    require("block_size", size in BLOCK_TOKENS, f"one of {sizes} with virtual pages", str(size))
    transfer = config.kv_transfer_config
    name = None if transfer is None else transfer.kv_connector
    require("kv_connector", name == CONNECTOR, f"{CONNECTOR} with virtual pages", str(name))
