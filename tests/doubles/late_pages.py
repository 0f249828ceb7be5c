"""Rankings that take effect late: their definition, and pages that come over as late as may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from decode_batches import decoding
from kvweave.runner import Runner
from kvweave.runner.decode.chosen_tables import ChosenTables
from kvweave.runner.decode.decoding import Decoding
from kvweave.runner.kv.aside import Arrival
from kvweave.runner.kv.host_pool import HostPool
from kvweave.runner.kv.page_budget import PageBudget
from ranked_pages import FULL, WINDOW, best_pages, page_score, stored_tokens, top_k

Scores = Callable[[], list[float]]


MIXED = [top_k(4, 5), FULL, top_k(6, 3), WINDOW, top_k(4)]
KINDS = [[top_k(4, 5)], [top_k(5, 16), FULL], MIXED, [WINDOW, top_k(5, 2)], [top_k(8, 9)]]
"""What heads are, in maps whose rankings may be late."""


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def happening(length: int, steps: int, page: int, leaves: set[int]) -> dict[int, str]:
    """Before which steps a lone request leaves, or its table outgrows its room.

    That is a power of two from 16 on, for one entry more than it has when it joins or moves.
    """
    found, room = dict[int, str](), 0
    for step in range(steps):
        entries = (length + step) // page + 1
        if step in leaves:
            found[step], room = "leaves", 0
        elif entries > room and step:
            found[step] = "moved"
        if entries > room:
            room = max(16, 1 << entries.bit_length())
    return found


class LateBudget:
    """Which pages each head of one budget reads, by its rank, step by step of one request.

    `home`: how many first pages lie in the host's memory, of a budget that is not ranked at every
    step: those that are spilled behind its first ranking, copied at once, before a second one in
    the next step, or else before the one that is due, and behind each one from then on.
    `slots`: the page that each slot of a head holds. `waits`: pages come over when the next ranking
    waits for them, else before the step behind the one that ranks. `whole`: they do so in any case,
    as the request sits steps out till then; its pages leave before a ranking that is due, and by
    no other.
    """

    def __init__(self, budget: PageBudget, page: int, waits: bool, whole: bool) -> None:
        self.budget, self.page, self.waits, self.whole = budget, page, waits and not whole, whole
        self.room = budget.pages + -(-budget.pages // 8)
        self.position = self.count = self.listed = self.home = 0
        self.ranked: int | None = None
        self.now, self.came = "all", False
        self.slots: dict[int, list[int | None]] = {}
        self.lists: dict[int, list[int]] = {}
        self.there: dict[int, list[int]] = {}
        self.chosen: dict[int, list[int]] = {}
        self.missed = 0

    def happens(self, what: str) -> None:
        """What happens to the request between two steps, after which it is ranked anew.

        Its table is "moved", it "leaves" the batch, which forgets what its slots hold, or all of
        its pages are brought "back", which changes nothing while none is away. Or pages that are on
        their way have "come", and nothing is ranked anew.
        """
        if what == "come":
            self.came = True
            return
        if what == "back" and not self.home and not self._leaves():
            return
        self._end()
        self.ranked, self.now = None, "all"
        if what != "moved":
            self.slots = {}
        if what == "back":
            self.home = 0

    def begin(self, position: int) -> None:
        """The step of the token at a position."""
        if position == self.position:
            return
        self._end()
        late = self.waits and not self.came
        late = late and self.now in ("ranks late", "reads what is there")
        self.came = False
        self.now = "reads what is there" if late else "goes on"
        self.position, self.count = position, position // self.page + 1
        if self.count <= self.budget.pages:
            self.now = "all"
        elif self.ranked is None or position - self.ranked >= self.budget.every:
            if self.ranked is not None and self.home > 0:
                self.now = "ranks late"
                return
            self.now, self.ranked, self.listed = "ranks", position, self.count

    def come_within(self) -> None:
        """Pages that were on their way have come when some layers of a step are computed."""
        if self.now == "reads what is there":
            self.now = "goes on"

    def reads(self, rank: int, scores: Scores) -> list[int]:
        """The pages that a head reads in this step."""
        if self.now == "all":
            return list(range(self.count))
        if self.now == "ranks":
            self.lists[rank] = best_pages(scores(), self.budget.pages)
            self._recycle(rank, self.lists[rank])
        if self.now == "ranks late":
            self.chosen[rank] = best_pages(scores(), self.budget.pages)
        read = self.there if self.now == "reads what is there" else self.lists
        return [*read[rank], *range(self.listed, self.count)]

    def _end(self) -> None:
        """Behind a step: brings what it ranked, or spills before a ranking that is exact then."""
        if self.now == "ranks late":
            self._bring()
        elif self._leaves():
            self.home, self.slots, self.ranked = self.position // self.page, {}, None

    def _leaves(self) -> bool:
        """Whether first pages leave the device behind this step."""
        if self.ranked is None or self.home or self.budget.every == 1:
            return False
        since = self.position - self.ranked
        soon = (since == 0 and not self.whole) or since + 1 >= self.budget.every
        return soon and self.position // self.page > self.room

    def _bring(self) -> None:
        before, self.home = self.home, max(self.home, self.position // self.page)
        self.ranked, self.listed = self.position, self.count
        for rank, chosen in self.chosen.items():
            held = self._held(rank)
            self.there[rank] = [page for page in chosen if page in held or page >= before]
            self.missed += len(chosen) - len(self.there[rank])
            self._recycle(rank, chosen)
            self.lists[rank] = chosen

    def _held(self, rank: int) -> list[int | None]:
        return self.slots.setdefault(rank, [None] * self.room)

    def _recycle(self, rank: int, chosen: list[int]) -> None:
        held = self._held(rank)
        for page in chosen:
            if page < self.home and page not in held:
                free = next(n for n, other in enumerate(held) if other not in chosen)
                held[free] = page


class LateDefinition:
    """What a lone request reads by `LateBudget`, of a runner whose pages all lie on the device."""

    def __init__(
        self,
        runner: Runner,
        sequence: Decoding,
        waits: bool,
        within: Mapping[int, int],
        whole: bool = False,
    ) -> None:
        # By position the layer before which pages have come over.
        self.within = within
        self.runner, self.sequence = runner, sequence
        self.page = int(runner.cache.shape.page_tokens)
        heads = runner._decoder.heads
        self.budgets = {b.group: LateBudget(b, self.page, waits, whole) for b in heads.budgets}

    @property
    def missed(self) -> int:
        """Pages that were on their way in some step, of all heads."""
        return sum(budget.missed for budget in self.budgets.values())

    def read(self, tables: Any, layer: int, q: torch.Tensor, _workspace: Any) -> tuple[Any, Any]:
        """As `ChosenTables.read`, by the definition."""
        heads, request = self.runner._decoder.heads, self.sequence.request
        reach = self.runner._decoder.reads.of(()).chosen[layer]
        assert reach is not None
        of_kv = q[0].double().view(heads.spec.kv_heads, -1, q.shape[-1])
        added, offsets = [], tables.offsets.clone()
        end = len(tables.entries)
        for budget, some, ranks in heads.ranked(layer):
            table = request.entries(budget.group)
            defined = self.budgets[budget.group]
            defined.begin(request.length - 1)
            if layer >= self.within.get(request.length - 1, layer + 1):
                defined.come_within()
            for head, rank in zip(some, ranks, strict=True):

                def scores(head: int = head, rank: int = rank, table: Any = table) -> list[float]:
                    keys = [stored_tokens(self.runner, e, rank)[0] for e in table.tolist()]
                    return [page_score(of_kv[head], some) for some in keys]

                read = table[defined.reads(rank, scores)]
                at = int(np.asarray(reach.heads)[head, 0])
                offsets[at], offsets[at + 1] = end, end + len(read)
                added.append(torch.from_numpy(read))
                end += len(read)
        every = torch.cat((tables.entries, *(a.to(tables.entries.device) for a in added)))
        if tables.entries.is_cuda:
            return every, offsets
        return every.numpy(), offsets.numpy()


def steps_of(
    runner: Runner,
    tokens: Any,
    steps: int,
    happens: Mapping[int, str] | None = None,
    *,
    defined: bool = False,
    waits: bool = False,
    arrivals: LateArrivals | None = None,
    within: Mapping[int, int] | None = None,
    whole: bool = False,
) -> tuple[list[torch.Tensor], int]:
    """Logits of decode steps behind a prompt, and how many pages were missed: see `LateDefinition`.

    Before steps of these numbers something `happens`: see `LateBudget`. That a table is moved a
    runner does by itself. By a runner's own steps, or what they read as `defined`: then missed
    pages are counted. `waits` and `whole`: see `LateBudget`. By `arrivals` pages "come", which a
    runner waits for by itself else; `within` steps of these numbers before a layer.
    """
    seen: list[torch.Tensor] = []

    def choose(batch: Any, logits: torch.Tensor, _greedy: bool) -> Any:
        seen.append(logits[0].clone())
        return np.array([s.choose(row) for s, row in zip(batch, logits, strict=True)])

    with runner.prefill(tokens, "full", remember=False, reserve_tokens=steps) as done:
        sequence = decoding(runner, done, steps + 1)
        before = {len(tokens) + step: layer for step, layer in (within or {}).items()}
        definition = LateDefinition(runner, sequence, waits, before, whole)
        budgets = definition.budgets.values()
        with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
            if defined:
                patch.setattr(ChosenTables, "read", lambda *given: definition.read(*given))
            elif before and arrivals is not None:
                patch.setattr(ChosenTables, "read", _coming(arrivals, sequence, before))
            for step in range(steps):
                if what := (happens or {}).get(step):
                    if what == "leaves":
                        runner._decoder.forget(sequence.request)
                    elif what == "back":
                        done.kv.bring_back()
                    elif what == "come" and arrivals is not None:
                        arrivals.bring_all()
                    for budget in budgets:
                        budget.happens(what)
                runner._decoder.step([sequence], choose=choose)
        runner._decoder.forget(sequence.request)
    return seen, definition.missed


def _coming(arrivals: LateArrivals, sequence: Decoding, before: Mapping[int, int]) -> Any:
    """Reads a layer as ever, behind what comes before it, by the position of the step."""
    read = ChosenTables.read

    def reads(tables: ChosenTables, layer: int, *given: Any) -> Any:
        if before.get(sequence.request.length - 1) == layer:
            arrivals.bring_all()
        return read(tables, layer, *given)

    return reads


class LateArrivals:
    """Pages that are brought late, as late as a stream of a GPU may bring them.

    That is when somebody waits for them, or for later ones of the same pool, as one stream brings
    these; not for later ones where requests are `apart`. With `at_once` they are there all the
    time, and it is said then: where nobody reads what is not there nothing differs.
    """

    def __init__(self, *, apart: bool = False, at_once: bool = False) -> None:
        self.apart, self.at_once = apart, at_once
        self.waiting: list[tuple[int, HostPool, Callable[[], Any]]] = []
        self.made = self.begun = 0

    @contextmanager
    def at_work(self) -> Iterator[None]:
        fetch = HostPool.fetch_late

        def later(pool: HostPool, *given: Any) -> Any:
            self.begun += 1
            *known, then = given
            if self.at_once:
                fetch(pool, *known, lambda: None)
                self.waiting.append((self.begun, pool, then))
            else:
                self.waiting.append((self.begun, pool, lambda: fetch(pool, *given)[0].wait()))
            return self._arrival(self.begun, pool), {}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostPool, "fetch_late", later)
            yield

    def bring(self, number: int, pool: HostPool) -> None:
        """Brings what was asked for by a number, and has the current stream wait for it."""

        def comes(entry: tuple[int, HostPool, Any]) -> bool:
            earlier = entry[1] is pool and entry[0] <= number
            return entry[0] == number if self.apart else earlier

        coming = [entry for entry in self.waiting if comes(entry)]
        self.waiting = [entry for entry in self.waiting if not comes(entry)]
        for _, _, fetch in coming:
            self.made += 1
            with torch.inference_mode():
                fetch()

    def bring_all(self) -> None:
        """Brings all that is on its way."""
        for number, pool, _ in [*self.waiting]:
            self.bring(number, pool)

    def _arrival(self, number: int, pool: HostPool) -> Arrival:
        late = self

        class Late(Arrival):
            def is_there(self) -> bool:
                return all(entry[0] != number for entry in late.waiting)

            def wait(self) -> None:
                late.bring(number, pool)

        return Late()
