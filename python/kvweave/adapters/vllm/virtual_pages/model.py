"""A model whose layers keep their KV in virtual pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention

from kvweave import ops
from kvweave.adapters.vllm import versions
from kvweave.adapters.vllm.backend.block_sizes import BLOCK_TOKENS
from kvweave.adapters.vllm.backend.decoder_layers import attention_of_layers, require_whole_context
from kvweave.adapters.vllm.heads.class_map import HeadClass
from kvweave.adapters.vllm.options import options_of
from kvweave.adapters.vllm.require import require
from kvweave.adapters.vllm.top_k.bounds import bound_share
from kvweave.adapters.vllm.top_k.map import PageBudgets
from kvweave.adapters.vllm.virtual_pages.backend import VirtualBackend, VirtualChoosingBackend
from kvweave.adapters.vllm.virtual_pages.far_choice import runs_of_layer
from kvweave.adapters.vllm.virtual_pages.far_memory import FarMemory, host_arena
from kvweave.adapters.vllm.virtual_pages.layout import PageLayout, layout_of
from kvweave.adapters.vllm.virtual_pages.page_memory import PageMemory
from kvweave.adapters.vllm.virtual_pages.spec import VirtualPagesSpec
from kvweave.errors import InvalidArgument
from kvweave.runner.kv.host_arena import HostArena

CONNECTOR = "KvweavePages"


class _VirtualLayer(Attention):
    """The attention of a layer, its heads as `layout` has them.

    Where heads choose pages: `budgets` of the rank, `ranked`, the layer's number among those in
    which some head does, or None, and `runs`, its heads with their bounds and slots.
    """

    memory: PageMemory | None = None
    far: FarMemory | None = None
    host: HostArena | None = None

    def __init__(
        self,
        *given: Any,
        layout: PageLayout,
        number: int,
        rank: int,
        budgets: PageBudgets | None,
        **named: Any,
    ) -> None:
        reach = ops.Reach(layout.step_tables, layout.head_rows(number, rank))
        backend = VirtualBackend if budgets is None else VirtualChoosingBackend
        super().__init__(*given, attn_backend=backend, reach=reach, **named)
        self.layout, self.number, self.rank, self.budgets = layout, number, rank, budgets
        self.ranked = None
        if budgets is not None and number in budgets.ranked:
            self.ranked = budgets.ranked.index(number)
        self.runs = runs_of_layer(layout, number, rank)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        """What the scheduler must keep."""
        options = options_of(vllm_config.additional_config)
        spills = self.layout.spills
        return VirtualPagesSpec(
            block_size=self.layout.page_tokens,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.kv_cache_torch_dtype,
            layout=self.layout,
            in_flight=vllm_config.max_in_flight_tokens,
            host_bytes=(options.host_bytes or 0) if spills else 0,
            seats=vllm_config.scheduler_config.max_num_seqs if spills else 0,
        )


def layout_for(
    config: VllmConfig, classes: list[list[HeadClass]] | None, host_bytes: int | None = None
) -> PageLayout:
    """The layout of a model under a head map, or with all heads full.

    With `host_bytes` pages of heads that choose may lie in the host's memory.

    Errors: `Unsupported` for what virtual pages are not made for, `InvalidArgument` for bytes of
    the host's that no head needs or that hold no page.
    """
    versions.check_installed(versions.WITH_VIRTUAL_PAGES)
    _check(config)
    model, page_tokens = config.model_config, config.cache_config.block_size
    layers = model.hf_text_config.num_hidden_layers
    if classes is None:
        kv_heads = model.get_num_kv_heads(config.parallel_config)
        classes = [[{"kind": "full"}] * kv_heads] * layers
    layout = layout_of(classes, page_tokens, config.parallel_config.tensor_parallel_size)
    if host_bytes is not None:
        _check_failures(config)
    expected = "a map with top_k heads beside it"
    some = host_bytes is None or bool(layout.choosing)
    require("host_bytes", some, expected, "none", InvalidArgument)
    if not layout.choosing:
        return layout
    kept = config.cache_config.cache_dtype
    same = kept in ("auto", str(model.dtype).removeprefix("torch."))
    require("kv_cache_dtype", same, "that of the model beside heads that choose", str(kept))
    share = bound_share(model.dtype, config.device_config.device, page_tokens)
    every = [head["rerank_every"] for of in classes for head in of if head["kind"] == "top_k"]
    paced = all(int(steps) >= page_tokens for steps in every)
    layout = layout.with_bounds(share, spills=host_bytes is not None, paced=paced)
    page_bytes = 2 * page_tokens * model.get_head_size() * model.dtype.itemsize
    # Who gives up no more pages than it takes slots frees nothing.
    least = (layout.slots + 1) * layout.bound_rows * page_bytes
    holds = host_bytes is None or host_bytes >= least
    require("host_bytes", holds, f"at least {least}", str(host_bytes), InvalidArgument)
    return layout


def use_virtual_pages(
    model: nn.Module, layout: PageLayout, config: VllmConfig, budgets: PageBudgets | None = None
) -> None:
    """Replaces the attention of every decoder layer by that of this rank's heads.

    `budgets`: how many pages they choose, where some do.

    Errors: `Unsupported` for layers that have a window of their own, `OutOfMemory` where the host
    does not have the memory for pages that leave the device.
    """
    rank = get_tensor_model_parallel_rank() if layout.ranks > 1 else 0
    layers = list[_VirtualLayer]()
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
            number=number,
            rank=rank,
            budgets=budgets,
        )
        layers.append(module.attn)
    if not layout.spills:
        return
    # Before vLLM decides which steps it captures: memory that is not pinned has a say in that.
    spec, dtype = layers[0].get_kv_cache_spec(config), layers[0].kv_cache_torch_dtype
    page, device = (spec.block_size, spec.head_size), _device_of(config)
    host = host_arena(layout, spec.home_blocks, page, dtype, device)
    for layer in layers:
        layer.host = host


def _device_of(config: VllmConfig) -> torch.device:
    kind = torch.device(config.device_config.device).type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _check(config: VllmConfig) -> None:
    size = config.cache_config.block_size
    sizes = ", ".join(map(str, BLOCK_TOKENS))
    require("block_size", size in BLOCK_TOKENS, f"one of {sizes} with virtual pages", str(size))
    transfer = config.kv_transfer_config
    name = None if transfer is None else transfer.kv_connector
    require("kv_connector", name == CONNECTOR, f"{CONNECTOR} with virtual pages", str(name))


def _check_failures(config: VllmConfig) -> None:
    """Of a request whose transfer failed nothing is left to go on from."""
    policy = config.kv_transfer_config.kv_load_failure_policy
    require("kv_load_failure_policy", policy == "fail", "fail beside host_bytes", str(policy))
