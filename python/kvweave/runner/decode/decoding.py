"""A request while it decodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kvweave.cache import KvRequest
from kvweave.runner.decode.sampling import Sampling
from kvweave.runner.kv.host_pages import HostPages
from kvweave.runner.kv.packed_prefix import PackedPrefix
from kvweave.runner.model.rope import PositionTable
from kvweave.runner.report import SpeculationReport, Timings


@dataclass(eq=False)
class Decoding:
    """One request while it decodes: what it has said and how it goes on.

    `tokens` are the generated ids; the last of them has no KV yet. `device` is the logits'. The
    time of its steps is added to `timings`. `packed`: its packed pages, where the runner has any.
    `host`: what may lie in host memory, by head group. `speculation`: what came of drafts.
    """

    request: KvRequest
    positions: PositionTable
    sampling: Sampling
    limit: int
    device: torch.device
    stop: frozenset[int] = frozenset()
    timings: Timings = field(default_factory=Timings)
    tokens: list[int] = field(default_factory=list)
    packed: PackedPrefix | None = None
    host: Mapping[int, HostPages] = field(default_factory=dict)
    speculation: SpeculationReport = field(default_factory=SpeculationReport)
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

    def release(self) -> None:
        """Gives back what it has on the device and in host memory; safe to call twice."""
        for pages in self.host.values():
            pages.release()
        self.request.release()

    def choose(self, logits: torch.Tensor) -> int:
        """Samples from logits [V] and remembers the token."""
        self.tokens.append(int(self.sampling.pick(logits, self.generator)))
        return self.tokens[-1]


def by_regime(batch: Sequence[Decoding]) -> list[list[Decoding]]:
    """Sequences that can share a step: those whose keys were rotated by the same frequencies."""
    groups: dict[int, list[Decoding]] = {}
    if len({sequence.positions.regime for sequence in batch}) == 1:
        return [list(batch)]
    for sequence in batch:
        groups.setdefault(sequence.positions.regime, []).append(sequence)
    return list(groups.values())
