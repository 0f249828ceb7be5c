"""A scheduler and a worker of virtual pages, played by random events; needs no vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvweave import ops
from kvweave.adapters.vllm.top_k.bounds import bound_share
from kvweave.adapters.vllm.virtual_pages import far_memory
from kvweave.adapters.vllm.virtual_pages.far_choice import FarChoice, runs_of_layer
from kvweave.adapters.vllm.virtual_pages.far_memory import FarMemory, host_arena
from kvweave.adapters.vllm.virtual_pages.far_requests import FarRequests
from kvweave.adapters.vllm.virtual_pages.layout import layout_of
from kvweave.adapters.vllm.virtual_pages.page_memory import PageMemory
from kvweave.adapters.vllm.virtual_pages.residency import Residency
from ranked_pages import FULL, WINDOW, top_k

P, DIM, SEATS, HOME, PAGES, NUMBERS = 16, 16, 5, 40, 24, 90
CLASSES = {
    "two heads of four": [[top_k(4), FULL, top_k(4), FULL]] * 2,
    "budgets and windows": [
        [top_k(4), WINDOW, top_k(3)],
        [FULL, top_k(3), top_k(3)],
        [WINDOW, top_k(4), top_k(4)],
    ],
    "every head": [[top_k(5)] * 2] * 5,
}


@dataclass
class Request:
    """A request of vLLM, and what its pages say: `contents` [pages], a number each.

    What a step computes is `scheduled` before, and computed for the next one's scheduler.
    """

    request_id: str
    num_tokens: int
    num_computed_tokens: int = 0
    scheduled: int = 0
    pages: list[int] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)
    resumable: bool = False


class World:
    """A scheduler and a worker; `arena` pages hold the number of what was written there."""

    def __init__(
        self, classes: list[list[dict]], device: str, seed: int, paced: bool = False
    ) -> None:
        place = torch.device(device)
        layout = layout_of(classes, P)
        share = bound_share(torch.float32, place, P)
        self.layout = layout.with_bounds(share, spills=True, paced=paced)
        self.paced = paced
        self.random = np.random.default_rng(seed)
        self.residency = Residency(self.layout, NUMBERS, SEATS)
        self.far = FarRequests(self.residency, HOME, SEATS)
        slots = self.layout.head_slots
        whole = torch.zeros((self.layout.layers, NUMBERS, slots, P, 2 * DIM), device=place)
        caches = {str(layer): whole[layer] for layer in range(self.layout.layers)}
        self.memory = PageMemory(self.layout, caches, SEATS)
        heads = self.layout.layers, len(classes[0])
        home = host_arena(self.layout, HOME, (P, DIM), torch.float32, place)
        self.host = FarMemory(self.memory, home, SEATS, PAGES, heads)
        self.runs = [
            [run.on(place) for run in runs_of_layer(self.layout, layer, 0)]
            for layer in range(self.layout.layers)
        ]
        self.free = list(range(1, NUMBERS))
        self.requests: dict[str, Request] = {}
        # What pages say, who has them, and which of them a prompt may find.
        self.says: dict[int, int] = {}
        self.users: Counter[int] = Counter()
        self.findable: set[int] = set()
        self.prompts: list[tuple[list[int], list[int]]] = []
        self.hits = 0
        self.made = self.fetched = self.kept = 0
        # By request, layer and head: how many pages it had, and what was chosen of them.
        self.last: dict[tuple[str, int, int], tuple[int, list[int]]] = {}
        # Of what was to be carried so much breaks off, and whose it was in this step, by seat.
        self.breaks = 0
        self.broken: set[int] = set()
        self.failed = 0
        self._spilled: dict[int, int] = {}

    @contextmanager
    def faults(self) -> Iterator[None]:
        """Has transfers carry their first half alone, as often as `breaks` says."""
        carry = far_memory.carry_pages

        def carried(moves: Any, count: Any, slots: Any, home: Any, way: str, **named: Any) -> None:
            some = torch.as_tensor(moves)[: int(count[0])].cpu().numpy()
            if not self.breaks or not len(some):
                carry(moves, count, slots, home, way, **named)
                return
            self.breaks -= 1
            if way == "fetch":
                self.broken.update((some[:, 0] // home.ranks).tolist())
            else:
                blocks = torch.as_tensor(home.blocks).cpu().numpy()[0, some[:, 1]]
                rows = self.layout.bound_rows
                self.broken.update(self._spilled[int(at) // rows] for at in blocks)
            carry(moves, torch.as_tensor(count) // 2, slots, home, way, **named)
            raise RuntimeError("the bus is gone")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(far_memory, "carry_pages", carried)
            yield

    def events(self) -> None:
        """What may come before a step: requests come and end, all others grow; and the step."""
        for _ in range(int(self.random.integers(0, 3))):
            event = self.random.random()
            if event < 0.5:
                self.start()
            elif event < 0.65 and self.requests:
                self.end(self.requests[str(self.random.choice(list(self.requests)))])
        self.grow()
        self.step()

    def nothing_is_held(self) -> None:
        """Ends all requests: whatever they had is free then."""
        for request in list(self.requests.values()):
            self.end(request)
        self.step()
        assert (self.far.held, self.far.away) == (0, 0)
        assert self.residency.pages.stats()["held"] == 0
        assert (self.host.seat_of == self.host.nobody).all()
        assert not self.host.counts.any()

    def start(self) -> None:
        """A prompt comes, of which a part may be found that another one had."""
        self.made += 1
        hit, contents = self._hit()
        least = len(hit) * P + 1
        tokens = int(self.random.integers(least, max(least, PAGES * P - 60) + 1))
        request = Request(str(self.made), tokens, least - 1, least - 1, list(hit), contents)
        if not self._has_room(-(-tokens // P) - len(hit), hit):
            return
        self.residency.adopt(request.request_id, hit)
        self.free = [page for page in self.free if page not in hit]
        self.users.update(hit)
        self.hits += bool(hit)
        self.requests[request.request_id] = request
        self._extend(request, tokens - len(hit) * P)
        self.far.know(request, request.pages)
        self.prompts.append((request.pages[: tokens // P], request.contents[: tokens // P]))

    def _hit(self) -> tuple[list[int], list[int]]:
        """Pages that say what a former prompt said, as far as they are found."""
        if not self.prompts or self.random.random() < 0.4:
            return [], []
        pages, contents = self.prompts[int(self.random.integers(len(self.prompts)))]
        pairs = list(zip(pages, contents, strict=True))
        found = [p in self.findable and self.says[p] == content for p, content in pairs]
        count = [*found, False].index(False)
        count = self.residency.longest_hit(pages[:count])
        return pages[:count], contents[:count]

    def grow(self) -> None:
        """A token more for everybody whose prompt is done."""
        for request in list(self.requests.values()):
            if request.num_computed_tokens < request.num_tokens:
                continue
            end = request.scheduled + 1
            fresh = -(-end // P) - len(request.pages)
            if end > PAGES * P or (fresh and not self._has_room(fresh)):
                self.end(request)
                continue
            self._extend(request, 1)

    def end(self, request: Request) -> None:
        del self.requests[request.request_id]
        found = self.findable.__contains__
        self.residency.drop(request.request_id, request.pages, found)
        self.far.drop(request.request_id)
        self.users.subtract(request.pages)
        self.free += [page for page in request.pages if not self.users[page]]

    def _has_room(self, fresh: int, hit: Sequence[int] = ()) -> bool:
        """As vLLM's manager asks, behind a prefix hit that nobody may hold yet."""

        def lacking() -> int:
            return self.residency.lacking(fresh, hit)

        if lacking():
            found = self.findable.__contains__
            with self.residency.sparing(hit):
                gone = self.far.make_room(lacking, lambda name: self.requests[name].pages, found)
            self.findable -= set(gone)
        there = sum(page in self.free for page in hit)
        return not lacking() and fresh <= len(self.free) - there

    def _extend(self, request: Request, tokens: int) -> None:
        end = request.scheduled + tokens
        fresh = [self.free.pop(0) for _ in range(-(-end // P) - len(request.pages))]
        self.findable -= {*fresh, *self.residency.extend(request.request_id, fresh)}
        self.far.writes(request.request_id, fresh)
        self.users.update(fresh)
        self.made += len(fresh)
        said = range(self.made - len(fresh), self.made)
        self.says.update(zip(fresh, said, strict=True))
        request.contents += said
        request.pages += fresh
        request.scheduled = end

    def step(self) -> None:
        """What a worker does: copies, tables, then the layers write and read."""
        changes = self.far.take_changes()
        self._spilled = {int(block): int(seat) for seat, _, block in changes.homes}
        self.broken.clear()
        self.host.copy(changes)
        self.memory.apply(self.residency.pages.take_changes())
        self.host.apply(changes)
        for request in self.requests.values():
            # Pages that the host has are not written any more.
            for number in range(self.far.at_home(request.request_id), len(request.pages)):
                for table, kind in enumerate(self.layout.tables):
                    first = int(self.memory.tables[table, request.pages[number]])
                    if self.layout.spans[kind].window is None:
                        assert first > 0
                        self._pages(first)[:] = self._content(request, number, table)
        self._read()
        self.residency.pages.check()
        self._fail(self.host.take_failed())
        for request in self.requests.values():
            request.num_computed_tokens = request.scheduled
            # Of an answer nothing is found.
            self.findable |= set(request.pages[: request.num_tokens // P])

    def _fail(self, pages: set[int]) -> None:
        """Ends those who have one of these pages among what was computed before, as vLLM does."""
        for page in pages:
            (request,) = (
                r
                for r in self.requests.values()
                if page in r.pages[: -(-r.num_computed_tokens // P)]
            )
            assert self.far._of[request.request_id].seat in self.broken
            self.end(request)
            self.failed += 1

    def _pages(self, first: int) -> torch.Tensor:
        return self.memory.arena[first : first + self.layout.block_pages, 0, 0, 0]

    def _content(self, request: Request, number: int, table: int) -> torch.Tensor:
        """What the pages of a block say: its page, its table and their ranks."""
        ranks = torch.arange(self.layout.block_pages, device=self.memory.arena.device)
        return (request.contents[number] * 8.0 + table) * 64 + ranks

    def _read(self) -> None:
        part = 1.0 if self.paced else 0.8
        batch = [r for r in self.requests.values() if self.random.random() < part]
        self.random.shuffle(batch)
        if not batch:
            return
        heads, device = len(self.layout.of_head[0]), self.memory.arena.device
        blocks = torch.zeros((len(batch) + 1, PAGES), dtype=torch.int32)
        for row, request in enumerate(batch):
            blocks[row, : len(request.pages)] = torch.tensor(request.pages)
        lengths = [request.scheduled for request in batch] + [0]
        step = SimpleNamespace(blocks=blocks.to(device), lengths=torch.tensor(lengths).to(device))
        choice = FarChoice(self.host, self.runs, step)  # type: ignore[arg-type]
        choice.begin_step(torch.tensor([True] * len(lengths), device=device))
        most = max(self.layout.budgets)
        for layer in range(self.layout.layers):
            chosen = np.full((len(lengths), heads, most), -1, np.int32)
            for at, request in enumerate(batch):
                for head in range(heads):
                    some = self._choice(len(request.pages), most)
                    chosen[at, head, : len(some)] = some
            entries = self._entries(layer, batch, chosen)
            fresh = torch.from_numpy(chosen).to(device)
            count = (fresh >= 0).sum(-1, dtype=torch.int32)
            there, kept = fresh, choice.kept(layer)
            assert (kept is not None) is self.paced
            if kept is not None:
                there, selected = kept.taken(fresh, count)
                assert torch.equal((there >= 0).sum(-1), selected.long())
                self._expect_kept(layer, batch, chosen, there.cpu().numpy())
                chosen = there.cpu().numpy()
                entries = self._entries(layer, batch, chosen)
            named = torch.from_numpy(entries).to(device)
            choice.bring(layer, fresh, named, ops.Workspace(device))
            self._expect(layer, batch, chosen, named.cpu().numpy())

    def _entries(self, layer: int, batch: list[Request], chosen: np.ndarray) -> np.ndarray:
        """What the requests' own tables say of the pages that are chosen."""
        entries = np.zeros((*chosen.shape, 5), np.int32)
        for head, (table, *_) in enumerate(self.layout.head_rows(layer).tolist()):
            own = self.memory.tables[table].cpu().numpy()
            for at, request in enumerate(batch):
                numbers = chosen[at, head][chosen[at, head] >= 0]
                entries[at, head, : len(numbers), 0] = own[np.array(request.pages)[numbers]]
        return entries

    def _expect_kept(self, layer: int, batch: list[Request], fresh, there) -> None:
        """A request with a seat goes on with what it chose when it began its newest page."""
        for at, request in enumerate(batch):
            for head in range(there.shape[1]):
                key, pages = (request.request_id, layer, head), len(request.pages)
                seated = request.request_id in self.far._of
                before, begins = self.last.get(key), (request.scheduled - 1) % P == 0
                again = seated and not begins and before is not None
                wanted = before[1] if again and before is not None else fresh[at, head].tolist()
                assert there[at, head].tolist() == wanted
                self.last[key] = pages, wanted
                self.kept += again

    def _choice(self, pages: int, most: int) -> list[int]:
        return sorted(self.random.permutation(pages)[: min(most, pages)].tolist())

    def _expect(self, layer: int, batch: list[Request], chosen, entries) -> None:
        pages = self.memory.arena[:, 0, 0, 0].cpu()
        spoiled = {name for name, at in self.far._of.items() if at.seat in self.host._failures}
        for run in self.runs[layer]:
            for rank, head in enumerate(run.heads.tolist(), run.rank):
                for at, request in enumerate(batch):
                    if request.request_id in spoiled:
                        continue
                    far = self.far.at_home(request.request_id)
                    for number, entry in zip(chosen[at, head], entries[at, head], strict=True):
                        if number >= 0:
                            wanted = self._content(request, number, run.table)[rank]
                            assert pages[entry[0] + rank] == wanted
                            self.fetched += int(number) < far
