"""RMS norms in one launch on a GPU, where that gives what the model's own module gives.

transformers writes a norm as seven elementwise steps, each a pass over the hidden states in f32:
on a GPU they cost as much as a projection. Modules are found by structure and proved by numbers;
one that does something else (Gemma's 1 + weight, a layer norm) stays as it is.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvweave.runner.model.layer_spec import LayerSpec, Norm, NormOverHeads
from kvweave.runner.model.model_spec import ModelSpec

_ROWS = 64
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Two roundings against one, as a share of the largest element."""


def with_fused_norms(spec: ModelSpec) -> ModelSpec:
    """The same model with its norms fused where that may be."""
    layers = tuple(_with_fused_norms(layer, spec) for layer in spec.layers)
    return replace(spec, layers=layers, final_norm=fused(spec.final_norm, spec))


def _with_fused_norms(layer: LayerSpec, spec: ModelSpec) -> LayerSpec:
    def optional(norm: Norm | None) -> Norm | None:
        return None if norm is None else fused(norm, spec)

    return replace(
        layer,
        attention_in_norm=fused(layer.attention_in_norm, spec),
        query_norm=optional(layer.query_norm),
        key_norm=optional(layer.key_norm),
        feed_forward_in_norm=fused(layer.feed_forward_in_norm, spec),
        attention_out_norm=optional(layer.attention_out_norm),
        feed_forward_out_norm=optional(layer.feed_forward_out_norm),
    )


def fused(norm: Norm, spec: ModelSpec) -> Norm:
    """One launch that does what a norm does, or the norm itself."""
    if isinstance(norm, NormOverHeads):
        return NormOverHeads(fused(norm.norm, spec))
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, torch.Tensor) or not isinstance(eps, float):
        return norm
    if weight.dim() != 1 or weight.dtype != spec.dtype:
        return norm
    shape = list(weight.shape)

    def one_launch(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, shape, weight, eps)

    generator = torch.Generator(spec.device).manual_seed(0)
    x = torch.randn(_ROWS, *shape, generator=generator, device=spec.device).to(spec.dtype)
    own, ours = norm(x).float(), one_launch(x).float()
    apart = float((own - ours).abs().max() / own.abs().max().clamp_min(1e-6))
    return one_launch if apart <= _TOLERANCE[spec.dtype] else norm
