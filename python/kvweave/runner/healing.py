"""Healing: while an answer is decoded, reused tokens that it comes to look at are recomputed.

A policy chooses what to recompute from what the question looks at. An answer may come to look
elsewhere. So the queries of its steps are kept, and every few steps they are scored together:
which of the tokens that nobody recomputed does the model look at now? Where few of them hold much
of the attention on reused text, or much more than before, these are recomputed between two steps,
together with the rows behind the last segment: the question and the answer so far. Segments
themselves never change. What of the request lies in host memory is looked at layer by layer, where
it is, and has to come back only to be recomputed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvweave.arguments import real, shown, whole
from kvweave.device_memory import needs_memory
from kvweave.errors import InvalidArgument, PoolFull
from kvweave.plan import Rows, one_pass
from kvweave.policies.depth import first_layer
from kvweave.policies.row_sets import averaged, highest, scores_of, union
from kvweave.runner.decode.decoding import Decoding
from kvweave.runner.kv.request_kv import RequestKv
from kvweave.runner.kv.reused_tokens import positions_of
from kvweave.runner.kv.tables import send_index
from kvweave.runner.prefill import probes
from kvweave.runner.prefill.flops import FlopCount
from kvweave.runner.prefill.prefill import Prefiller
from kvweave.runner.prefill.prefilled import Prefill
from kvweave.runner.report import HealingReport


@dataclass(frozen=True)
class Healing:
    """When an answer is healed, and how much of it.

    Every `every` tokens the attention of these is measured in the layers from a share `depth` of
    them on, and averaged over `near` tokens of the text to rank by. `share` of the reused tokens at
    most are candidates: those never recomputed that hold the most of it. They are recomputed when
    they hold more than `bound` of all attention on reused tokens, or `rise` more than the same
    tokens held on average when it was measured before (1 and 1: never; a bound of 0: always). So
    what is looked at a little everywhere heals nothing, since nothing would be gained, and what the
    policy saw and left does not heal again and again. `most`: of the reused tokens, a share that
    all healings of an answer recompute together.

    With a share of 1 every row behind the first of them is recomputed, also those that were before:
    the KV is then that of a full prefill.
    """

    every: int = 16
    bound: float = 0.5
    rise: float = 0.12
    share: float = 0.05
    most: float = 0.05
    depth: float = 1 / 3
    near: int = 3

    def __post_init__(self) -> None:
        whole("healing", self.every, 1, name="every")
        for name in ("bound", "rise", "share", "most", "depth"):
            real("healing", getattr(self, name), 0.0, 1.0, name=name)
        if whole("healing", self.near, 1, name="near") % 2 == 0:
            raise InvalidArgument(f"healing: expected an odd near >= 1, got {self.near}")


def check_healing(healing: Any) -> None:
    """Raises InvalidArgument for what is neither None nor a `Healing`."""
    if healing is not None and not isinstance(healing, Healing):
        raise InvalidArgument(f"healing: expected a Healing or None, got {shown(healing)}")


class Watch:
    """A prompt under watch while it is decoded from.

    # Errors
    `InvalidArgument` for a prompt that later prompts may find already: it is not written any more.
    """

    def __init__(self, done: Prefill, sequence: Decoding, settings: Healing) -> None:
        if done.lookup.at_once:
            raise InvalidArgument(
                "healing: expected a prompt that others cannot find yet, got one to remember; "
                "prefill it with remember=False"
            )
        self.done = done
        self.sequence = sequence
        self.settings = settings
        self.report = HealingReport()
        self.stopped = False
        self._kept: list[torch.Tensor] = []
        self._shares: torch.Tensor | None = None
        done.report.healing = self.report

    @property
    def budget(self) -> int:
        """The most tokens that may be recomputed next."""
        settings, reused = self.settings, self.done.reused
        all_together = round(settings.most * reused.count) - self.report.recomputed
        return max(0, min(round(settings.share * reused.count), all_together, len(reused.left)))

    @property
    def goes_on(self) -> bool:
        """Whether the queries of the next step are wanted."""
        return not self.stopped and self.budget > 0

    def go_on(self, done: Prefill) -> None:
        """Watches the same answer behind its prompt that was prefilled anew.

        What was healed has to be found again, within what is left of `most`.
        """
        self.done, self.stopped = done, False
        self._kept, self._shares = [], None
        done.report.healing = self.report

    def keep(self, queries: torch.Tensor) -> bool:
        """Keeps the queries [L, H, D] of one step; whether it is time to look at them."""
        self._kept.append(queries)
        return len(self._kept) >= self.settings.every and not self.sequence.done

    def take(self) -> torch.Tensor:
        """The queries [L, n, H, D] of the steps since the last time."""
        kept, self._kept = self._kept, []
        return torch.stack(kept, 1)

    def compare(self, shares: torch.Tensor) -> torch.Tensor:
        """What was held more than before by each reused token, from what each holds now, f32 [N].

        What they hold now counts among what was before from the next time on. The first time
        nothing is more.
        """
        times = self.report.watched
        before = shares if self._shares is None else self._shares
        self._shares = before + (shares - before) / (times + 1)
        return shares - before

    def refuse(self, reason: str) -> bool:
        """Takes note that nothing can be healed."""
        self.report.refuse(reason)
        return False


class Healer:
    """Looks at what answers look at, and recomputes, for one request at a time."""

    def __init__(self, prefiller: Prefiller) -> None:
        self.prefiller = prefiller
        self.spec = prefiller.spec

    @needs_memory("healing")
    @torch.inference_mode()
    def look(self, watch: Watch) -> bool:
        """Scores the kept queries and heals if they say so: whether it did.

        # Errors
        `OutOfMemory` when it finds no room, `TransferFailed` for pages that could not be had of
        host memory: the request is to be released.
        """
        done, queries = watch.done, watch.take()
        request, pre = done.request, self.prefiller
        positions = pre.rotary.table(request.length)
        if positions.regime != done.positions.regime:
            watch.stopped = True
            return watch.refuse("frequencies")
        known = pre.heads, pre.pages, request, positions, done.kv.rotates
        kv = RequestKv(*known, host=done.kv.host)
        candidates = self._candidates(kv, watch)
        if not len(candidates):
            watch.stopped = True
            return watch.refuse("windows")
        start = time.perf_counter()
        chosen, held, risen = self._choose(kv, watch, candidates, queries)
        watch.report.watch_s += time.perf_counter() - start
        watch.report.watched += 1
        watch.report.held.append(held)
        watch.report.risen.append(risen)
        if not (held > watch.settings.bound or risen > watch.settings.rise):
            return False
        return self._heal(kv, watch, chosen)

    def _candidates(self, kv: RequestKv, watch: Watch) -> Rows:
        """Tokens never recomputed that can be, with all rows that have to follow."""
        reused, length = watch.done.reused, kv.request.length
        if kv.heads.uniform:
            return reused.left
        whole = kv.computable()
        behind = self._behind(watch, 0, length)
        broken = behind[~whole[behind]]
        first = int(broken[-1]) + 1 if len(broken) else 0
        left = reused.left[np.searchsorted(reused.left, first) :]
        return left[whole[left]]

    def _behind(self, watch: Watch, first: int, end: int) -> Rows:
        """The rows in [first, end) that are computed again with tokens before them."""
        if watch.settings.share < 1.0:
            first = max(first, watch.done.reused.segments[-1][1])
        return np.arange(max(first, watch.done.report.reused_prefix), end, dtype=np.int32)

    def _choose(
        self, kv: RequestKv, watch: Watch, candidates: Rows, queries: torch.Tensor
    ) -> tuple[Rows, float, float]:
        """The candidates most looked at, the share that they hold, and how much more it is now."""
        settings, reused = watch.settings, positions_of(watch.done.reused.segments)
        since = first_layer(settings.depth, len(queries))
        # A window group no longer has all that the older queries saw just before them; what they
        # look at in reused text is there or was not kept for them either.
        mass = probes.mass_of_layers(kv, queries, since)
        self._count(kv, watch, queries.shape[1], since)
        among = scores_of(averaged(mass, settings.near), candidates)
        chosen = highest(among, candidates, watch.budget)
        shares = torch.nan_to_num(scores_of(mass, reused), nan=0.0, posinf=0.0, neginf=0.0)
        shares = shares / shares.sum().clamp_min(torch.finfo(shares.dtype).tiny)
        places = np.searchsorted(reused, chosen)
        parts = [scores_of(some, places).sum() for some in (shares, watch.compare(shares))]
        held, risen = torch.stack(parts).tolist()
        return chosen, min(1.0, held), risen

    def _count(self, kv: RequestKv, watch: Watch, tokens: int, since: int) -> None:
        counted, rows = FlopCount(self.prefiller.executor.weights), kv.newest(tokens)
        for layer in range(since, len(self.spec.layers)):
            counted.score(rows, kv.layer_heads(layer).seen)
        watch.report.watch_flops += sum(counted.parts.values())

    def _heal(self, kv: RequestKv, watch: Watch, chosen: Rows) -> bool:
        """Computes the chosen tokens, and what follows them, in one pass over the KV."""
        start, request, pre = time.perf_counter(), kv.request, self.prefiller
        rows = union(chosen, self._behind(watch, int(chosen[0]), request.length))
        try:
            watch.done.bring_back()
            kv.forget_copies()
            kv.own(rows, None)
        except PoolFull:
            return watch.refuse("no room")
        ids = send_index(self.spec.device, request.tokens).long()
        with self.spec.current():
            plans = one_pass(len(self.spec.layers), rows)
            _, trace = pre.executor.prefill(kv, ids, plans, request.length - 1)
        pre.clock.wait()
        watch.done.kv = kv
        watch.report.healed += 1
        watch.report.recomputed += watch.done.reused.settle(rows)
        watch.report.heal_flops += sum(trace.flops.values())
        watch.report.heal_s += time.perf_counter() - start
        return True
