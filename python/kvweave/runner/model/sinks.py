"""Attention sinks: of each query head the logit of a key that has no value (GPT-OSS)."""

from __future__ import annotations

import torch


def beside_sinks(
    attended: tuple[torch.Tensor, torch.Tensor], sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention [R, H, D] where each head's sink takes its share of it.

    `attended`: out [R, H, D] and lse f32 [R, H] over the keys alone; `sinks` [H], or None. Of
    exp(lse) + exp(sink) the sink's share goes to no value, so what is left is scaled.
    """
    out, lse = attended
    if sinks is None:
        return out
    return out * torch.sigmoid(lse - sinks.float())[..., None].to(out.dtype)
