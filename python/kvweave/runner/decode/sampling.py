"""Choosing the next token: greedy, or temperature with top-k and top-p, seeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvweave.arguments import real, whole
from kvweave.errors import InvalidArgument

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sampling:
    """How to choose a token. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        real("temperature", self.temperature, 0.0)
        if not 0.0 < real("top_p", self.top_p) <= 1.0:
            raise InvalidArgument(f"top_p: expected 0 < top_p <= 1, got {self.top_p}")
        whole("top_k", self.top_k, 0)
        whole("seed", self.seed, -(2**63), 2**64 - 1)

    def generator(self, device: torch.device) -> torch.Generator:
        """A generator of this request's own, so that batching does not change its draws.

        Its numbers depend on the kind of device.
        """
        return torch.Generator(device).manual_seed(self.seed)

    def pick(self, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The next token id, i64 [], from logits [V]; nothing waits for the device."""
        if self.temperature == 0.0:
            return logits.argmax()
        # From the highest down, so that no temperature turns it into infinity; what is colder than
        # the least normal number tells apart no more.
        below = logits.float() - logits.float().max()
        scaled = below / max(self.temperature, torch.finfo(torch.float32).tiny)
        if self.top_k:
            kth = torch.topk(scaled, min(self.top_k, scaled.numel())).values[-1]
            scaled = scaled.masked_fill(scaled < kth, -torch.inf)
        probabilities = torch.softmax(scaled, dim=-1)
        if self.top_p < 1.0:
            probabilities = _nucleus(probabilities, self.top_p)
        return torch.multinomial(probabilities, 1, generator=generator)[0]


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keeps the fewest most likely tokens whose mass reaches `top_p`."""
    ordered, order = probabilities.sort(descending=True)
    kept = (ordered.cumsum(0) - ordered) < top_p
    return torch.zeros_like(probabilities).scatter(0, order, ordered * kept)


def check_token(token: int, vocabulary: int) -> None:
    """Raises InvalidArgument for a token that is none: it would fail the next step of all."""
    if not 0 <= token < vocabulary:
        raise InvalidArgument(f"sampling: expected a token below {vocabulary}, got {token}")


class Chooser(Protocol):
    """A sequence whose next token is chosen: its settings, draws, and tokens so far."""

    sampling: Sampling
    generator: torch.Generator
    tokens: list[int]


def is_greedy(batch: Sequence[Chooser]) -> bool:
    """Whether every one of them takes the likeliest token."""
    return all(type(s.sampling) is Sampling and s.sampling.temperature == 0.0 for s in batch)


def choose_all(batch: Sequence[Chooser], logits: torch.Tensor, greedy: bool) -> Int64:
    """The next token i64 [B] of each row of logits [B, V]: one wait for the device, whatever B.

    `greedy`: as `is_greedy` says of the batch.
    """
    if greedy:
        picked = logits.argmax(-1)
    else:
        rows = zip(batch, logits, strict=True)
        picked = torch.stack([s.sampling.pick(row, s.generator) for s, row in rows])
    chosen: Int64 = picked.cpu().numpy()
    for sequence, token in zip(batch, chosen.tolist(), strict=True):
        sequence.tokens.append(token)
    return chosen
