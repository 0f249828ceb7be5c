"""vLLM's own model classes with the heads of each layer split by a head class map.

They stand beside the stock ones under names of their own: `--hf-overrides
'{"architectures": ["KvweaveLlamaForCausalLM"]}'` takes one, and `additional_config` names the map.
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

from kvweave.adapters.vllm.head_split import HeadSplit, in_order, read_split
from kvweave.adapters.vllm.options import options_of
from kvweave.adapters.vllm.split_attention import split_model
from kvweave.errors import InvalidArgument, Unsupported


class _SplitHeads:
    """Mixed in before a model class whose layers have `self_attn.attn`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **others: Any) -> None:
        self.split = _split_of(vllm_config)
        stock: Any = super()
        stock.__init__(vllm_config=vllm_config, prefix=prefix, **others)
        if self.split is not None:
            model: Any = self
            split_model(model, self.split, vllm_config)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads a checkpoint, heads in the order of the split."""
        if self.split is not None:
            weights = in_order(weights, self.split)
        stock: Any = super()
        loaded: set[str] = stock.load_weights(weights)
        return loaded


def _split_of(config: VllmConfig) -> HeadSplit | None:
    path = options_of(config.additional_config).heads
    if path is None:
        text = "additional_config: expected kvweave.heads, the path of a head map, got none"
        raise InvalidArgument(text, expected="kvweave.heads", got="none")
    refused = {
        "quantization": config.quant_config,
        "kv_transfer_config": config.kv_transfer_config,
        "speculative_config": config.speculative_config,
        "lora_config": config.lora_config,
    }
    for name, value in refused.items():
        if value is not None:
            text = f"{name}: expected none beside a head map, got one"
            raise Unsupported(text, expected="none", got=name)
    model, ranks = config.model_config, config.parallel_config.tensor_parallel_size
    layers = model.hf_text_config.num_hidden_layers
    return read_split(path, layers, model.get_total_num_kv_heads(), ranks)


class KvweaveLlamaForCausalLM(_SplitHeads, LlamaForCausalLM):
    """Llama with split heads."""


class KvweaveMistralForCausalLM(_SplitHeads, MistralForCausalLM):
    """Mistral with split heads."""


class KvweaveQwen2ForCausalLM(_SplitHeads, Qwen2ForCausalLM):
    """Qwen2 with split heads."""


class KvweaveQwen3ForCausalLM(_SplitHeads, Qwen3ForCausalLM):
    """Qwen3 with split heads."""
