"""A model whose layers multiply by matrices that lie side by side, see `joined`."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvweave.runner.model.joined import gated, joined
from kvweave.runner.model.model_spec import ModelSpec


def with_joined_products(spec: ModelSpec) -> ModelSpec:
    """The same model, with what its layers multiply by the same rows side by side in memory.

    The weights of one layer are there twice while they are moved.
    """
    layers = []
    for layer in spec.layers:
        apart = layer.heads.are_apart
        heads = joined(layer.heads.owner, *layer.heads.names) if apart else None
        layers.append(replace(layer, joined_heads=heads, gated=gated(layer.feed_forward)))
        if spec.device.type == "cuda":
            # The room that the parts leave is too small for the next whole, and would be kept.
            torch.cuda.empty_cache()
    return replace(spec, layers=tuple(layers))
