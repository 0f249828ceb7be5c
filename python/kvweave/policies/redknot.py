"""`redknot`: recompute the global heads of every token, spare local heads and feed-forwards.

RedKnot §4.2, Algorithm 1. Every token after the exact prefix has hidden states in every layer.
Global heads (full ones in the head map) get new K, V under the new prefix; local heads keep the
reused K, V, their keys moved to the new positions, and read sink and window alone. The first
layers run the feed-forward on all tokens, later ones on the tokens that matter by attention mass,
and the others keep their residual. A local head whose attention lies too much outside sink and
window is full for the rest of the request (§1, adaptive restore).

Where the paper leaves room:

- Which local K, V are repaired. A token i sees W(i) = sink ∪ [i − w, i]. Deeper than w inside a
  segment that is what it saw when the segment was encoded alone; nearer its start W(i) holds text
  that it has never seen. So the first w rows of a segment are repaired (the authors' code does so
  for hybrid models), and what the last token sees, from where all generated tokens go on: the
  paper's example of sink and positions 744 to 1000 for i = 1000.
- What importance is. "The recovered attention signal" is here the mass that a token gets; the
  authors' code takes the norm of its attention output. Rows that run the feed-forward anyway do
  not count: among them are sinks, of which one may hold more than half of all mass.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from kvweave.arguments import real, whole
from kvweave.plan import LayerPlan, Probe, ProbeResult, PromptView, Rows, Salience
from kvweave.policies.base import Reuse
from kvweave.policies.row_sets import TAIL, heaviest, index_at, openings, tail, union


@dataclass(frozen=True)
class RedKnot:
    """Head-aware recovery with a sparse feed-forward.

    `dense_until`: share of the layers whose feed-forward is dense. The paper has 20 layers for all
    its models: 20 of 32 for Mistral-7B, the smallest, 20 of 80 for Llama-3.3-70B. `mass_thresh`:
    share of the mass on reused rows that the rows chosen for the feed-forward hold together, at
    least. `recent_n`: the last rows always run it, and the last fresh rows ask. `ffn_share`: share
    of the rows that run it, at most; fresh and recent rows always do. `repair`: rows at a segment's
    start and at the prompt's end whose local K, V are computed again; None: as many as the layer's
    widest window, 0: fresh rows alone. `restore_edge`: mean share of a local head's attention
    outside sink and window above which it is restored; 1 never is.
    """

    dense_until: float = 0.625
    mass_thresh: float = 0.5
    recent_n: int = 128
    ffn_share: float = 0.25
    repair: int | None = None
    restore_edge: float = 0.5
    name: ClassVar[str] = "redknot"
    reuse: ClassVar[Reuse] = "segments"
    delta_rope: ClassVar[bool] = True
    passes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for field in ("dense_until", "mass_thresh", "ffn_share", "restore_edge"):
            real("redknot", getattr(self, field), 0.0, 1.0, name=field)
        whole("redknot", self.recent_n, 1, name="recent_n")
        if self.repair is not None:
            whole("redknot", self.repair, 0, name="repair")

    @property
    def measures(self) -> bool:
        """Whether any layer may be asked what matters in it."""
        return self.dense_until < 1.0 or self.restore_edge < 1.0

    def rewrites_segments(self, layers: int) -> bool:
        """Global heads of every token are written, local heads' are not: blocks are per group."""
        return False

    def dense_layers(self, layers: int) -> int:
        """How many of a model's layers have a dense feed-forward."""
        return round(self.dense_until * layers)

    def plan(self, prompt: PromptView) -> Generator[LayerPlan, ProbeResult, None]:
        """All rows in all layers."""
        rows, dense = prompt.unsettled, self.dense_layers(prompt.layers)
        recovery = Recovery(self, prompt)
        for layer in range(prompt.layers):
            yield from recovery.plans(LayerPlan(layer, rows), layer >= dense)


class Recovery:
    """RedKnot's choices in the layers of one prompt, of rows that it or another policy chose.

    Layers mostly plan the very same rows, so what follows from these alone is kept.
    """

    def __init__(self, policy: RedKnot, prompt: PromptView) -> None:
        self.policy = policy
        self.prompt = prompt
        self._rows: Rows | None = None
        self._always = self._others = self._asked = np.zeros(0, np.int32)
        self._where: torch.Tensor | None = None
        self._repaired: dict[tuple[int, int], Rows] = {}

    def plans(self, plan: LayerPlan, sparse: bool) -> Generator[LayerPlan, ProbeResult, LayerPlan]:
        """A layer's plan with the heads that are spared.

        `sparse`: only rows that matter run the feed-forward. Yields one plan, or two with a
        measurement between them; returns the last.
        """
        policy = self.policy
        self._derive_row_sets(plan.rows)
        plan = replace(plan, local_rows=self.repaired(plan))
        local = self.prompt.heads[plan.layer, :, 0] > 0
        sparse = sparse and len(self._others) > 0
        if sparse or (policy.restore_edge < 1.0 and local.any()):
            found = yield replace(plan, probe=Probe.SALIENCE, score_rows=self._asked)
            assert isinstance(found, Salience)
            room = round(policy.ffn_share * len(plan.rows)) - len(self._always) if sparse else 0
            mass = found.mass.index_select(0, self._index(found.mass.device))
            at_most = max(0, room)
            chosen, edge = heaviest(mass, self._others, policy.mass_thresh, at_most, found.edge)
            restore = np.flatnonzero(local & (edge > policy.restore_edge))
            plan = replace(
                plan,
                ffn_rows=union(self._always, chosen) if sparse else None,
                restore=tuple(int(head) for head in restore),
            )
        yield plan
        return plan

    def repaired(self, plan: LayerPlan) -> Rows | None:
        """Rows of a layer whose local K, V are computed again; None: it has no local heads."""
        self._derive_row_sets(plan.rows)
        local = self.prompt.heads[plan.layer]
        local = local[local[:, 0] > 0]
        if len(local) == 0:
            return None
        repair = self.policy.repair
        window = int(local[:, 0].max()) if repair is None else repair
        sink = int(local[:, 1].max()) if window else 0
        if (window, sink) not in self._repaired:
            self._repaired[window, sink] = self._repairs(window, sink, plan.rows)
        return self._repaired[window, sink]

    def _repairs(self, window: int, sink: int, rows: Rows) -> Rows:
        first = np.arange(sink, dtype=np.int32)
        tokens = self.prompt.tokens
        last = np.arange(max(0, tokens - window), tokens, dtype=np.int32)
        wanted = union(self.prompt.fresh, openings(self.prompt, window), first, last)
        both: Rows = np.intersect1d(wanted, rows, assume_unique=True)
        return both

    def _derive_row_sets(self, rows: Rows) -> None:
        """What follows from a layer's rows.

        Rows that run every feed-forward, the others, and those whose queries ask what matters.
        """
        if rows is self._rows:
            return
        fresh, recent = self.prompt.fresh, self.policy.recent_n
        self._rows, self._where, self._repaired = rows, None, {}
        # The last pass of a policy that looked first may leave out fresh rows that it computed.
        always = union(fresh, rows[-recent:])
        self._always = np.intersect1d(always, rows, assume_unique=True)
        self._others = np.setdiff1d(rows, self._always, assume_unique=True)
        asked = union(fresh[-recent:], tail(self.prompt, TAIL))
        self._asked = np.intersect1d(asked, rows, assume_unique=True)

    def _index(self, device: torch.device) -> torch.Tensor:
        """The others, where masses are."""
        if self._where is None or self._where.device != device:
            self._where = index_at(device, self._others)
        return self._where
