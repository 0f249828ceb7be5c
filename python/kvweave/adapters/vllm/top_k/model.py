"""A model whose layers have heads that choose pages in decode steps."""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention

from kvweave.adapters.vllm.backend.block_sizes import BLOCK_TOKENS
from kvweave.adapters.vllm.backend.decoder_layers import attention_of_layers, require_whole_context
from kvweave.adapters.vllm.heads.class_map import HeadClass
from kvweave.adapters.vllm.require import require
from kvweave.adapters.vllm.segments.prefix_guard import guarded
from kvweave.adapters.vllm.top_k.backend import ChoosingBackend
from kvweave.adapters.vllm.top_k.bounds_cache import BoundsCache
from kvweave.adapters.vllm.top_k.map import PageBudgets, budgets_of
from kvweave.adapters.vllm.top_k.prompt_prefix import PromptPrefixSpec


class _ChoosingLayer(Attention):
    """The attention of a layer; `ranked` and `bounds` as `ChoosingAttention` has them."""

    def __init__(
        self,
        *given: Any,
        budgets: PageBudgets,
        ranked: int | None,
        reusing: bool,
        **named: Any,
    ) -> None:
        super().__init__(*given, attn_backend=ChoosingBackend, **named)
        self.reusing = reusing
        self.budgets = budgets
        self.ranked = ranked
        self.bounds: BoundsCache | None = None

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        """What the scheduler must keep of keys and values."""
        tokens = vllm_config.cache_config.block_size
        spec = PromptPrefixSpec(
            block_size=tokens,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.kv_cache_torch_dtype,
            exact_tokens=self.budgets.least * tokens,
        )
        return guarded(spec) if self.reusing else spec


def budgets_for(
    config: VllmConfig, classes: list[list[HeadClass]], *, windows: bool = False
) -> PageBudgets:
    """The budgets of this rank's heads under a map that has top-k heads.

    `windows`: whether others of its heads may have some.

    Errors: `Unsupported` for blocks of other sizes, and as `budgets_of`.
    """
    size = config.cache_config.block_size
    sizes = ", ".join(map(str, BLOCK_TOKENS))
    fits = size in BLOCK_TOKENS
    require("block_size", fits, f"one of {sizes} beside top-k heads", str(size))
    ranks = config.parallel_config.tensor_parallel_size
    rank = get_tensor_model_parallel_rank() if ranks > 1 else 0
    return budgets_of(classes, ranks, rank, windows=windows)


def use_top_k(model: nn.Module, budgets: PageBudgets, config: VllmConfig, *, reusing: bool) -> None:
    """Replaces the attention of every decoder layer; `reusing`: segments are reused beside it.

    Errors: `Unsupported` for layers that have a window of their own.
    """
    numbers = {layer: number for number, layer in enumerate(budgets.ranked)}
    for layer, (module, stock) in enumerate(attention_of_layers(model, config)):
        require_whole_context("top-k heads", stock)
        ranked = numbers.get(layer)
        module.attn = _ChoosingLayer(
            stock.num_heads,
            stock.head_size,
            stock.impl.scale,
            num_kv_heads=stock.num_kv_heads,
            cache_config=config.cache_config,
            prefix=stock.layer_name,
            budgets=budgets,
            ranked=ranked,
            reusing=reusing,
        )
        if ranked is not None:
            exact = budgets.least * config.cache_config.block_size
            module.attn.bounds = BoundsCache(module.attn, config, exact, reusing=reusing)
