"""How far apart two distributions over the next token are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvweave.errors import InvalidArgument

Floats = npt.NDArray[np.float64]

_ROWS = 64
"""Rows whose distributions are held in f64 at once: a vocabulary has up to 250,000 tokens."""


def kl_per_token(reference: torch.Tensor, other: torch.Tensor) -> Floats:
    """KL(reference ‖ other) in nats at each of n tokens, from logits [n, V] each; f64 [n].

    Raises InvalidArgument when the shapes differ.
    """
    if reference.shape != other.shape or reference.ndim != 2:
        raise InvalidArgument(
            f"logits: expected two of one shape [n, V], got {list(reference.shape)} and "
            f"{list(other.shape)}"
        )
    found = [np.zeros(0)]
    for start in range(0, len(reference), _ROWS):
        p = torch.log_softmax(reference[start : start + _ROWS].double(), dim=-1)
        q = torch.log_softmax(other[start : start + _ROWS].double(), dim=-1)
        # A token that the reference excludes (−inf) adds nothing, whatever the other says.
        terms = torch.where(p == -torch.inf, 0.0, p.exp() * (p - q))
        # Rounding may leave a hair below zero where the two are equal.
        found.append(terms.sum(-1).clamp_min(0.0).cpu().numpy())
    return np.concatenate(found)
