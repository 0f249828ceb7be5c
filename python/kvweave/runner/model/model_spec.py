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
from typing import Any, TypeAlias

import torch
from torch import nn

from kvweave.errors import InvalidArgument, Unsupported
from kvweave.ops import Pairing
from kvweave.runner.model.joined import GatedProducts, Joined

KV_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
"""Model dtypes with ops, and the name of each as a KV dtype."""

Norm: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: its modules and the constants of its attention.

    `attention_out_norm` and `feed_forward_out_norm` exist in sandwich-norm families (Gemma 2, 3)
    alone, `query_norm` and `key_norm` where heads are normed (Qwen 3). `window` w keeps keys with
    position > row position − w. `rope_key` names the rotary parameters (a layer type, or None
    when there is one set); `rotates` is False on layers without positions (SmolLM3).
    `joined_heads` and `gated`: the same matrices side by side in memory, where they are.
    """

    attention: Any
    feed_forward: nn.Module
    attention_in_norm: Norm
    query_norm: Norm | None
    key_norm: Norm | None
    feed_forward_in_norm: Norm
    attention_out_norm: Norm | None
    feed_forward_out_norm: Norm | None
    scale: float
    window: int | None
    softcap: float | None
    rope_key: str | None
    rotates: bool
    joined_heads: Joined | None = None
    gated: GatedProducts | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A whole decoder-only model: L layers, H query heads, G KV heads, D head dim.

    `weight_bytes`: of all parameters and buffers. `positions`: tokens of the longest sequence that
    the model is made for, where its frequencies do not follow the length.
    """

    layers: tuple[LayerSpec, ...]
    query_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    embed: nn.Module
    final_norm: Norm
    head: nn.Module
    final_softcap: float | None
    rotary: Any
    pairing: Pairing
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int
    positions: int | None
    fingerprint: str

    def current(self) -> AbstractContextManager[object]:
        """While it is entered, the model's device is CUDA's current one, whose streams are used."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits f32 [R, V] of the last layer's hidden states [R, E]."""
        logits: torch.Tensor = self.head(self.final_norm(hidden)).float()
        if self.final_softcap is not None:
            logits = torch.tanh(logits / self.final_softcap) * self.final_softcap
        return logits


def _need(owner: Any, name: str, what: str) -> Any:
    value = getattr(owner, name, None)
    if value is None:
        raise Unsupported(
            f"{what}: expected a module `{name}`, got {type(owner).__name__} without one"
        )
    return value


def _text_config(model: Any) -> Any:
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _layer_type(config: Any, index: int) -> str | None:
    kinds = getattr(config, "layer_types", None)
    return None if kinds is None else str(kinds[index])


def _layer_window(attention: Any, config: Any, kind: str | None) -> int | None:
    """The sliding window of a layer, or None for full attention."""
    if kind is not None:
        if kind not in ("full_attention", "sliding_attention"):
            raise Unsupported(
                f"layer type: expected full_attention or sliding_attention, got {kind}"
            )
        window = getattr(attention, "sliding_window", None) or getattr(
            config, "sliding_window", None
        )
        return int(window) if kind == "sliding_attention" and window else None
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return None
    return int(window)


def _layer_spec(layer: Any, config: Any, index: int, keyed_rope: bool) -> LayerSpec:
    attention = _need(layer, "self_attn", "decoder layer")
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        _need(attention, name, "attention")
    kind = _layer_type(config, index)
    sandwich = hasattr(layer, "pre_feedforward_layernorm")
    after = _need(layer, "post_attention_layernorm", "decoder layer")
    scale = getattr(attention, "scaling", None)
    use_rope = getattr(attention, "use_rope", True)
    return LayerSpec(
        attention=attention,
        feed_forward=_need(layer, "mlp", "decoder layer"),
        attention_in_norm=_need(layer, "input_layernorm", "decoder layer"),
        query_norm=getattr(attention, "q_norm", None),
        key_norm=getattr(attention, "k_norm", None),
        feed_forward_in_norm=layer.pre_feedforward_layernorm if sandwich else after,
        attention_out_norm=after if sandwich else None,
        feed_forward_out_norm=(
            _need(layer, "post_feedforward_layernorm", "decoder layer") if sandwich else None
        ),
        scale=float(attention.head_dim**-0.5 if scale is None else scale),
        window=_layer_window(attention, config, kind),
        softcap=getattr(attention, "attn_logit_softcapping", None),
        rope_key=kind if keyed_rope else None,
        rotates=bool(use_rope),
    )


def _pairing(layer: Any, head_dim: int) -> Pairing:
    """Which elements the family pairs, asked of its own rotate function."""
    import sys

    module = sys.modules.get(type(layer.self_attn).__module__)
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
    RoPE), a fused projection, an unknown layer type, one device for all weights.
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
    modules = _need(decoder, "layers", "decoder")
    keyed = isinstance(getattr(rotary, "rope_type", None), dict)
    attention = _need(modules[0], "self_attn", "decoder layer")
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(attention.head_dim)
    weight = next(head.parameters())
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise Unsupported(f"model: expected its weights on one device, got {', '.join(devices)}")
    if model.training:
        raise InvalidArgument("model: expected one in eval mode (model.eval()), got train mode")
    return ModelSpec(
        layers=tuple(_layer_spec(m, config, i, keyed) for i, m in enumerate(modules)),
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=int(decoder.get_input_embeddings().weight.shape[0]),
        embed=decoder.get_input_embeddings(),
        final_norm=_need(decoder, "norm", "decoder"),
        head=head,
        final_softcap=getattr(config, "final_logit_softcapping", None),
        rotary=rotary,
        pairing=_pairing(modules[0], head_dim),
        dtype=weight.dtype,
        device=weight.device,
        weight_bytes=sum(
            t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())
        ),
        positions=_positions(config),
        fingerprint=_fingerprint(model, config),
    )


def _positions(config: Any) -> int | None:
    """The longest sequence that a model is made for; None when it follows the length."""
    most = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if most is None or rope.get("rope_type") == "dynamic":
        return None
    known = rope.get("original_max_position_embeddings") or 0
    stretched = known * (rope.get("factor") or 1.0)
    return max(int(most), int(stretched))


def _fingerprint(model: Any, config: Any) -> str:
    """A name for this model's KV: models with other weights or another config do not share keys.

    Of each parameter up to 64 elements are hashed, so the cost does not grow with the model. Where
    the model was loaded from, and by which release, makes no difference.
    """
    import hashlib
    import json

    digest = hashlib.sha256(type(model).__name__.encode())
    # What transformers notes about itself when it saves or loads; class and dtype are hashed here.
    noted = {"architectures", "dtype", "torch_dtype", "transformers_version"}
    settings = {
        key: value
        for key, value in config.to_dict().items()
        if not key.startswith("_") and key not in noted
    }
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        step = max(1, flat.numel() // 64)
        digest.update(f"{name} {parameter.dtype}".encode())
        digest.update(flat[::step][:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()
