"""vLLM's own model classes, with heads under a map or with segments reused.

They are registered beside the stock ones, under names of their own: `--hf-overrides
'{"architectures": ["KvweaveLlamaForCausalLM"]}'` takes one, and `additional_config` says what for:
`heads` is the file of a head class map, `segment_bytes` the size of the store of segments.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from kvweave.adapters.vllm.heads.class_map import HeadClass, read_classes
from kvweave.adapters.vllm.heads.connector import KvweaveHeads
from kvweave.adapters.vllm.heads.split import HeadSplit, in_order, split_of
from kvweave.adapters.vllm.heads.worker import split_model
from kvweave.adapters.vllm.options import Options, options_of
from kvweave.adapters.vllm.require import require
from kvweave.adapters.vllm.segments.model import check_segments, forward_of_step, guard_model
from kvweave.adapters.vllm.start_line import log_start
from kvweave.adapters.vllm.top_k.map import has_top_k
from kvweave.adapters.vllm.top_k.model import budgets_for, use_top_k
from kvweave.adapters.vllm.virtual_pages.model import layout_for, use_virtual_pages
from kvweave.errors import InvalidArgument

DIGEST = "kvweave_digest"
"""A key of `additional_config` that is the plugin's own."""


class _KvweaveModel:
    """Mixed in before a model class whose layers have `self_attn.attn`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **others: Any) -> None:
        options = _options_of(vllm_config)
        log_start(vllm_config)
        self.split = self.layout = self.budgets = None
        if options.virtual_pages:
            self.layout = layout_for(vllm_config, options.heads)
        elif options.heads is not None:
            classes = _classes_of(vllm_config, options.heads)
            if has_top_k(classes):
                self.budgets = budgets_for(vllm_config, classes)
            else:
                self.split = _split_of(vllm_config, classes)
        record_digest(vllm_config, options)
        stock: Any = super()
        stock.__init__(vllm_config=vllm_config, prefix=prefix, **others)
        model: Any = self
        if self.split is not None:
            split_model(model, self.split, vllm_config)
        if self.budgets is not None:
            use_top_k(model, self.budgets, vllm_config)
        if self.layout is not None:
            use_virtual_pages(model, self.layout, vllm_config)
        if options.segment_bytes is not None:
            guard_model(model, options, vllm_config)

    def forward(self, *given: Any, **named: Any) -> Any:
        """Hidden states of a batch; with fewer rows in a step that reuses segments."""
        stock: Any = super()
        reused = forward_of_step(self, *given, **named)
        return stock.forward(*given, **named) if reused is None else reused

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads a checkpoint, heads in the order of the split."""
        if self.split is not None:
            weights = in_order(weights, self.split)
        stock: Any = super()
        loaded: set[str] = stock.load_weights(weights)
        return loaded


def _options_of(config: VllmConfig) -> Options:
    options = options_of(config.additional_config)
    if options.segment_bytes is not None:
        check_segments(config, options)
    else:
        some = options.heads is not None or options.virtual_pages
        expected = "kvweave.heads, kvweave.segment_bytes or kvweave.virtual_pages"
        require("additional_config", some, expected, "none of them", InvalidArgument)
    return options


def record_digest(config: VllmConfig, options: Options) -> None:
    """Enters the options' digest where vLLM's hash of its configuration has it.

    By that hash vLLM finds what it compiled in an earlier run. It has the path of a map but not
    its text, and nothing of our variables: graphs compiled for another map must not be found. The
    hash is taken after the model is made.
    """
    if isinstance(config.additional_config, dict):
        config.additional_config[DIGEST] = options.digest()


def _classes_of(config: VllmConfig, path: Path) -> list[list[HeadClass]]:
    connector = config.kv_transfer_config
    if connector is not None and connector.kv_connector == KvweaveHeads.__name__:
        connector = None  # It loads and saves nothing.
    refused = {
        "quantization": config.quant_config,
        "kv_transfer_config": connector,
        "speculative_config": config.speculative_config,
        "lora_config": config.lora_config,
    }
    for name, value in refused.items():
        require(name, value is None, "none beside a head map", "one")
    parallel, model = config.parallel_config, config.model_config
    stages = parallel.pipeline_parallel_size
    require("pipeline_parallel_size", stages == 1, "1 beside a head map", str(stages))
    layers, heads = model.hf_text_config.num_hidden_layers, model.get_total_num_kv_heads()
    return read_classes(path, layers, heads)


def _split_of(config: VllmConfig, classes: list[list[HeadClass]]) -> HeadSplit | None:
    split = split_of(classes, config.parallel_config.tensor_parallel_size)
    # Without its hybrid manager vLLM would keep every token of local heads too.
    hybrid = not config.scheduler_config.disable_hybrid_kv_cache_manager
    whole = split is None or hybrid
    require("disable_hybrid_kv_cache_manager", whole, "false beside a head map", "true")
    return split


class KvweaveLlamaForCausalLM(_KvweaveModel, LlamaForCausalLM):
    """Llama with split heads, or reusing segments."""


class KvweaveMistralForCausalLM(_KvweaveModel, MistralForCausalLM):
    """Mistral with split heads, or reusing segments."""


class KvweaveQwen2ForCausalLM(_KvweaveModel, Qwen2ForCausalLM):
    """Qwen2 with split heads, or reusing segments."""


class KvweaveQwen3ForCausalLM(_KvweaveModel, Qwen3ForCausalLM):
    """Qwen3 with split heads, or reusing segments."""
