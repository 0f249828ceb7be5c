"""Where decoder layers of transformers put things: tables of names, and a layer read by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvweave.errors import Unsupported
from kvweave.runner.model.layer_spec import LayerSpec, Norm, NormOverHeads, unchanged
from kvweave.runner.model.projections import HeadProjections


@dataclass(frozen=True)
class NormForm:
    """The names of a layer's norms; None where there is none.

    `is_parallel`: the layer's feed-forward reads what its attention reads, always. Other layers
    say so by an attribute, if they do.
    """

    attention_in: str | None
    attention_out: str | None
    feed_forward_in: str | None
    feed_forward_out: str | None
    is_parallel: bool = False

    @property
    def names(self) -> set[str]:
        """All of them."""
        each = self.attention_in, self.attention_out, self.feed_forward_in, self.feed_forward_out
        return {name for name in each if name is not None}


_BEHIND = "post_attention_layernorm"
NORM_FORMS = (
    NormForm("input_layernorm", None, _BEHIND, None),
    # Gemma 2 and 3
    NormForm("input_layernorm", _BEHIND, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    # GLM 4
    NormForm("input_layernorm", "post_self_attn_layernorm", _BEHIND, "post_mlp_layernorm"),
    # Apertus
    NormForm("attention_layernorm", None, "feedforward_layernorm", None),
    # OLMo 2 and 3, EXAONE 4
    NormForm(None, _BEHIND, None, "post_feedforward_layernorm"),
    # Cohere, Phi
    NormForm("input_layernorm", None, "input_layernorm", None, is_parallel=True),
)
"""A layer is of the form that has the very norms that the layer has."""

KINDS = ("full_attention", "sliding_attention")
ATTENTIONS = ("self_attn", "attention")
OUTPUTS = ("o_proj", "dense")
FEED_FORWARDS = ("mlp", "block_sparse_moe")
APART = ("q_proj", "k_proj", "v_proj")
FUSED = {"qkv_proj": False, "query_key_value": True}
"""One module of queries, keys and values, and whether it has them head by head."""
LATENT = ("kv_a_proj_with_mqa", "kv_b_proj")
"""What keys and values are unfolded by where a few numbers stand for those of all heads."""
QUERY_NORMS = ("q_norm", "q_layernorm")
KEY_NORMS = ("k_norm", "k_layernorm")


@dataclass(frozen=True)
class HeadCounts:
    """H query heads and G KV heads of D elements each."""

    query_heads: int
    kv_heads: int
    head_dim: int


def need(owner: Any, names: str | tuple[str, ...], what: str) -> Any:
    """What an owner has by one of some names.

    # Errors
    `Unsupported` when it has none of them.
    """
    names = (names,) if isinstance(names, str) else names
    for name in names:
        if (value := getattr(owner, name, None)) is not None:
            return value
    wanted = " or ".join(f"`{name}`" for name in names)
    raise Unsupported(f"{what}: expected a module {wanted}, got {type(owner).__name__} without one")


def attention_of(layer: Any) -> Any:
    """A layer's attention module."""
    return need(layer, ATTENTIONS, "decoder layer")


def head_dim_of(attention: Any, config: Any) -> int:
    """D of an attention module."""
    said = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None)
    return int(said or config.hidden_size // config.num_attention_heads)


def layer_spec(
    layer: Any, config: Any, index: int, counts: HeadCounts, keyed_rope: bool
) -> LayerSpec:
    """Reads one decoder layer.

    # Errors
    `Unsupported` naming what is missing, or what no form has.
    """
    kind, head_dim = _layer_type(config, index), counts.head_dim
    attention, form = attention_of(layer), _norm_form(layer)
    scale = getattr(attention, "scaling", None)

    def norm(name: str | None) -> Norm | None:
        return None if name is None else need(layer, name, "decoder layer")

    return LayerSpec(
        attention=attention,
        heads=_heads(attention, counts),
        out=need(attention, OUTPUTS, "attention"),
        feed_forward=need(layer, FEED_FORWARDS, "decoder layer"),
        attention_in_norm=norm(form.attention_in) or unchanged,
        query_norm=_head_norm(attention, QUERY_NORMS, counts.query_heads, head_dim),
        key_norm=_head_norm(attention, KEY_NORMS, counts.kv_heads, head_dim),
        feed_forward_in_norm=norm(form.feed_forward_in) or unchanged,
        attention_out_norm=norm(form.attention_out),
        feed_forward_out_norm=norm(form.feed_forward_out),
        residual_scale=float(getattr(layer, "residual_multiplier", 1.0)),
        is_parallel=form.is_parallel or bool(getattr(layer, "use_parallel_residual", False)),
        scale=float(head_dim**-0.5 if scale is None else scale),
        window=_window(attention, config, kind),
        softcap=getattr(attention, "attn_logit_softcapping", None),
        sinks=_sinks(attention, counts.query_heads),
        rope_key=kind if keyed_rope else None,
        rotates=_rotates(attention, config, kind),
    )


def _norm_form(layer: Any) -> NormForm:
    has = {name for name, module in layer.named_children() if "norm" in name and module is not None}
    for form in NORM_FORMS:
        if form.names == has:
            return form
    raise Unsupported(
        f"decoder layer: expected the norms of a form that is known, got {type(layer).__name__} "
        f"with {', '.join(sorted(has)) or 'none'}"
    )


def _heads(attention: Any, counts: HeadCounts) -> HeadProjections:
    sizes = counts.query_heads, counts.kv_heads, counts.head_dim
    for name, per_head in FUSED.items():
        if hasattr(attention, name):
            return HeadProjections(attention, (name,), *sizes, per_head)
    if any(hasattr(attention, name) for name in LATENT):
        raise Unsupported(
            "attention: expected keys and values of heads (q_proj, k_proj, v_proj), "
            f"got latent attention ({type(attention).__name__})"
        )
    for name in APART:
        need(attention, name, "attention")
    return HeadProjections(attention, APART, *sizes)


def _head_norm(
    attention: Any, names: tuple[str, ...], heads: int, head_dim: int
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The norm of queries or keys [R, heads, D], whatever it takes the mean over."""
    norm = next((found for name in names if (found := getattr(attention, name, None))), None)
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None or weight.dim() != 1 or len(weight) == head_dim:
        return norm
    if len(weight) != heads * head_dim:
        raise Unsupported(
            f"norm of heads: expected a weight of {head_dim} or of {heads} times as many elements, "
            f"got {len(weight)}"
        )
    return NormOverHeads(norm)


def _sinks(attention: Any, heads: int) -> torch.Tensor | None:
    sinks = getattr(attention, "sinks", None)
    if sinks is None:
        return None
    if not isinstance(sinks, torch.Tensor) or tuple(sinks.shape) != (heads,):
        got = list(sinks.shape) if isinstance(sinks, torch.Tensor) else type(sinks).__name__
        raise Unsupported(f"attention sinks: expected a logit of each query head, got {got}")
    return sinks.detach().float()


def check_kinds(config: Any) -> None:
    """Refuses layers that do not attend to tokens one by one.

    # Errors
    `Unsupported` for a kind of layer that is neither full nor sliding attention.
    """
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in KINDS:
            raise Unsupported(f"layer type: expected {' or '.join(KINDS)}, got {kind}")


def _layer_type(config: Any, index: int) -> str | None:
    kinds = getattr(config, "layer_types", None)
    return None if kinds is None else str(kinds[index])


def _window(attention: Any, config: Any, kind: str | None) -> int | None:
    """The sliding window of a layer, or None for full attention."""
    if kind is not None:
        window = getattr(attention, "sliding_window", None) or getattr(
            config, "sliding_window", None
        )
        return int(window) if kind == "sliding_attention" and window else None
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return None
    return int(window)


def _rotates(attention: Any, config: Any, kind: str | None) -> bool:
    """Whether a layer has positions: it says so itself, or its family has none on full layers."""
    if (said := getattr(attention, "use_rope", None)) is not None:
        return bool(said)
    if config.model_type in _ROTATE_SLIDING_ALONE and getattr(config, "sliding_window", None):
        return kind == "sliding_attention"
    return True


_ROTATE_SLIDING_ALONE = ("exaone4", "cohere2")
"""Families whose full layers rotate nothing beside sliding ones, which no module of theirs says."""
