"""A request while it decodes, and how the next tokens of a batch are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvweave.cache import KvRequest
from kvweave.runner.report import Timings
from kvweave.runner.request_kv import RequestKv
from kvweave.runner.rope import PositionTable
from kvweave.runner.sampling import Sampling


@dataclass(eq=False)
class Decoding:
    """One request while it decodes: what it has said and how it goes on.

    `tokens` are the generated ids; the last of them has no KV yet. `device` is the logits'. The
    time of its steps is added to `timings`. `forked`: the KV of a fork, whose shared blocks are
    copied as they come to be written.
    """

    request: KvRequest
    positions: PositionTable
    sampling: Sampling
    limit: int
    device: torch.device
    stop: frozenset[int] = frozenset()
    timings: Timings = field(default_factory=Timings)
    forked: RequestKv | None = None
    tokens: list[int] = field(default_factory=list)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = self.sampling.generator(self.device)

    @property
    def done(self) -> bool:
        """Whether the limit or a stop token was reached."""
        return len(self.tokens) >= self.limit or (
            bool(self.tokens) and self.tokens[-1] in self.stop
        )

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return max(0, self.limit - len(self.tokens))

    def choose(self, logits: torch.Tensor) -> int:
        """Samples from logits [V] and remembers the token."""
        self.tokens.append(int(self.sampling.pick(logits, self.generator)))
        return self.tokens[-1]


def choose_all(batch: Sequence[Decoding], logits: torch.Tensor) -> list[int]:
    """The next token of each row of logits [B, V]: one wait for the device, whatever B."""
    if all(type(s.sampling) is Sampling and s.sampling.temperature == 0.0 for s in batch):
        picked = logits.argmax(-1)
    else:
        rows = zip(batch, logits, strict=True)
        picked = torch.stack([s.sampling.pick(row, s.generator) for s, row in rows])
    chosen: list[int] = picked.tolist()
    for sequence, token in zip(batch, chosen, strict=True):
        sequence.tokens.append(token)
    return chosen


def by_regime(batch: Sequence[Decoding]) -> list[list[Decoding]]:
    """Sequences that can share a step: those whose tables and frequencies are of one kind.

    Their keys were rotated by the same frequencies, and the same heads were made full for them.
    """
    groups: dict[Any, list[Decoding]] = {}
    for sequence in batch:
        kind = (sequence.positions.regime, tuple(sequence.request.promoted))
        groups.setdefault(kind, []).append(sequence)
    return list(groups.values())
