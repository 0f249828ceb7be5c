"""vLLM's own model classes, with heads under a map or with segments reused.

They are registered beside the stock ones, under names of their own: `--hf-overrides
'{"architectures": ["KvweaveLlamaForCausalLM"]}'` takes one, and `additional_config` says what for:
`heads` is the file of a head class map, `segment_bytes` the size of the store of segments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from kvweave.adapters.vllm.composition import (
    FOLDER,
    HEADS,
    PACKED,
    PAGES,
    SEGMENTS,
    TOP_K,
    check_together,
)
from kvweave.adapters.vllm.heads.class_map import HeadClass, read_classes, read_map
from kvweave.adapters.vllm.heads.same_model import watched
from kvweave.adapters.vllm.heads.split import in_order, split_of
from kvweave.adapters.vllm.heads.worker import split_model
from kvweave.adapters.vllm.options import Options, options_of
from kvweave.adapters.vllm.require import require
from kvweave.adapters.vllm.segments.model import (
    check_connector,
    forward_of_step,
    give_store,
    guard_model,
    weights_replaced,
)
from kvweave.adapters.vllm.served_models import check_model
from kvweave.adapters.vllm.start_line import log_compared, log_start
from kvweave.adapters.vllm.top_k.map import has_top_k
from kvweave.adapters.vllm.top_k.model import budgets_for, use_top_k
from kvweave.adapters.vllm.virtual_pages.model import layout_for, use_virtual_pages
from kvweave.errors import InvalidArgument
from kvweave.weight_sample import WeightComparison, samples_of

DIGEST = "kvweave_digest"
"""A key of `additional_config` that is the plugin's own."""


class _KvweaveModel:
    """Mixed in before a model class whose layers have `self_attn.attn`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **others: Any) -> None:
        check_model(type(self).__name__, vllm_config)
        options = _options_of(vllm_config)
        log_start(vllm_config)
        self.split = self.layout = self.budgets = self.compared = None
        self.is_loaded = False
        reusing = options.segment_bytes is not None
        classes = _classes_of(vllm_config, options)
        check_together(_parts_of(options, classes), vllm_config)
        if options.virtual_pages:
            self.layout = layout_for(vllm_config, classes, options.host_bytes)
        if classes is not None and has_top_k(classes):
            windows = options.virtual_pages
            self.budgets = budgets_for(vllm_config, classes, windows=windows)
        elif classes is not None and not options.virtual_pages:
            self.split = split_of(classes, vllm_config.parallel_config.tensor_parallel_size)
        if options.heads is not None and (samples := samples_of(read_map(options.heads))):
            self.compared = WeightComparison(samples)
        record_digest(vllm_config, options)
        stock: Any = super()
        stock.__init__(vllm_config=vllm_config, prefix=prefix, **others)
        model: Any = self
        if self.split is not None:
            split_model(model, self.split, vllm_config, reusing=reusing)
        elif self.layout is not None:
            use_virtual_pages(model, self.layout, vllm_config, self.budgets)
        elif self.budgets is not None:
            use_top_k(model, self.budgets, vllm_config, reusing=reusing)
        elif reusing:
            guard_model(model, vllm_config)
        if reusing:
            give_store(options, vllm_config)

    def forward(self, *given: Any, **named: Any) -> Any:
        """Hidden states of a batch; with fewer rows in a step that reuses segments."""
        stock: Any = super()
        reused = forward_of_step(self, *given, **named)
        return stock.forward(*given, **named) if reused is None else reused

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads a checkpoint, heads in the order of the split.

        What replaces the weights later, in training, is not compared with a map, and nothing that
        was computed before is reused.

        Errors: as `watched` for a map of other weights.
        """
        again, self.is_loaded = self.is_loaded, True
        if again:
            with weights_replaced(weights) as others:
                return self._loaded(others)
        compared, self.compared = self.compared, None
        if compared is not None:
            weights = watched(weights, compared)
        loaded = self._loaded(weights)
        if compared is not None:
            log_compared(compared)
        return loaded

    def _loaded(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        if self.split is not None:
            weights = in_order(weights, self.split)
        stock: Any = super()
        loaded: set[str] = stock.load_weights(weights)
        return loaded


def _options_of(config: VllmConfig) -> Options:
    options = options_of(config.additional_config)
    if options.segment_bytes is not None:
        check_connector(config)
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


def _classes_of(config: VllmConfig, options: Options) -> list[list[HeadClass]] | None:
    """The classes of the map that the options name, if any."""
    if options.heads is None:
        return None
    model = config.model_config
    layers, heads = model.hf_text_config.num_hidden_layers, model.get_total_num_kv_heads()
    return read_classes(options.heads, layers, heads)


def _parts_of(options: Options, classes: list[list[HeadClass]] | None) -> list[str]:
    """Which parts of the plugin an engine uses; what heads read of virtual pages is their own."""
    kinds = {head["kind"] for layer in classes or [] for head in layer}
    used = {
        HEADS: "window" in kinds and not options.virtual_pages,
        TOP_K: "top_k" in kinds and not options.virtual_pages,
        PAGES: options.virtual_pages,
        SEGMENTS: options.segment_bytes is not None,
        PACKED: options.segment_dtype is not None,
        FOLDER: options.store is not None,
    }
    return [part for part, is_used in used.items() if is_used]


class KvweaveLlamaForCausalLM(_KvweaveModel, LlamaForCausalLM):
    """Llama with split heads, or reusing segments."""


class KvweaveMistralForCausalLM(_KvweaveModel, MistralForCausalLM):
    """Mistral with split heads, or reusing segments."""


class KvweaveQwen2ForCausalLM(_KvweaveModel, Qwen2ForCausalLM):
    """Qwen2 with split heads, or reusing segments."""


class KvweaveQwen3ForCausalLM(_KvweaveModel, Qwen3ForCausalLM):
    """Qwen3 with split heads, or reusing segments."""


class KvweaveQwen3MoeForCausalLM(_KvweaveModel, Qwen3MoeForCausalLM):
    """Qwen3 with experts, with split heads, or reusing segments."""
