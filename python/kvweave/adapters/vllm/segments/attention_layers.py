"""vLLM's attention layers as a step of segments needs them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvweave.adapters.vllm.backend.attention import PagedAttention


@dataclass
class AttentionLayers:
    """vLLM's attention of each layer: its name, what attends, its pages [pages, 2, P, D]."""

    names: list[str]
    attends: list[PagedAttention]
    pages: list[torch.Tensor]
