"""Random events over host memory: whatever happens, each page has one copy somewhere.

Requests come, grow, are mirrored, spilled, ranked, brought back, forked off and cancelled, on a
device and in host memory that are often full, while transfers break off half-way, once or for good.
HOST_EVENTS (6000) says how many, half of them over exact copies and half over fp8 ones, and
HOST_EVENTS_SEED which; `make host-events` is a million.
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from families import tiny
from host_memory import PAGE, host_runner, nothing_is_held
from kvweave import PoolFull, TransferFailed, ops
from kvweave.cache import KvRequest
from kvweave.runner import Runner
from kvweave.runner.decode.host_slots import HostSlots
from kvweave.runner.kv import host_pool
from kvweave.runner.kv.host_pages import HostPages, blocks_of
from kvweave.runner.kv.transfers import TRIES
from ranked_pages import top_k

Numbers = npt.NDArray[Any]

EVENTS = int(os.environ.get("HOST_EVENTS", "6000"))
SEED = int(os.environ.get("HOST_EVENTS_SEED", "0"))
READ = 6
LONGEST = 160
ROWS = 6
WEIGHTS = {
    "come": 4,
    "grow": 20,
    "begin": 6,
    "mirror": 6,
    "spill": 16,
    "rank": 40,
    "bring back": 4,
    "cancel": 2,
    "break": 2,
}


class Life:
    """One request whose pages may lie in host memory; `name` is in every number of its KV."""

    def __init__(self, request: KvRequest, pool: Any, name: int, row: int) -> None:
        self.request, self.name, self.row = request, name, row
        self.host = HostPages(pool, request)
        self.came_back = 0

    @property
    def pages(self) -> int:
        return -(-self.request.length // PAGE)

    @property
    def full_pages(self) -> int:
        """Those before the newest token's."""
        return (self.request.length - 1) // PAGE

    def numbers(self, pages: Numbers, ranks: Numbers) -> Numbers:
        """What stands in these pages of these heads; exact in f32."""
        rounds = self.host.pool.scales is not None
        numbers = (self.name % 1000 * 256 + pages) * 8 + ranks
        once = rounds & (pages < max(self.host.count, self.came_back))
        return np.where(once, in_four_bits(numbers), numbers)


def in_four_bits(numbers: Numbers) -> Numbers:
    """What e4m3 keeps of a page's only number, times a power of two."""
    parts, exponents = np.frexp(numbers)
    return np.ldexp(np.rint(parts * 16) / 16, exponents)


class World:
    """A device, its host memory, and requests that nobody computes."""

    def __init__(self, seed: int, dtype: str | None) -> None:
        self.random, self.draws = Random(seed), np.random.default_rng(seed)
        self.runner: Runner = host_runner(
            tiny("llama"),
            [top_k(READ, 4)],
            host_bytes=1 << (16 if dtype else 18),
            host_dtype=dtype,
            max_tokens=560,
        )
        (self.pool,) = self.runner.host.values()
        self.ranks = np.arange(self.pool.budget.heads)
        self.on_device = self.pool.arena.numpy()
        self.slots = HostSlots(self.pool)
        self.slots.fit(ROWS)
        self.lives: list[Life] = []
        self.seen: Counter[str] = Counter()
        self.born = self.breaks = 0

    # ---- events -----------------------------------------------------------------------------

    def event(self) -> None:
        (what,) = self.random.choices([*WEIGHTS], [*WEIGHTS.values()])
        if what == "come":
            outcome = self.come()
        elif what == "break":
            # Once, so that it is tried again, or until it is given up.
            self.breaks, outcome = self.random.choice([1, TRIES - 1, TRIES, 2 * TRIES]), "done"
        elif not self.lives:
            return
        else:
            life = self.random.choice(self.lives)
            outcome = getattr(self, what.replace(" ", "_"))(life)
        self.seen[f"{what}: {outcome}"] += 1

    def come(self) -> str:
        taken = {life.row for life in self.lives}
        free = [row for row in range(ROWS) if row not in taken]
        if not free:
            return "no row"
        length = self.random.randint(1, LONGEST)
        try:
            request = self.runner.cache.admit(np.arange(length, dtype=np.int32), reuse="none")
        except PoolFull:
            return "no room"
        self.born += 1
        life = Life(request, self.pool, self.born, self.random.choice(free))
        self.lives.append(life)
        self.write(life, 0)
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
        self.write(life, before // PAGE)
        return "done"

    def begin(self, life: Life) -> str:
        life.host.begin(life.full_pages)
        return self.how(life)

    def mirror(self, life: Life) -> str:
        life.host.mirror(life.full_pages)
        return self.how(life)

    def spill(self, life: Life) -> str:
        life.host.spill(life.full_pages)
        return self.how(life)

    def rank(self, life: Life) -> str:
        """Heads choose pages of their own; what they then read is what was written there."""
        self.slots.follow(life.row, life.host)
        heads, count = len(self.ranks), min(life.pages, READ)
        chosen = np.full((1, heads, READ), -1, np.int32)
        drawn = self.draws.random((heads, life.pages)).argsort(axis=1)[:, :count]
        chosen[0, :, :count] = np.sort(drawn, axis=1)
        blocks = blocks_of(life.request, self.pool.budget.group)
        entries = np.zeros((1, heads, READ, 5), np.int32)
        entries[0, :, :count, 0] = blocks[chosen[0, :, :count]]
        read = torch.from_numpy(entries)
        row, numbers = (torch.tensor(of, dtype=torch.int32) for of in ([life.row], range(heads)))
        self.slots.room.bring(ops.SeatedHeads(row, numbers), torch.from_numpy(chosen), read)
        failed = self.slots.failures.pop(life.row, None)
        if failed is not None:
            assert isinstance(failed, TransferFailed)
            self.end(life)
            return "given up"
        of = self.ranks[:, None]
        wanted = life.numbers(chosen[0, :, :count], of)
        self.holds(self.on_device[entries[0, :, :count, 0] + of], wanted)
        return "of the host" if life.host.count else "of the device"

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
        return "some in the host" if life.host.count else "all on the device"

    def end(self, life: Life) -> None:
        self.lives.remove(life)
        self.slots.forget(life.row)
        life.host.release()
        life.request.release()

    def write(self, life: Life, first: int) -> None:
        """Writes the pages from one on, as a prompt or a step does."""
        pages = np.arange(first, life.pages)[:, None]
        blocks = blocks_of(life.request, self.pool.budget.group)[first:, None]
        numbers = life.numbers(pages, self.ranks)
        self.on_device[blocks + self.ranks] = numbers[..., None, None, None]

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
        blocks, home = blocks_of(life.request, group)[:, None], life.host.blocks()[:, None]
        assert life.request.spilled(group) == count
        assert (blocks[:count] < 0).all()
        assert (blocks[count:] >= 0).all()
        wanted = life.numbers(np.arange(life.pages)[:, None], self.ranks)
        self.holds(self.in_host(home + self.ranks), wanted[:count])
        self.holds(self.on_device[blocks[count:] + self.ranks], wanted[count:])


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
    for what in ("rank: given up", "bring back: done", "bring back: given up"):
        assert world.seen[what], what
    assert world.pool.stats()["retried"]
    assert world.pool.stats()["failed"]
