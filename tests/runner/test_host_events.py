"""Random events over host memory: whatever happens, each page has one copy somewhere.

Requests come, some of which read texts that are cached where these lie; they grow, are mirrored,
spilled, ranked, read as a whole, brought back, taken back to fewer tokens and cancelled, on a
device and in host memory that are often full, while transfers break off half-way, once or for good.
What is ranked late comes over at any time behind that: by itself, or when somebody waits for it.
HOST_EVENTS (6000) says how many, half of them over exact copies and half over fp8 ones, and
HOST_EVENTS_SEED which; `make host-events` is a million.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from families import tiny
from host_memory import PAGE, host_runner, nothing_is_held
from kvweave import InvalidArgument, PoolFull, TransferFailed, ops
from kvweave.cache import KvRequest
from kvweave.runner import Runner
from kvweave.runner.decode.host_slots import HostSlots
from kvweave.runner.kv import host_pool
from kvweave.runner.kv.aside import Arrival
from kvweave.runner.kv.host_pages import HostPages
from kvweave.runner.kv.host_pool import HostPool
from kvweave.runner.kv.transfers import TRIES
from kvweave.runner.kv.whole_layers import WholeLayers
from ranked_pages import top_k

Numbers = npt.NDArray[Any]

EVENTS = int(os.environ.get("HOST_EVENTS", "6000"))
SEED = int(os.environ.get("HOST_EVENTS_SEED", "0"))
READ = 6
LONGEST = 160
ROWS = 6
TEXTS = 5
WEIGHTS = {
    "cache": 5,
    "come": 7,
    "grow": 28,
    "take back": 6,
    "begin": 6,
    "mirror": 6,
    "spill": 16,
    "spill at once": 5,
    "rank": 30,
    "rank late": 20,
    "arrive": 12,
    "read a layer": 12,
    "bring back": 10,
    "cancel": 3,
    "break": 5,
}


class Life:
    """One request whose pages may lie in host memory.

    `known` [entries]: the number that stands in each page that its table lists, but for the head's
    rank; `name` is in those of its own.
    """

    def __init__(self, request: KvRequest, pool: Any, name: int, row: int) -> None:
        self.request, self.name, self.row = request, name, row
        self.host = HostPages(pool, request)
        self.came_back = 0
        # Tokens that are no guess.
        self.said = request.length
        self.known = np.zeros(0, np.int64)
        # Whether what it chose late could not be brought.
        self.lost = False

    @property
    def table(self) -> Numbers:
        return self.request.entries(self.host.pool.budget.group)

    @property
    def full(self) -> int:
        """Entries that end before the newest token's page."""
        before = (self.request.length - 1) // PAGE * PAGE
        return int((self.table[1:, 3] <= before).sum())

    def own(self, positions: Numbers) -> Numbers:
        """What stands in pages of its own, by positions in them."""
        return (self.name % 1000 * 256 + positions // PAGE) * 8

    def numbers(self, entries: Numbers, ranks: Numbers) -> Numbers:
        """What stands in the pages of entries, of these heads; exact in f32."""
        rounds = self.host.pool.scales is not None
        numbers = self.known[entries] + ranks
        once = rounds & (entries < max(self.host.count, self.came_back))
        return np.where(once, in_four_bits(numbers), numbers)


def in_four_bits(numbers: Numbers) -> Numbers:
    """What e4m3 keeps of a page's only number, times a power of two."""
    parts, exponents = np.frexp(numbers)
    return np.ldexp(np.rint(parts * 16) / 16, exponents)


@dataclass(eq=False)
class LateChoice:
    """What a life has chosen late: `coming` bool [heads, K] of it is on its way, by `fetch`."""

    life: Life
    chosen: Numbers
    read: torch.Tensor
    coming: Numbers
    fetch: Callable[[], dict[int, TransferFailed]] = dict


class World:
    """A device, its host memory, and requests that nobody computes."""

    def __init__(self, seed: int, dtype: str | None) -> None:
        self.random, self.draws = Random(seed), np.random.default_rng(seed)
        self.runner: Runner = host_runner(
            tiny("llama"),
            [top_k(READ, 4)],
            host_bytes=1 << (16 if dtype else 18),
            host_dtype=dtype,
            host_arrivals="late",
            max_tokens=560,
        )
        (self.pool,) = self.runner.host.values()
        self.ranks = np.arange(self.pool.budget.heads)
        self.on_device = self.pool.arena.numpy()
        self.slots = HostSlots(self.pool)
        self.slots.fit(ROWS)
        self.lives: list[Life] = []
        # Of texts that may be cached, the number that stands in their pages, by block.
        self.cached: dict[int, int] = {}
        # In the order in which one stream brings them.
        self.coming: list[LateChoice] = []
        self.late: LateChoice
        self.seen: Counter[str] = Counter()
        self.born = self.breaks = 0

    # ---- events -----------------------------------------------------------------------------

    def event(self) -> None:
        (what,) = self.random.choices([*WEIGHTS], [*WEIGHTS.values()])
        if what == "come":
            outcome = self.come()
        elif what == "cache":
            outcome = self.cache()
        elif what == "break":
            # Once, so that it is tried again, or until it is given up.
            self.breaks = self.random.choice([1, TRIES - 1, TRIES, 6 * TRIES])
            outcome = "done"
        elif what == "arrive":
            outcome = self.arrive()
        elif not self.lives:
            return
        else:
            life = self.random.choice(self.lives)
            outcome = getattr(self, what.replace(" ", "_"))(life)
        self.seen[f"{what}: {outcome}"] += 1
        for life in [life for life in self.lives if life.lost]:
            self.seen["arrive: given up"] += 1
            self.end(life)

    def come(self) -> str:
        taken = {life.row for life in self.lives}
        free = [row for row in range(ROWS) if row not in taken]
        if not free:
            return "no row"
        tokens, marks = np.arange(self.random.randint(1, LONGEST), dtype=np.int32), []
        if len(tokens) > 30 and self.random.random() < 0.7:
            # The text stands elsewhere than when it was cached, and begins within a page.
            length, start = self.random.randint(2, 28), self.random.randint(1, 2)
            tokens[start : start + length] = text(self.random.randrange(TEXTS))[:length]
            marks = [(start, start + length, "")]
        try:
            request = self.runner.cache.admit(tokens, segments=marks, mode="share")
        except PoolFull:
            return "no room"
        self.born += 1
        life = Life(request, self.pool, self.born, self.random.choice(free))
        self.lives.append(life)
        table = life.table
        reused = table[:, 4] != 0
        life.known = np.where(reused, 0, life.own(table[:, 3]))
        life.known[reused] = [self.cached[block] for block in table[reused, 0].tolist()]
        self.write(life, 0)
        return "reads where a text lies" if reused.any() else "done"

    def cache(self) -> str:
        """A text is computed and left to be found, until its blocks are wanted."""
        try:
            request = self.runner.cache.admit(text(self.random.randrange(TEXTS)), reuse="none")
        except PoolFull:
            return "no room"
        self.born += 1
        life = Life(request, self.pool, self.born, 0)
        life.known = life.own(life.table[:, 3])
        self.write(life, 0)
        self.cached.update(zip(life.table[:, 0].tolist(), life.known.tolist(), strict=True))
        request.commit(request.length, 0)
        request.release()
        return "done"

    def grow(self, life: Life) -> str:
        before = life.request.length
        more = min(self.random.randint(1, 9), LONGEST - before)
        if more < 1:
            return "long enough"
        try:
            life.request.append(np.arange(more, dtype=np.int32))
        except PoolFull:
            return "no room"
        new = life.table[len(life.known) :]
        life.known = np.append(life.known, life.own(new[:, 3]))
        self.write(life, before // PAGE * PAGE)
        return "done"

    def take_back(self, life: Life) -> str:
        """Tokens since what was last said of the request go: they were a guess that was wrong."""
        away = life.host.count
        if away:
            last = life.table[away - 1]
            with pytest.raises(InvalidArgument, match="truncate: expected"):
                life.request.truncate(int(last[3] + last[2] - last[1]))
        length = self.random.randint(max(life.said, life.request.length - 9), life.request.length)
        life.request.truncate(length)
        life.known = life.known[: len(life.table)]
        return "some in the host" if away else "done"

    def begin(self, life: Life) -> str:
        life.host.begin(life.full)
        return self.how(life)

    def mirror(self, life: Life) -> str:
        life.host.mirror(life.full)
        return self.how(life)

    def spill(self, life: Life) -> str:
        life.host.spill(life.full)
        return self.how(life)

    def spill_at_once(self, life: Life) -> str:
        """As who finds no room on the device: whatever is on its way, and the row begins anew."""
        before = life.host.count
        if life.host.spill_full():
            self.slots.forget(life.row)
        assert life.host.count >= before
        return self.how(life)

    def rank(self, life: Life) -> str:
        """Heads choose pages of their own; what they then read is what was written there."""
        self.slots.follow(life.row, life.host)
        if life.lost:
            return "given up"
        chosen, read = self.choice(life)
        row, numbers = (
            torch.tensor(of, dtype=torch.int32) for of in ([life.row], range(len(self.ranks)))
        )
        self.slots.room.bring(ops.SeatedHeads(row, numbers), torch.from_numpy(chosen), read)
        failed = self.slots.failures.pop(life.row, None)
        if failed is not None:
            assert isinstance(failed, TransferFailed)
            self.end(life)
            return "given up"
        self.is_read(life, chosen, read, chosen[0] >= 0)
        return "of the host" if life.host.count else "of the device"

    def rank_late(self, life: Life) -> str:
        """As `rank`, of a choice of which only what is there is read before the rest has come."""
        before = life.host.count
        if not before:
            return "of the device"
        self.spill(life)
        self.slots.follow(life.row, life.host)
        if life.lost:
            return "given up"
        chosen, read = self.choice(life)
        self.late = LateChoice(life, chosen, read, chosen[0] >= 0)
        rows, home = (np.asarray([of], np.int32) for of in (life.row, before))
        known = rows, home, torch.from_numpy(chosen), read
        coming, arrival = self.slots.room.bring_late(*known, lambda: None)
        # As `LatePages.bring`, before anybody looks at what has failed.
        life.host.expect(arrival)
        if self.slots.failures.pop(life.row, None) is not None:
            # Pages that have just gone home could not be had: nobody reads what comes over still.
            life.lost = True
            self.end(life)
            return "given up"
        self.late.coming = coming[0].numpy()
        self.is_read(life, chosen, read, (chosen[0] >= 0) & ~self.late.coming)
        return "some on their way" if coming.any() else "all there"

    def choice(self, life: Life) -> tuple[Numbers, torch.Tensor]:
        """Pages that each head chooses, i32 [1, heads, K], and their entries."""
        blocks = life.table[:, 0]
        heads, count = len(self.ranks), min(len(blocks), READ)
        chosen = np.full((1, heads, READ), -1, np.int32)
        drawn = self.draws.random((heads, len(blocks))).argsort(axis=1)[:, :count]
        chosen[0, :, :count] = np.sort(drawn, axis=1)
        entries = np.zeros((1, heads, READ, 5), np.int32)
        entries[0, :, :count, 0] = blocks[chosen[0, :, :count]]
        return chosen, torch.from_numpy(entries)

    def is_read(self, life: Life, chosen: Numbers, read: torch.Tensor, some: Numbers) -> None:
        """Whether `some` of a choice, bool [heads, K], lie where its entries say."""
        of = np.broadcast_to(self.ranks[:, None], some.shape)
        wanted = life.numbers(chosen[0], of)
        self.holds(self.on_device[(read.numpy()[0, :, :, 0] + of)[some]], wanted[some])

    def arrive(self) -> str:
        """Some of what was chosen late comes over, in its order."""
        if not self.coming:
            return "nothing"
        self.come_over(self.random.choice(self.coming))
        return "done"

    def come_over(self, last: LateChoice) -> None:
        """What is on its way comes over, up to one that somebody waits for."""
        while last in self.coming:
            late = self.coming.pop(0)
            late.life.lost |= bool(late.fetch())
            if not late.life.lost:
                self.is_read(late.life, late.chosen, late.read, late.coming)

    def begin_late(self, fetch: Callable[[], dict[int, TransferFailed]]) -> Arrival:
        """Has the choice under way come over at some time."""
        world, late = self, self.late
        late.fetch = fetch
        self.coming.append(late)

        class Late(Arrival):
            def is_there(self) -> bool:
                return late not in world.coming

            def wait(self) -> None:
                world.come_over(late)

        return Late()

    def read_a_layer(self, life: Life) -> str:
        """All pages of a layer's heads are laid side by side, from wherever they are."""
        heads, table = self.runner._decoder.heads, life.table
        whole = WholeLayers(heads, self.pool.arena, table, np.asarray([[len(table)]]))
        rows = heads.step_rows(self.random.randrange(len(heads.spec.layers)))
        layer = whole.layer(rows)
        if whole.failed:
            self.end(life)
            return "given up"
        entries = layer.table(0)
        assert np.array_equal(entries[:, 1:], table[:, 1:])
        wanted = life.numbers(np.arange(len(table))[:, None], rows[:, 1])
        self.holds(layer.pages.numpy()[entries[:, :1] + layer.reach.heads[:, 1]], wanted)
        return "some in the host" if life.host.count else "all on the device"

    def bring_back(self, life: Life) -> str:
        count = life.host.count
        try:
            life.host.bring_back()
        except PoolFull:
            return "no room"
        except TransferFailed:
            self.end(life)
            return "given up"
        assert not life.host.count
        life.came_back = max(life.came_back, count)
        return "done"

    def cancel(self, life: Life) -> str:
        self.end(life)
        return "done"

    # ---- what holds -------------------------------------------------------------------------

    def how(self, life: Life) -> str:
        life.said = life.request.length
        return "some in the host" if life.host.count else "all on the device"

    def end(self, life: Life) -> None:
        self.lives.remove(life)
        self.slots.forget(life.row)
        life.host.release()
        life.request.release()

    def write(self, life: Life, first: int) -> None:
        """Writes pages of its own from a position on, as a prompt or a step does."""
        table = life.table
        own = (table[:, 4] == 0) & (table[:, 3] >= first) & (table[:, 0] >= 0)
        numbers = life.known[own, None] + self.ranks
        self.on_device[table[own, :1] + self.ranks] = numbers[..., None, None, None]

    def in_host(self, pages: Numbers) -> Numbers:
        """What stands in pages of host memory."""
        at = torch.from_numpy(pages.astype(np.int64))
        if self.pool.scales is None:
            return self.pool.pages[at].numpy()
        kept = self.pool.pages.view(torch.uint8)[at].view(torch.float8_e4m3fn)
        powers = self.pool.scales[at].int() - 127
        return torch.ldexp(kept.float(), powers[..., None, None]).numpy()

    def holds(self, pages: Numbers, wanted: Numbers) -> None:
        assert (pages == wanted[..., None, None, None]).all()

    def each_page_is_somewhere(self, life: Life) -> None:
        """Those that were spilled in host memory, the others on the device.

        Exactly, or once rounded where they are or were kept as fp8.
        """
        group, count = self.pool.budget.group, life.host.count
        blocks, home = life.table[:, :1], life.host.blocks()[:, None]
        assert life.request.spilled(group) == count
        assert (blocks[:count] < 0).all()
        assert (blocks[count:] >= 0).all()
        wanted = life.numbers(np.arange(len(blocks))[:, None], self.ranks)
        self.holds(self.in_host(home + self.ranks), wanted[:count])
        self.holds(self.on_device[blocks[count:] + self.ranks], wanted[count:])


def text(number: int) -> Numbers:
    """The tokens of a text that no request has otherwise."""
    return np.arange(1000 * (number + 1), 1000 * (number + 1) + 30, dtype=np.int32)


def breaking(world: World) -> Any:
    """Carries pages, but for the first half alone as often as `breaks` says."""
    carry = host_pool.carry_pages

    def carried(moves: Any, count: Any, *others: Any, **named: Any) -> None:
        if world.breaks and int(count[0]):
            world.breaks -= 1
            carry(moves, np.asarray(count) // 2, *others, **named)
            raise RuntimeError("the bus is gone")
        carry(moves, count, *others, **named)

    return carried


@pytest.fixture(params=[None, "fp8"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(SEED, request.param)
    monkeypatch.setattr(host_pool, "carry_pages", breaking(made))
    fetch = HostPool.fetch_late

    def late(pool: HostPool, *given: Any) -> tuple[Arrival, dict[int, TransferFailed]]:
        return made.begin_late(lambda: fetch(pool, *given)[1]), {}

    monkeypatch.setattr(HostPool, "fetch_late", late)
    return made


@torch.inference_mode()
def test_every_page_has_one_copy_whatever_happens(world: World) -> None:
    for number in range(EVENTS // 2):
        try:
            world.event()
            if number % 16 == 0:
                for life in world.lives:
                    world.each_page_is_somewhere(life)
            if number % 1024 == 0:
                world.runner.cache.check()
                world.pool.cache.check()
        except BaseException:
            print(f"event {number} of seed {SEED}: {dict(world.seen)}")
            raise
    for life in [*world.lives]:
        world.each_page_is_somewhere(life)
        world.end(life)
    assert nothing_is_held(world.runner)
    print(f"{EVENTS // 2} events: {dict(sorted(world.seen.items()))}")
    # Each of these has come about, or the events do not say what they should.
    for what in ("come: no room", "grow: no room", "spill: some in the host", "rank: of the host"):
        assert world.seen[what], what
    for what in ("come: reads where a text lies", "take back: some in the host"):
        assert world.seen[what], what
    for what in ("read a layer: some in the host", "read a layer: given up"):
        assert world.seen[what], what
    for what in ("rank: given up", "bring back: done", "bring back: given up"):
        assert world.seen[what], what
    for what in ("rank late: some on their way", "arrive: done", "arrive: given up"):
        assert world.seen[what], what
    assert world.pool.stats()["retried"]
    assert world.pool.stats()["failed"]
