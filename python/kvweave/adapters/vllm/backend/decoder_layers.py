"""The decoder layers of a vLLM model, whose attention is to be replaced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from kvweave.adapters.vllm.require import require


def attention_of_layers(model: nn.Module, config: VllmConfig) -> Iterator[tuple[Any, Attention]]:
    """Modules that hold an attention as `attn`, with it, layer by layer of this rank.

    vLLM has forgotten each by the time it comes, so another of its name may be made and put there.
    """
    known = config.compilation_config.static_forward_context
    for module in list(model.modules()):
        stock = getattr(module, "attn", None)
        if isinstance(stock, Attention):
            del known[stock.layer_name]
            yield module, stock


def layer_number(layer: Any) -> int:
    """The number of the decoder layer that an attention layer is in.

    Its name says so, but for layers with a `number`: theirs may be called after another layer.
    """
    own = getattr(layer, "number", None)
    return int(extract_layer_index(layer.layer_name) if own is None else own)


def require_whole_context(what: str, stock: Attention) -> None:
    """Refuses a layer with a window of its own.

    Errors: `Unsupported`, naming `what` needs the whole context.
    """
    window = stock.sliding_window
    expected = f"layers that see the whole context beside {what}"
    got = f"a window of {window} in {stock.layer_name}"
    require("sliding_window", window is None, expected, got)
