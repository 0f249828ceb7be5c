"""What attention over some of the keys leaves, and how parts are put together."""

from __future__ import annotations

import torch

from kvweave import ops

States = tuple[torch.Tensor, torch.Tensor]
"""Attention over some of the keys: out [R, H, D], and its log-sum-exp f32 [R, H]."""


def merged_states(*states: States) -> States:
    """Attention over all of the keys of some parts."""
    outs, lses = zip(*states, strict=True)
    return ops.merge_states(torch.stack(outs), torch.stack(lses))
