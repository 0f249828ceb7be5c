"""A mixed load on served runners for a long time: `python -m benchmarks.soak.run [--seconds 600]`.

Runners of a tiny random Llama in turns, of the kinds that `benchmarks.soak.kinds` lists: exact
pages, pages in the host's memory, packed ones, most of them with host memory and stores for
documents. Behind `Runner.serve` and an `AsyncRunner` come prompts of every kind and policy, with
marked documents that come and go, second turns, several answers and stop strings, of callers who
stream, leave, stop reading, cancel or ask too much, and of tenants who are forgotten. Every few
seconds all is left to end, or cancelled: nothing may be held then, and fixed questions have to be
answered as a quiet runner has answered them at first. Now and then another runner is made of the
same folder, as after a restart, and all that a runner has is given up. Memory has to be flat over
the second half. Exit status 1 where anything is not as it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.quality.sampled import show
from benchmarks.soak.asked import Author
from benchmarks.soak.clients import Clients, Drawn
from benchmarks.soak.far import remote_store
from benchmarks.soak.keeper import Keeper
from benchmarks.soak.kinds import KINDS, Kind
from benchmarks.soak.left import Open, emptied, left_behind, live_objects, more_threads
from benchmarks.soak.log_watch import LogWatch
from benchmarks.soak.memory import Memory
from benchmarks.soak.probes import Probes
from benchmarks.soak.rows import rows_of
from benchmarks.soak.served import ENGINE, Served, tiny_llama
from benchmarks.soak.tally import Tally
from benchmarks.soak.tasks import Tasks
from benchmarks.soak.tenants import live_as_tenant
from kvweave.errors import KvweaveError, StoreDegraded, UncertifiedPolicy
from kvweave.remote import RemoteStore
from kvweave.runner import AsyncRunner, Server

CASE = "runner_soak"
LOADED_S, CALLERS, TENANTS = 8.0, 6, 2
DROPS, CLOSES, RESTARTS, EMPTIES = 2, 5, 7, 9
"""Every so many turns fixed documents are dropped before they are asked about, a server is closed
in the middle of its load, another runner is made of the folder, all is given up."""
WARM_TURNS = 4
"""Behind so many turns threads and files are what they are to be from then on."""


class LoadedRunner:
    """One runner's load; its turns are numbered from 0."""

    def __init__(self, served: Served, seed: int) -> None:
        self.served, self.seed = served, seed
        kind = served.kind
        self.tally = Tally(kind.alike)
        self.drawn = Drawn(Author(seed, kind.library, kind.weights), seed, kind.without)
        self.keeper = Keeper(served, self.drawn, self.tally, seed)
        self.probes = Probes(served, self.tally)
        self.turns = self.quiets = 0
        self._counted = served.counts()

    @property
    def found(self) -> tuple[str, Tally, Probes, dict[str, int]]:
        """What there is to tell of it."""
        looked = {"turns of load": self.turns, "looks while all was quiet": self.quiets}
        return self.served.kind.name, self.tally, self.probes, looked

    def turn(self, seconds: float) -> None:
        """Loads the runner for so long, lets all end, and looks at what is left."""
        served, turn = self.served, self.turns
        closes = turn % CLOSES == CLOSES - 1
        if turn % 2:
            asyncio.run(self._awaited(seconds, closes))
        else:
            self._served(seconds, closes)
        self.keeper.flush()
        counted = served.counts()
        for what, count in counted.items():
            self.tally.note(what, count - self._counted[what])
        self._counted = counted
        self._look(f"turn {turn}")
        self.probes.ask(served.runner, drops=turn % DROPS == 1)
        if turn % RESTARTS == RESTARTS - 1:
            self._restart()
        if turn % EMPTIES == EMPTIES - 1:
            self._complain("emptied", emptied(served.runner, served.kind.zeroes))
            self.keeper.inserted.clear()
            self.tally.note("emptied")
        self.probes.compare(self.tally.take_kept())
        self._look(f"behind the questions of turn {turn}")
        self.turns += 1

    def _served(self, seconds: float, closes: bool) -> None:
        """A turn of callers in threads, and of tenants."""
        tally, served = self.tally, self.served
        with served.runner.serve(**ENGINE) as server:
            clients = Clients(server, self.drawn, tally, CALLERS)
            others = [threading.Thread(target=self.keeper.work, args=(server.call,))]
            for number in range(TENANTS):
                others.append(threading.Thread(target=self._tenant, args=(server, number)))
            for other in others:
                other.start()
            time.sleep(seconds)
            self.keeper.stop()
            for other in others:
                other.join()
            clients.stop()
            if closes:
                server.close()
                tally.note("closed under load")
            clients.join()
        self._count(server.metrics())

    def _tenant(self, server: Server, number: int) -> None:
        with self.tally.watched("a tenant"):
            seed = (self.seed * 10_000 + self.turns) * TENANTS + number
            live_as_tenant(self.served, server, self.tally, seed)

    async def _awaited(self, seconds: float, closes: bool) -> None:
        """A turn of callers that are tasks of one loop."""
        loop, tally = asyncio.get_running_loop(), self.tally
        async with AsyncRunner(self.served.runner, **ENGINE) as served:

            def call(work: Callable[[], Any]) -> Any:
                return asyncio.run_coroutine_threadsafe(served.call(work), loop).result()

            tasks = Tasks(served, self.drawn, tally, CALLERS)
            keeping = asyncio.to_thread(self.keeper.work, call)
            keeper = asyncio.ensure_future(keeping)
            await asyncio.sleep(seconds)
            self.keeper.stop()
            await keeper
            tasks.stop()
            if closes:
                await served.close()
                tally.note("closed under load")
            await tasks.join()
        self._count(served.metrics())

    def _count(self, metrics: dict[str, int]) -> None:
        """What a server's scheduler says, whose requests have all ended."""
        for what in ("preempted", "steps"):
            self.tally.note(what, metrics[what])
        live = {state: metrics[state] for state in ("waiting", "prefilling", "decoding")}
        if any(live.values()):
            self.tally.complain(f"requests that have not ended: {live}")

    def _restart(self) -> None:
        """Another runner of the same folder answers as the first, and is gone again."""
        again = self.served.another()
        with self.tally.watched("a runner that restarts"):
            kept = () if again.tiers is None else again.tiers.disk.store.documents()
            for space in {space for space, *_ in kept}:
                try:
                    restored = again.restore(namespace=space)
                except KvweaveError:
                    self.tally.note("no room to restore all")
                else:
                    self.tally.note("restored by another runner", len(restored))
            self.probes.ask(again, drops=False)
        again.close()
        self.tally.note("restarts")

    def verify_store(self) -> None:
        """Complains of files that are not what they should be."""
        store = self.served.runner.tiers.disk.store
        with self.tally.watched("the store"):
            for one in store.list():
                store.verify(one.name)
            wrong = store.verify_documents()
            if wrong:
                self.tally.complain(f"documents without a shard: {wrong}")

    def _look(self, when: str) -> None:
        self.quiets += 1
        self._complain(when, left_behind(self.served))

    def _complain(self, when: str, found: Any) -> None:
        with self.tally.watched(f"{self.served.kind.name}, {when}"):
            for what in found:
                self.tally.complain(f"{self.served.kind.name}, {when}: {what}")


class Soak:
    """All loads in turns, for so many seconds, or twice as long until everything has happened."""

    def __init__(
        self, folder: Path, remote: RemoteStore, seed: int, kinds: Sequence[Kind] = KINDS
    ) -> None:
        # What the process holds already is no business of the loads.
        self.alive = live_objects()
        model = tiny_llama()
        self.loads = [
            LoadedRunner(Served(kind, model, folder, remote), seed + number)
            for number, kind in enumerate(kinds)
        ]
        self.memory, self.begun = Memory(), time.monotonic()
        self.open: Open | None = None
        self.threads: list[int] = []
        self.complaints: list[str] = []
        self.told: set[str] = set()

    @property
    def past(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.begun

    @property
    def never(self) -> list[str]:
        """What has not happened yet."""
        seen = {what for load in self.loads for what, n in load.tally.counts.items() if n}
        seen |= {f"from {one}" for load in self.loads for one in load.tally.sources}
        wanted = dict.fromkeys(what for load in self.loads for what in load.served.kind.all_events)
        return [what for what in wanted if what not in seen]

    @property
    def all_complaints(self) -> list[str]:
        """Its own, and those of the loads."""
        return [*self.complaints, *(one for load in self.loads for one in load.tally.complaints)]

    def run(self, seconds: float, loaded_s: float, turns: int = 1) -> None:
        """Turns until it is time; then what is held is given up, and threads end.

        `turns`: so many of each load at least, however long they take on a busy machine.
        """
        while (
            self.past < seconds
            or (self.never and self.past < 2 * seconds)
            or min(load.turns for load in self.loads) < turns
        ):
            for load in self.loads:
                load.turn(loaded_s)
            self.look()
        for load in self.loads:
            if load.served.kind.has_tiers:
                load.verify_store()
            load._complain("emptied at last", emptied(load.served.runner, load.served.kind.zeroes))
            load.served.runner.close()
        self.complaints += [f"never happened: {what}" for what in self.never]
        self.complaints += self.memory.complaints()
        self.complaints += more_threads(self.threads)

    def look(self) -> None:
        """What the process holds, while nobody computes."""
        self.memory.look(self.past)
        alive = live_objects() - self.alive
        self.complaints += [f"at {self.past:.0f} s: {n} × {of} alive" for of, n in alive.items()]
        now = Open.now()
        if self.open is not None:
            self.threads.append(now.threads)
            self.complaints += [f"at {self.past:.0f} s: {one}" for one in now.beyond(self.open)]
        elif len(self.memory.seconds) >= WARM_TURNS:
            self.open = now
        turns = sum(load.turns for load in self.loads)
        done = sum(load.tally.counts["finished"] for load in self.loads)
        complaints = self.all_complaints
        for one in complaints:
            if one not in self.told:
                print(one, flush=True)
        self.told.update(complaints)
        resident = self.memory.resident[-1] / 2**20
        print(
            f"{self.past:.0f} s: {turns} turns, {done} answers, {resident:.1f} MiB, "
            f"{len(complaints)} complaints",
            flush=True,
        )


def main(words: list[str] | None = None) -> int:
    """Returns the exit status: 1 where there is something to complain of."""
    parser = argparse.ArgumentParser(prog="benchmarks.soak.run", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--turn", type=float, default=LOADED_S, help="seconds of load in a turn")
    parser.add_argument(
        "--kinds", nargs="*", default=[], help="words that names of kinds have; all if none"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="append to benchmarks/records")
    given = parser.parse_args(words)
    kinds = [
        kind for kind in KINDS if not given.kinds or any(word in kind.name for word in given.kinds)
    ]
    if not kinds or (given.record and len(kinds) < len(KINDS)):
        parser.error("--kinds: expected words of names, and none beside --record")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UncertifiedPolicy)
    # What a store could not keep is counted; where it may be a fault, that is complained of.
    warnings.simplefilter("ignore", StoreDegraded)
    logs = LogWatch(("kvweave",))
    with TemporaryDirectory() as made, remote_store(Path(made)) as remote:
        soak = Soak(Path(made), remote, given.seed, kinds)
        try:
            soak.run(given.seconds, given.turn)
        finally:
            logs.close()
    complaints = [*soak.all_complaints, *logs.errors]
    rows = rows_of(soak.memory, soak.past, [load.found for load in soak.loads], len(complaints))
    show(CASE, rows, given.record)
    print("\n".join(complaints) or "nothing to complain of", flush=True)
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
