"""What the executor needs of a transformers decoder: found by structure, proved by numbers.

The model's own modules do the arithmetic (projections, norms, MLP, rotary embedding), so biases,
q/k norms, tied embeddings, Gemma's scaled embeddings and mixtures of experts come for free. A
family whose layer does something else is caught by `verify`, which a `Runner` calls at its start
unless told not to: it compares our forward with the model's own on a short random prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvweave.errors import InvalidArgument, Unsupported
from kvweave.ops import Pairing
from kvweave.runner.model.fingerprint import fingerprint_of
from kvweave.runner.model.layer_forms import (
    HeadCounts,
    attention_of,
    check_kinds,
    head_dim_of,
    layer_spec,
    need,
)
from kvweave.runner.model.layer_spec import LayerSpec, Norm
from kvweave.runner.model.sampled_weights import sampled_weights
from kvweave.runner.model.stored_weights import stored_bytes
from kvweave.weight_sample import WeightSample

KV_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
"""Model dtypes with ops, and the name of each as a KV dtype."""

FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm")


@dataclass(frozen=True)
class ScaledEmbedding:
    """Embeddings that a model multiplies by a number before its first layer (Granite)."""

    embed: nn.Module
    scale: float

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states [R, E] of ids [R]."""
        states: torch.Tensor = self.embed(tokens) * self.scale
        return states


@dataclass(frozen=True)
class ModelSpec:
    """A whole decoder-only model: L layers, H query heads, G KV heads, D head dim, E `width`.

    Logits are multiplied by `logit_scale` (Cohere). `weight_bytes`: of all parameters and buffers.
    `positions`: tokens of the longest sequence that the model is made for, where its frequencies do
    not follow the length. `weights`: a few of their values, for head maps to name them by.
    """

    layers: tuple[LayerSpec, ...]
    query_heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocabulary: int
    embed: Callable[[torch.Tensor], torch.Tensor]
    final_norm: Norm
    head: nn.Module
    logit_scale: float
    final_softcap: float | None
    rotary: Any
    pairing: Pairing
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int
    positions: int | None
    fingerprint: str
    weights: tuple[WeightSample, ...]

    def current(self) -> AbstractContextManager[object]:
        """While it is entered, the model's device is CUDA's current one, whose streams are used."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits f32 [R, V] of the last layer's hidden states [R, E]."""
        logits: torch.Tensor = self.head(self.final_norm(hidden)).float()
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.final_softcap is not None:
            logits = torch.tanh(logits / self.final_softcap) * self.final_softcap
        return logits


def _text_config(model: Any) -> Any:
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _pairing(attention: Any, head_dim: int) -> Pairing:
    """Which elements the family pairs, asked of its own rotate function."""
    import sys

    module = sys.modules.get(type(attention).__module__)
    rotate = getattr(module, "rotate_half", None)
    if rotate is None:
        return "half"
    probe = torch.zeros(1, head_dim)
    probe[0, 1] = 1.0
    rotated = rotate(probe)[0]
    if float(rotated[0]) == -1.0:
        return "interleaved"
    if float(rotated[head_dim // 2 + 1]) == 1.0:
        return "half"
    raise Unsupported("rope pairing: expected half-split or interleaved pairs, got another")


def describe(model: Any) -> ModelSpec:
    """Reads the structure of a transformers causal LM.

    # Errors
    `Unsupported` naming what is missing: no decoder layers, no rotary embedding (a model without
    RoPE), norms or projections of no known form, an unknown layer type, one device for all
    weights.
    `InvalidArgument` for a model in train mode, whose dropout would change every answer.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if decoder is None or head is None:
        raise Unsupported(f"model: expected a transformers causal LM, got {type(model).__name__}")
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None:
        raise Unsupported(
            "model: expected rotary position embedding (rotary_emb), "
            f"got {type(model).__name__} without RoPE"
        )
    config = _text_config(model)
    check_kinds(config)
    modules = need(decoder, "layers", "decoder")
    keyed = isinstance(getattr(rotary, "rope_type", None), dict)
    attention = attention_of(modules[0])
    heads = int(config.num_attention_heads)
    counts = HeadCounts(
        heads,
        int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim_of(attention, config),
    )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise Unsupported(f"model: expected its weights on one device, got {', '.join(devices)}")
    if model.training:
        raise InvalidArgument("model: expected one in eval mode (model.eval()), got train mode")
    embed = decoder.get_input_embeddings()
    scale = float(getattr(decoder, "embedding_multiplier", 1.0))
    return ModelSpec(
        layers=tuple(layer_spec(m, config, i, counts, keyed) for i, m in enumerate(modules)),
        query_heads=counts.query_heads,
        kv_heads=counts.kv_heads,
        head_dim=counts.head_dim,
        width=int(embed.weight.shape[1]),
        vocabulary=int(embed.weight.shape[0]),
        embed=embed if scale == 1.0 else ScaledEmbedding(embed, scale),
        final_norm=need(decoder, FINAL_NORMS, "decoder"),
        head=head,
        logit_scale=_logit_scale(model, config),
        final_softcap=getattr(config, "final_logit_softcapping", None),
        rotary=rotary,
        pairing=_pairing(attention, counts.head_dim),
        dtype=embed.weight.dtype,
        device=embed.weight.device,
        weight_bytes=sum(map(stored_bytes, (*model.parameters(), *model.buffers()))),
        positions=_positions(config),
        fingerprint=fingerprint_of(model, config),
        weights=sampled_weights(model),
    )


def _logit_scale(model: Any, config: Any) -> float:
    """What a model multiplies its logits by; Granite divides."""
    scale = getattr(model, "logit_scale", None)
    if scale is not None:
        return float(scale)
    return 1.0 / float(getattr(config, "logits_scaling", None) or 1.0)


def _positions(config: Any) -> int | None:
    """The longest sequence that a model is made for; None when it follows the length."""
    most = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if most is None or rope.get("rope_type") == "dynamic":
        return None
    known = rope.get("original_max_position_embeddings") or 0
    stretched = known * (rope.get("factor") or 1.0)
    return max(int(most), int(stretched))
