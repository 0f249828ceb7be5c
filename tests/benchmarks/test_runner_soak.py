"""A mixed load on served runners, short; and the soak's checks fail where they should.

A longer one: SOAK_SECONDS=600 pytest tests/benchmarks/test_runner_soak.py.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.soak.asked import Asked, Author, document
from benchmarks.soak.clients import Clients, Drawn
from benchmarks.soak.kinds import KINDS, Alike, Kind
from benchmarks.soak.left import Open, emptied, left_behind, live_objects, more_threads
from benchmarks.soak.memory import MIB, Memory, allocated_bytes
from benchmarks.soak.probes import Probes
from benchmarks.soak.prompts import how_of, policy_of, prompt_of
from benchmarks.soak.rows import rows_of
from benchmarks.soak.run import Soak
from benchmarks.soak.served import ENGINE, Served, tiny_llama
from benchmarks.soak.tally import MOST_COMPLAINTS, Tally, wrongs
from benchmarks.soak.tasks import Tasks
from kvweave import InvalidArgument, Segment
from kvweave.errors import Cancelled
from kvweave.remote import RemoteStore

SECONDS = float(os.environ.get("SOAK_SECONDS", "6"))
TURN_S = 1.0
TURNS = 3
ONE_ROUND_S, SHORT_TURN_S = float(os.environ.get("SOAK_SECONDS", "1")), 0.4
ASKED = Asked("r1", "full", [5, 6, 7], 2)


@pytest.fixture
def remote(tmp_path: Path) -> RemoteStore:
    pytest.importorskip("opendal", reason="the extra kvweave[remote] is not installed")
    return RemoteStore("fs", {"root": str(tmp_path / "remote")})


@pytest.fixture
def served(tmp_path: Path, remote: RemoteStore) -> Iterator[Served]:
    made = Served(KINDS[0], tiny_llama(), tmp_path, remote)
    yield made
    made.runner.close()


def named(words: str) -> Kind:
    """The kind whose name begins so."""
    return next(kind for kind in KINDS if kind.name.startswith(words))


def run_without_complaints(soak: Soak, seconds: float, turn_s: float, turns: int = 1) -> None:
    threads = torch.get_num_threads()
    soak.run(seconds, turn_s, turns)
    complaints = [one for one in soak.complaints if not one.startswith("never happened")]
    complaints += [one for load in soak.loads for one in load.tally.complaints]
    assert not complaints, "\n".join(complaints)
    assert torch.get_num_threads() == threads


@pytest.mark.long
def test_a_mixed_load_leaves_nothing_and_answers_as_in_quiet(
    tmp_path: Path, remote: RemoteStore
) -> None:
    soak = Soak(tmp_path, remote, 0, KINDS[:2])
    run_without_complaints(soak, SECONDS, TURN_S, TURNS)
    assert all(load.tally.counts["finished"] > 5 for load in soak.loads)
    assert all(load.probes.compared > 20 for load in soak.loads)
    rows = rows_of(soak.memory, soak.past, [load.found for load in soak.loads], 3)
    assert len({row.name for row in rows}) == len(rows)
    assert [row.value for row in rows if row.name == "complaints"] == [3]


@pytest.mark.long
def test_so_it_is_over_host_memory_and_packed_pages(tmp_path: Path, remote: RemoteStore) -> None:
    some = [named(words) for words in ("host memory, exact", "host memory, whole", "int4", "int8")]
    soak = Soak(tmp_path, remote, 1, KINDS[2:] if "SOAK_SECONDS" in os.environ else some)
    run_without_complaints(soak, ONE_ROUND_S, SHORT_TURN_S)
    for load in soak.loads:
        assert load.tally.counts["finished"] > 1
        assert (load.probes.compared > 0) == (load.served.kind.alike != Alike((), ()))
        if load.served.runner.host:
            assert load.tally.counts["times that host memory was taken"] > 5


def answered(**changes: Any) -> Any:
    """An answer to `ASKED`, in which something is wrong."""
    report = SimpleNamespace(tokens=3, reused_prefix=1, reused_segment=0)
    report.recomputed, report.resumed, report.documents = changes.pop("recomputed", 2), 0, []
    report.speculation = report.packed = None
    return SimpleNamespace(report=report, **{"tokens": [8, 9], "stopped": False, **changes})


def test_answers_that_cannot_be_are_complained_of() -> None:
    assert not list(wrongs(ASKED, answered(), [8, 9]))
    assert not list(wrongs(replace(ASKED, stop=["9 "]), answered(tokens=[8], stopped=True), None))
    for wrong in (
        answered(tokens=[8]),
        answered(tokens=[8, 9, 9]),
        answered(stopped=True),
        answered(recomputed=1),
    ):
        assert len(list(wrongs(ASKED, wrong, None))) == 1
    assert list(wrongs(ASKED, answered(), [8])) == ["heard [8], said [8, 9]"]
    assert list(wrongs(replace(ASKED, tokens=[5]), answered(), None)) == [
        "3 tokens of a prompt of 1"
    ]


def test_a_tally_keeps_some_answers_and_few_complaints() -> None:
    tally = Tally()
    for _ in range(30):
        tally.answered(ASKED, answered(tokens=[8]))
    assert len(tally.take_kept()) == 12
    assert tally.take_kept() == []
    assert (tally.counts["finished"], len(tally.complaints)) == (30, 30)
    with tally.watched("somebody"):
        raise ValueError("lost")
    assert "somebody" in tally.complaints[-1]
    assert "lost" in tally.complaints[-1]
    for _ in range(100):
        tally.complain("more")
    assert len(tally.complaints) == MOST_COMPLAINTS


def test_whoever_holds_something_is_seen(served: Served) -> None:
    runner = served.runner
    _, name, tokens = document(2)
    runner.insert(tokens, name, "one")
    runner.flush()
    assert list(left_behind(served)) == []
    with runner.pin([Segment(tokens=tokens, namespace="one")]):
        held = list(left_behind(served))
        assert len(held) == 1
        assert "blocks held on the device" in held[0]
        assert live_objects()["Pin"]
    (served.folder / "writing" / "left").touch()
    assert list(left_behind(served)) == ["1 files that nobody writes"]
    (served.folder / "writing" / "left").unlink()
    # What nobody zeroes stays where it was, also when all is given up.
    found = list(emptied(runner, zeroes=True))
    assert [one.split(" ", 1)[1] for one in found] == [
        "bytes in freed pages of the device",
        "bytes in freed pages of the host",
    ]
    assert list(emptied(runner, zeroes=False)) == []


@pytest.mark.parametrize(
    ("kind", "held"), [("host memory, exact", "host's memory of head"), ("int4", "packed blocks")]
)
def test_pages_that_are_held_elsewhere_are_seen(
    kind: str, held: str, tmp_path: Path, remote: RemoteStore
) -> None:
    served = Served(named(kind), tiny_llama(), tmp_path, remote)
    runner = served.runner
    tokens = [1 + number % 500 for number in range(1500)]
    assert list(left_behind(served)) == []
    with runner.prefill(tokens, "full", remember=False):
        assert any(held in one for one in left_behind(served))
        with closing(runner.engine(**ENGINE)) as engine:
            engine.submit(tokens[:200], "full", max_new_tokens=9, stop=())
            while not engine.metrics()["decoding"]:
                engine.step()
            engine.step()
            assert any("places of bounds" in one for one in left_behind(served)) == bool(
                runner.host
            )
    assert list(left_behind(served)) == []
    assert list(emptied(runner, zeroes=False)) == []
    runner.close()


def test_answers_that_depend_on_what_went_before_are_not_compared() -> None:
    alike = Alike(turns=False, resumed=False, tokens=5, found=1)
    assert alike.holds(ASKED, answered())
    second = replace(ASKED, before="r0")
    for asked in (second, replace(ASKED, n=2), replace(ASKED, kind="naive")):
        assert not alike.holds(asked, answered())
    assert not alike.holds(replace(ASKED, answer=3), answered())
    resumed, found = answered(), answered()
    resumed.report.resumed, found.report.reused_segment = 1, 1
    assert not alike.holds(ASKED, resumed)
    assert not alike.holds(ASKED, found)
    assert Alike().holds(second, resumed)


def test_requests_that_live_threads_and_files_are_seen(served: Served, tmp_path: Path) -> None:
    before = Open.now()
    assert list(before.beyond(before)) == []
    with (tmp_path / "file").open("w"):
        assert len(list(Open.now().beyond(before))) == 1
    alive = live_objects()
    with closing(served.runner.engine(**ENGINE)) as engine:
        request = engine.submit([1, 2, 3], max_new_tokens=1)
        assert set(live_objects() - alive) >= {"EngineRequest", "Engine"}
        assert engine.cancel(request)


def test_threads_that_a_library_makes_once_are_none_that_were_left_behind() -> None:
    made_once = [19, 19, 22, *[22] * 15]
    assert list(more_threads(made_once)) == list(more_threads([])) == []
    assert list(more_threads([19, 22] * 20)) == []
    adding_up = [19 + number // 8 for number in range(40)]
    assert list(more_threads(adding_up)) == ["23 threads in the second half, 21 in the first"]
    assert list(more_threads([19] * 12 + [20] * 12)) != []


def test_a_thread_of_python_that_goes_on_is_seen() -> None:
    before, end = Open.now(), threading.Event()
    thread = threading.Thread(target=end.wait, name="left behind")
    thread.start()
    (found,) = Open.now().beyond(before)
    end.set()
    thread.join()
    assert "threads of Python" in found
    assert "left behind" in found


def test_other_answers_than_the_first_are_seen(served: Served) -> None:
    tally = Tally()
    probes = Probes(served, tally)
    probes.ask(served.runner, drops=False)
    probes.ask(served.runner, drops=True)
    assert tally.complaints == []
    asked = Asked("r2", "plain", [7, 8, 9, 10], 4)
    how = {**how_of(asked), "remember": False}
    said = served.twin.generate(prompt_of(asked), policy_of(asked), **how).tokens
    probes.compare([(asked, said)])
    assert (tally.complaints, probes.ties) == ([], 0)
    probes.compare([(asked, [said[0], (said[1] + 1) % 500, *said[2:]])])
    assert len(tally.complaints) == 1
    probes.first[0] = [*probes.first[0][:-1], 501]
    probes.ask(served.runner, drops=False)
    assert len(tally.complaints) == 2


class SilentServer:
    """Takes requests and answers none, until it is closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.asked = threading.Event()

    def submit(self, *_: Any, **__: Any) -> Any:
        if self.closed.is_set():
            raise InvalidArgument("server: expected an open one, got one that was closed")
        self.asked.set()
        return SilentRequest(self)

    def metrics(self) -> dict[str, int]:
        return {"decoding": 1}

    def close(self) -> None:
        self.closed.set()


class SilentRequest:
    """A request of such a server, whichever way it is waited for."""

    outcome, tokens = "cancelled", ()

    def __init__(self, server: SilentServer) -> None:
        self._server = server

    def __iter__(self) -> Iterator[Any]:
        self.result()
        yield from ()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def result(self, timeout: float | None = None) -> Any:
        self._server.closed.wait()
        raise Cancelled("closed")

    def cancel(self) -> bool:
        return True

    def take(self) -> list[Any]:
        return []


def test_requests_without_an_end_are_seen() -> None:
    tally, server = Tally(), SilentServer()
    asking: Any = server
    clients = Clients(asking, Drawn(Author(0), 0), tally, 3)
    assert server.asked.wait(10)
    clients.stop()
    clients.join(0.2)
    assert tally.complaints == ["requests without an end: {'decoding': 1}"]
    served = SilentRunner()
    asyncio.run(asked_without_an_end(served, tally))
    assert tally.complaints[1:] == ["requests without an end: {'decoding': 2}"]


class SilentRunner:
    """The same for tasks of a loop."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def generate(self, *_: Any, **__: Any) -> Any:
        await self.closed.wait()
        raise Cancelled("closed")

    async def stream(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        await self.generate()
        yield None

    def metrics(self) -> dict[str, int]:
        return {"decoding": 2}

    async def close(self) -> None:
        self.closed.set()


async def asked_without_an_end(served: Any, tally: Tally) -> None:
    tasks = Tasks(served, Drawn(Author(0), 0), tally, 6)
    await asyncio.sleep(0)
    tasks.stop()
    await tasks.join(1.5)


def test_bytes_that_the_c_library_gives_out_are_counted() -> None:
    before = allocated_bytes()
    if not before:
        pytest.skip("the C library is not glibc's")
    held = torch.zeros(8 * MIB, dtype=torch.uint8)
    assert allocated_bytes() - before > 7 * MIB
    memory = Memory()
    for second in range(6):
        memory.look(float(second))
    del held
    assert memory.slope([0, 0, 0, 0, MIB, 2 * MIB]) == pytest.approx(MIB)
    assert memory.complaints() == []


def test_prompts_are_said_as_they_were_asked() -> None:
    author = Author(5)
    author.there = list(range(1, 9))
    tokenizer = Served.tokenizer()
    marked = 0
    for _ in range(80):
        asked, tokens = author.request(), []
        for part in (prompt := prompt_of(asked)):
            if isinstance(part, Segment):
                tokens += list(part.tokens or ())
                marked += 1
            elif isinstance(part, str):
                tokens += tokenizer(part, add_special_tokens=False).input_ids
        assert (tokens or prompt) == asked.tokens
    assert marked > 20
