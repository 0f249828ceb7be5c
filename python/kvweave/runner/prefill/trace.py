"""What the executor did in one prefill, pass by pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kvweave.plan import Rows
from kvweave.runner.clock import Clock, Mark
from kvweave.runner.prefill.flops import PARTS, FlopCount, ModelWeights
from kvweave.runner.report import PassReport

PassKind = Literal["layers", "draft"]


@dataclass
class PassTrace:
    """One way through the layers, or one draft: rows computed per layer [L], FLOPs, its time.

    `tokens`: of a draft, how many were decoded; 0 when there was no room for any.
    """

    kind: PassKind
    rows_per_layer: list[int]
    flops: FlopCount
    begun: Mark
    ended: Mark
    tokens: int = 0

    def report(self) -> PassReport:
        """The same for the report, once all is done: see `Clock.wait`."""
        seconds = Clock.seconds(self.begun, self.ended)
        return PassReport(self.kind, self.rows_per_layer, self.flops.parts, seconds, self.tokens)


@dataclass
class Trace:
    """What the executor did.

    `passes` in order. The most rows that a layer computed at once, when probes began and choices
    ended, the (layer, KV head) pairs restored and those that could not be. `exact`: tokens before
    the first whose KV is not that of a full prefill, where what was reused is. `recomputed`: the
    rows that the last pass computed in its last layer, all chunks together.
    """

    weights: ModelWeights
    exact: int
    passes: list[PassTrace] = field(default_factory=list)
    most_rows: int = 0
    selections: list[tuple[Mark, Mark]] = field(default_factory=list)
    restored: list[tuple[int, int]] = field(default_factory=list)
    refused: list[tuple[int, int]] = field(default_factory=list)
    recomputed: Rows = field(default_factory=lambda: np.zeros(0, np.int32))

    def begin(self, kind: PassKind, now: Mark, tokens: int = 0) -> PassTrace:
        """Another pass, or a draft of some tokens."""
        rows = [0] * len(self.weights.layers)
        self.passes.append(PassTrace(kind, rows, FlopCount(self.weights), now, now, tokens))
        return self.passes[-1]

    @property
    def current(self) -> PassTrace:
        """The pass that is being carried out."""
        return self.passes[-1]

    @property
    def rows_per_layer(self) -> list[int]:
        """Rows of the prompt computed in each layer [L], by all passes together."""
        passes = [one.rows_per_layer for one in self.passes if one.kind == "layers"]
        return [sum(rows) for rows in zip(*passes, strict=True)]

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs of all passes and drafts, by part."""
        return {part: sum(one.flops.parts[part] for one in self.passes) for part in PARTS}
